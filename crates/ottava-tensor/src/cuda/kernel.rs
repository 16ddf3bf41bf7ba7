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

/// One kernel: its source, how it is compiled and its name in there.
#[derive(Debug)]
pub struct Kernel {
    /// The text it lives in.
    pub source: &'static Source,
    /// The macros.
    pub defines: Defines,
    /// The `extern "C"` name.
    pub entry: &'static str,
}

impl Kernel {
    /// The module that holds it.
    pub fn module(&self) -> KernelModule {
        KernelModule { source: self.source, defines: self.defines }
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
