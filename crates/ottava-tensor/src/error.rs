//! The error type of this crate. An error says what happened, where it happened, and what to change.

use crate::dtype::DType;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a tensor op or of the CUDA libraries below it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor's shape does not fit the op.
    #[error("{what} has shape {got:?}, expected {expected}")]
    Shape {
        /// The op and argument, such as `rmsnorm: weight`.
        what: String,
        /// The expected shape, in words or numbers.
        expected: String,
        /// The actual shape.
        got: Vec<usize>,
    },
    /// A tensor's element type does not fit the op.
    #[error("{what} is {got}, expected {expected}")]
    DType {
        /// The op and argument.
        what: String,
        /// The accepted types.
        expected: String,
        /// The actual type.
        got: DType,
    },
    /// Tensors of one op are on different devices, or the device cannot run the op.
    #[error("{what} lies on {got}, expected {expected}")]
    Placement {
        /// The op and argument.
        what: String,
        /// The expected device.
        expected: String,
        /// The actual device.
        got: String,
    },
    /// A value is outside the range that the op accepts.
    #[error("{0}")]
    Value(String),
    /// A CUDA library or one of its symbols could not be found.
    #[error("{library} is not usable: {reason}. {remedy}")]
    Library {
        /// The library's usual name, such as `cuBLASLt`.
        library: &'static str,
        /// The searched names and folders, or the missing symbols.
        reason: String,
        /// The way to get the library.
        remedy: String,
    },
    /// A call into a CUDA library returned an error status.
    #[error("{library}: {call} failed: {message}")]
    Cuda {
        /// The library's usual name.
        library: &'static str,
        /// The function, with a description of its work if the description helps.
        call: String,
        /// The library's message.
        message: String,
    },
    /// A kernel did not compile. The error contains the compiler's log.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// The name of the kernel source.
        kernel: String,
        /// NVRTC's log.
        log: String,
    },
    /// Device memory is exhausted.
    #[error("out of device memory: {requested} bytes asked for, {free} of {total} free")]
    OutOfMemory {
        /// The number of bytes of the allocation that failed.
        requested: usize,
        /// The number of free bytes on the device at that moment.
        free: usize,
        /// The number of bytes of the device.
        total: usize,
    },
    /// The host has no memory left that a device can reach.
    #[error(
        "out of host memory: {requested} bytes asked for that stay in place for the GPU; offload less, or raise the limit of locked memory"
    )]
    HostMemory {
        /// The number of bytes of the allocation that failed.
        requested: usize,
    },
    /// The group of ranks did not form or cannot continue.
    #[error("{message}")]
    Ranks {
        /// The fault of the rank.
        fault: RankFault,
        /// A sentence that names ranks, processes and the collective.
        message: String,
        /// The last collectives of the rank that reports the error, oldest first.
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

/// The reason why a group of ranks failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankFault {
    /// A rank ended, or sent nothing for longer than a limit.
    Lost,
    /// Ranks called different collectives.
    Desync,
    /// A live rank did not call a collective within a limit, or its GPU did not finish its work within the limit.
    Late,
    /// The group did not form: a rank is missing, or the ranks do not belong together.
    Rendezvous,
}
