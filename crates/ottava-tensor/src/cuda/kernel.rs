//! The contents of a launch: kernels, their sources and their arguments.

use crate::capability::{Capability, Feature};
use crate::error::{Error, Result};
use std::hash::{Hash, Hasher};

/// The CUDA C++ of one op, which is complete except for macros.
#[derive(Debug)]
pub struct Source {
    /// The name of the op in error messages.
    pub name: &'static str,
    /// The text of the translation unit.
    pub text: &'static str,
    /// The features that a GPU must have in addition to compute capability 8.0 to run each kernel of the source.
    pub needs: &'static [Feature],
    /// The Rust constants that the text names. Each constant is passed as `-DNAME=VALUE`.
    pub constants: &'static [(&'static str, i64)],
    /// The macros of value 1 at the beginning of the text.
    pub macros: &'static [&'static str],
    /// The declared kernels of the op. The macros of this source determine which of these kernels it contains.
    pub signatures: &'static [Signature],
}

impl Source {
    /// Creates a source that belongs to no op and declares no kernels, for launches on a GPU.
    #[cfg(test)]
    pub(crate) const fn bare(name: &'static str, text: &'static str) -> Source {
        Source { name, text, needs: &[], constants: &[], macros: &[], signatures: &[] }
    }

    /// Returns a kernel of this source, compiled with `defines`, and its arguments.
    pub fn kernel(&'static self, defines: Defines, entry: Entry) -> Kernel {
        Kernel { source: self, defines, entry: entry.name, args: entry.args }
    }
}

/// The kernels of an op that have the same parameters.
#[derive(Debug)]
pub struct Signature {
    /// The `extern "C"` names.
    pub names: &'static [&'static str],
    /// The parameters in order.
    pub parameters: &'static [Parameter],
}

/// A declared parameter of a kernel.
#[derive(Debug)]
pub struct Parameter {
    /// The name. It is empty for a struct that the launch appends.
    pub name: &'static str,
    /// The type in Rust, such as `*const X`.
    pub of: &'static str,
    /// The form of the argument.
    pub kind: Kind,
    /// The macro that the kernel needs to have this parameter, if it needs one.
    pub only_with: Option<&'static str>,
}

/// The form of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A pointer to constants or to memory that the kernel writes.
    Pointer,
    /// `int`
    I32,
    /// `unsigned`
    U32,
    /// `long long`
    I64,
    /// `unsigned long long`
    U64,
    /// `float`
    F32,
    /// `double`
    F64,
    /// A [`TensorMap`].
    Map,
    /// A struct, which is the last parameter and is passed as consecutive 64-bit arguments.
    Struct,
}

impl Kind {
    /// Returns whether `arg` is an argument of this form, or one 64-bit word of a struct.
    fn takes(self, arg: &Arg) -> bool {
        match self {
            Kind::Pointer => matches!(arg, Arg::Ptr(_)),
            Kind::I32 => matches!(arg, Arg::I32(_)),
            Kind::U32 => matches!(arg, Arg::U32(_)),
            Kind::I64 => matches!(arg, Arg::I64(_)),
            // A double is passed as its bits.
            Kind::U64 | Kind::F64 => matches!(arg, Arg::U64(_)),
            Kind::F32 => matches!(arg, Arg::F32(_)),
            Kind::Map => matches!(arg, Arg::Map(_)),
            Kind::Struct => matches!(arg, Arg::Ptr(_) | Arg::U64(_) | Arg::I64(_)),
        }
    }
}

/// The macros that a source is compiled with. Each macro is passed as `-DNAME=VALUE`.
pub type Defines = &'static [(&'static str, &'static str)];

/// A source and its macros. NVRTC compiles them in one call to a cubin with one or several kernels.
#[derive(Clone, Copy, Debug)]
pub struct KernelModule {
    /// The source.
    pub source: &'static Source,
    /// The macros.
    pub defines: Defines,
}

impl KernelModule {
    /// Returns [`Error::Value`] if GPUs of this capability lack a feature that the module needs. The message calls the GPU `gpu`.
    pub(super) fn expect_on(&self, capability: &Capability, gpu: &str) -> Result<()> {
        let lacks: Vec<_> = capability.lacks(self.source.needs).iter().map(Feature::to_string).collect();
        if lacks.is_empty() {
            return Ok(());
        }
        Err(Error::Value(format!(
            "the kernel `{}` needs {}, which {gpu} (compute capability {}.{}) does not have; `ottava plan --gpu` lists what runs there",
            self.source.name,
            lacks.join(" and "),
            capability.version.0,
            capability.version.1
        )))
    }

    /// Returns the parameters of `signature` that a kernel of this module has.
    pub(crate) fn parameters(self, signature: &Signature) -> impl Iterator<Item = &Parameter> {
        let has = move |name: &&str| self.source.macros.contains(name) || self.defines.iter().any(|d| d.0 == *name);
        signature.parameters.iter().filter(move |parameter| parameter.only_with.as_ref().is_none_or(has))
    }

    /// Returns a key with the address of the text, which identifies a static source without hashing the text.
    fn key(&self) -> (usize, Defines) {
        (self.source.text.as_ptr() as usize, self.defines)
    }
}

impl PartialEq for KernelModule {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for KernelModule {}

impl Hash for KernelModule {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// The name of a kernel, and its arguments in the order of its parameters.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The `extern "C"` name.
    pub name: &'static str,
    /// The arguments.
    pub args: Vec<Arg>,
}

/// One kernel: its source, its macros, its name in the source, and its arguments.
#[derive(Debug)]
pub struct Kernel {
    /// The source that contains the kernel.
    pub source: &'static Source,
    /// The macros.
    pub defines: Defines,
    /// The `extern "C"` name.
    pub entry: &'static str,
    /// The arguments in the order of the parameters.
    pub args: Vec<Arg>,
}

impl Kernel {
    /// Returns the module that contains the kernel.
    pub fn module(&self) -> KernelModule {
        KernelModule { source: self.source, defines: self.defines }
    }

    /// Panics if the op does not declare this kernel, or declares parameters that do not fit the arguments.
    pub(super) fn expect_declared(&self) {
        let name = self.entry;
        let signature = self.source.signatures.iter().find(|signature| signature.names.contains(&name));
        let signature =
            signature.unwrap_or_else(|| panic!("the op `{}` declares no kernel `{name}`", self.source.name));
        let mut args = self.args.iter();
        for parameter in self.module().parameters(signature) {
            let Parameter { name: of, of: declared, kind, .. } = parameter;
            let takes = |arg: Option<&Arg>| {
                assert!(
                    arg.is_some_and(|arg| kind.takes(arg)),
                    "`{name}` takes `{of}: {declared}`, and the launch passes {arg:?}"
                );
            };
            takes(args.next());
            if *kind == Kind::Struct {
                args.by_ref().for_each(|word| takes(Some(word)));
            }
        }
        assert_eq!(args.len(), 0, "the launch of `{name}` passes more arguments than the kernel has parameters");
    }
}

/// The number of bytes of dynamic shared memory that a kernel may request without a higher limit. A launch with more bytes raises the limit of the
/// function.
pub(crate) const DEFAULT_SHARED_BYTES: usize = 48 << 10;

/// One argument of a kernel. Each variant names the C type of its parameter.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// A pointer into device memory.
    Ptr(u64),
    /// `int`
    I32(i32),
    /// `unsigned`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`, or `size_t`
    U64(u64),
    /// `float`
    F32(f32),
    /// `const __grid_constant__ TensorMap`
    Map(TensorMap),
}

/// A matrix that the copy engine of a multiprocessor reads. The engine reads boxes of some rows with [`TensorMap::BOX_BYTES`] bytes each, and
/// swizzles their 16-byte pieces within groups of eight rows. The part of a box outside the matrix is zero.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// The address of the matrix, a multiple of 16.
    pub(super) address: u64,
    /// The number of bytes of a row.
    pub row_bytes: usize,
    dims: [BoxDim; 3],
    /// The number of `dims` in use.
    used: usize,
}

/// A dimension of a [`TensorMap`] beyond the bytes of a row: rows, groups of rows, or heads.
#[derive(Clone, Copy, Debug)]
pub struct BoxDim {
    /// The number of rows, groups or heads.
    pub size: usize,
    /// The number of bytes from one to the next, a multiple of 16. Groups may overlap.
    pub pitch: usize,
    /// The number of them in a box, at most 256.
    pub of_box: usize,
}

impl TensorMap {
    /// The number of bytes of a row of a box.
    pub const BOX_BYTES: usize = 128;

    /// Returns a map of `rows` rows. A box has `box_rows` of them, at most 256.
    pub fn matrix(address: u64, rows: usize, row_bytes: usize, pitch: usize, box_rows: usize) -> TensorMap {
        TensorMap::new(address, row_bytes, &[BoxDim { size: rows, pitch, of_box: box_rows }])
    }

    /// Returns a map with up to three dimensions beyond the bytes of a row.
    pub fn new(address: u64, row_bytes: usize, dims: &[BoxDim]) -> TensorMap {
        let mut all = [BoxDim { size: 1, pitch: 16, of_box: 1 }; 3];
        all[..dims.len()].copy_from_slice(dims);
        TensorMap { address, row_bytes, dims: all, used: dims.len() }
    }

    /// Returns the dimensions beyond the bytes of a row.
    pub(super) fn dims(&self) -> &[BoxDim] {
        &self.dims[..self.used]
    }
}
