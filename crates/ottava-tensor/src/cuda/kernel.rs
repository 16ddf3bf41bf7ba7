//! What a launch names: kernels, the sources they are compiled from, and their arguments.

use crate::capability::{Capability, Feature};
use crate::error::{Error, Result};
use std::hash::{Hash, Hasher};

/// CUDA C++ that belongs to one op, complete but for macros.
#[derive(Debug)]
pub struct Source {
    /// The op, as it appears in error messages.
    pub name: &'static str,
    /// The text of the translation unit.
    pub text: &'static str,
    /// What a GPU must have beyond compute capability 8.0 to run all of it.
    pub needs: &'static [Feature],
    /// Constants of Rust that the text names, each passed as `-DNAME=VALUE`.
    pub constants: &'static [(&'static str, i64)],
    /// Macros of value 1 at the beginning of the text.
    pub macros: &'static [&'static str],
    /// The declared kernels of the op. Which of them this source has depends on its macros.
    pub signatures: &'static [Signature],
}

impl Source {
    /// A source of no op, without declared kernels, for launches on a GPU.
    #[cfg(test)]
    pub(crate) const fn bare(name: &'static str, text: &'static str) -> Source {
        Source { name, text, needs: &[], constants: &[], macros: &[], signatures: &[] }
    }

    /// A kernel of this source, compiled with `defines`, and its arguments.
    pub fn kernel(&'static self, defines: Defines, entry: Entry) -> Kernel {
        Kernel { source: self, defines, entry: entry.name, args: entry.args }
    }
}

/// Kernels that have the same parameters, as an op declares them.
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
    /// Its name; empty for a struct that the launch appends.
    pub name: &'static str,
    /// Its type in Rust, such as `*const X`.
    pub of: &'static str,
    /// The form of its argument.
    pub kind: Kind,
    /// The macro without which the kernel lacks this parameter.
    pub only_with: Option<&'static str>,
}

/// The form of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A pointer, to constants or to memory that the kernel writes.
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
    /// A struct, the last parameter, passed as consecutive 64-bit arguments.
    Struct,
}

impl Kind {
    /// Whether `arg` is an argument, or a word, of this form.
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

/// Macros that a source is compiled with, each passed as `-DNAME=VALUE`.
pub type Defines = &'static [(&'static str, &'static str)];

/// A source and its macros: what NVRTC compiles in one go, to a cubin of one or several kernels.
#[derive(Clone, Copy, Debug)]
pub struct KernelModule {
    /// The text.
    pub source: &'static Source,
    /// The macros.
    pub defines: Defines,
}

impl KernelModule {
    /// Errors with [`Error::Value`] if GPUs of this capability lack something that it needs; `gpu` is the GPU in the message.
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

    /// The parameters that a kernel of this module has.
    pub(crate) fn parameters(self, signature: &Signature) -> impl Iterator<Item = &Parameter> {
        let has = move |name: &&str| self.source.macros.contains(name) || self.defines.iter().any(|d| d.0 == *name);
        signature.parameters.iter().filter(move |parameter| parameter.only_with.as_ref().is_none_or(has))
    }

    /// The address of the text, which identifies a static source without hashing it.
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

/// One kernel: its source, how it is compiled, its name in there and its arguments.
#[derive(Debug)]
pub struct Kernel {
    /// The text it lives in.
    pub source: &'static Source,
    /// The macros.
    pub defines: Defines,
    /// The `extern "C"` name.
    pub entry: &'static str,
    /// The arguments in the order of its parameters.
    pub args: Vec<Arg>,
}

impl Kernel {
    /// The module that holds it.
    pub fn module(&self) -> KernelModule {
        KernelModule { source: self.source, defines: self.defines }
    }

    /// Panics if the op does not declare this kernel, or declares other parameters than it has arguments.
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

/// Bytes of dynamic shared memory that any kernel may ask for; a launch with more raises the limit of the function first.
pub(crate) const DEFAULT_SHARED_BYTES: usize = 48 << 10;

/// One argument of a kernel, of the C type it stands for.
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

/// A matrix as the copy engine of a multiprocessor reads it: boxes of [`TensorMap::BOX_BYTES`] bytes of some rows, whose 16-byte pieces it
/// swizzles within groups of eight rows. Beyond the matrix a box has zeros.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// Where the matrix starts, a multiple of 16.
    pub address: u64,
    /// Rows.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes from one row to the next, a multiple of 16.
    pub pitch: usize,
    /// Rows of a box, at most 256.
    pub box_rows: usize,
}

impl TensorMap {
    /// Bytes of a row of a box.
    pub const BOX_BYTES: usize = 128;
}
