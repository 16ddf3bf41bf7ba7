//! The one error type of this crate: what happened, where, and what to change.

use crate::dtype::DType;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Anything that can go wrong in a tensor op or in the CUDA libraries below it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor's shape does not fit the op.
    #[error("{what} has shape {got:?}, expected {expected}")]
    Shape {
        /// Op and argument, as `rmsnorm: weight`.
        what: String,
        /// The shape asked for, in words or numbers.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A tensor's element type does not fit the op.
    #[error("{what} is {got}, expected {expected}")]
    DType {
        /// Op and argument.
        what: String,
        /// The types accepted.
        expected: String,
        /// The type that came.
        got: DType,
    },
    /// Tensors of one op lie on different devices, or the device cannot run the op.
    #[error("{what} lies on {got}, expected {expected}")]
    Placement {
        /// Op and argument.
        what: String,
        /// The device asked for.
        expected: String,
        /// The device that came.
        got: String,
    },
    /// A value lies outside what the op accepts.
    #[error("{0}")]
    Value(String),
    /// A CUDA library or one of its symbols could not be found.
    #[error("{library} is not usable: {reason}. {remedy}")]
    Library {
        /// The library's usual name, as `cuBLASLt`.
        library: &'static str,
        /// What was looked for and where, or the symbols that are missing.
        reason: String,
        /// How to get it.
        remedy: String,
    },
    /// A call into a CUDA library returned an error status.
    #[error("{library}: {call} failed: {message}")]
    Cuda {
        /// The library's usual name.
        library: &'static str,
        /// The function and, where it helps, what it was asked to do.
        call: String,
        /// The library's own words.
        message: String,
    },
    /// A kernel did not compile; the text is the compiler's log.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// Name of the kernel source.
        kernel: String,
        /// NVRTC's log.
        log: String,
    },
    /// Device memory is exhausted.
    #[error("out of device memory: {requested} bytes asked for, {free} of {total} free")]
    OutOfMemory {
        /// Bytes of the allocation that failed.
        requested: usize,
        /// Bytes free on the device at that moment.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// The host has no memory left that a device can reach.
    #[error(
        "out of host memory: {requested} bytes asked for that stay in place for the GPU; offload less, or raise the limit of locked memory"
    )]
    HostMemory {
        /// Bytes of the allocation that failed.
        requested: usize,
    },
    /// The group of ranks did not form or cannot go on.
    #[error("{message}")]
    Ranks {
        /// What went wrong.
        fault: RankFault,
        /// A sentence that names ranks, processes and the collective.
        message: String,
        /// The last collectives of the rank that reports it, oldest first.
        recent: Vec<String>,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Why a group of ranks failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankFault {
    /// A rank ended, or sent nothing for a limit.
    Lost,
    /// Ranks called different collectives.
    Desync,
    /// A live rank did not call a collective within a limit, or its GPU did not finish its work.
    Late,
    /// The group did not form: a rank is missing, or the ranks do not belong together.
    Rendezvous,
}
