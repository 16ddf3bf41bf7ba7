//! The only error type of this crate. Every message is a sentence: what happened, where, and what to change.

use std::path::Path;

/// A `std::result::Result` with this crate's [`Error`] as the default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a command failed. [`Error::exit_code`] returns the exit code of the process.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration file or a command-line setting is wrong.
    #[error("{0}")]
    Config(String),
    /// A model folder is missing, damaged or of an unknown kind.
    #[error("{0}")]
    Model(String),
    /// Training or evaluation data is missing, damaged or empty.
    #[error("{0}")]
    Data(String),
    /// A step has no target token. Nothing has changed.
    #[error("{0}")]
    NoTargets(String),
    /// A checkpoint is missing, incomplete or does not belong to this run.
    #[error("{0}")]
    Checkpoint(String),
    /// The actions of a step cannot run in their order.
    #[error("{0}")]
    Program(String),
    /// A loss, gradient or weight is not finite.
    #[error("{0}")]
    NonFinite(String),
    /// The same computation gave different bits: the hardware is not reliable.
    #[error("{0}")]
    Corruption(String),
    /// A run does not fit its device. The message has planned and measured memory, and changes that fit.
    #[error("{0}")]
    Memory(String),
    /// A signal asked the run to stop. The message says what was saved, and where.
    #[error("{0}")]
    Interrupted(String),
    /// The sentinel ended the run. The message says what the sentinel found, and where the checkpoint is.
    #[error("{0}")]
    Paused(String),
    /// An alarm ended the run without a checkpoint. The message says what the alarm found.
    #[error("{0}")]
    Alarm(String),
    /// A signal asked the process to stop while there was nothing to save.
    #[error("{0}")]
    Cancelled(String),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A program or a server outside of Ottava failed, such as the command of a reward.
    #[error("{0}")]
    External(String),
    /// Another rank failed and reports the error in full.
    #[error("rank {rank}: {words}")]
    Rank {
        /// The rank that failed.
        rank: usize,
        /// The error of this rank.
        words: String,
    },
    /// An op, the device or one of its libraries failed.
    #[error(transparent)]
    Tensor(#[from] ottava_tensor::Error),
}

impl Error {
    /// The exit code of a process whose group of ranks has failed.
    pub const RANKS: u8 = 5;

    /// Returns the error of ranks that should be equal but differ. `message` describes the difference. The exit code is [`Error::RANKS`].
    pub fn diverged(message: String) -> Error {
        ottava_tensor::Error::Ranks { fault: ottava_tensor::RankFault::Desync, message, recent: Vec::new() }.into()
    }

    /// Converts a system error at `path` to an [`Error::Io`], for use with `map_err`.
    ///
    /// If the system error contains an error of this crate, such as [`Error::Cancelled`], that error is returned.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.as_ref().display().to_string();
        move |source| source.downcast::<Error>().unwrap_or_else(|source| Error::Io { path, source })
    }

    /// Returns whether a run has stopped on request, without a failure.
    pub fn is_stop(&self) -> bool {
        matches!(self, Error::Interrupted(_) | Error::Paused(_) | Error::Cancelled(_))
    }

    /// Returns the exit code of the process:
    ///
    /// * 1 configuration or model, 2 data, 3 out of memory, 4 not finite, 5 other ranks, 6 a program or server outside of Ottava,
    ///   7 damaged checkpoint, 8 device
    /// * 75 stopped by a signal with a good checkpoint, 76 ended by the sentinel or an alarm with a good checkpoint, 77 ended by an alarm
    /// * 130 stopped with nothing to save
    pub fn exit_code(&self) -> u8 {
        use ottava_tensor::Error as T;
        match self {
            Error::Config(_) | Error::Model(_) | Error::Program(_) | Error::Io { .. } => 1,
            Error::Data(_) | Error::NoTargets(_) => 2,
            Error::NonFinite(_) => 4,
            Error::External(_) => 6,
            Error::Checkpoint(_) => 7,
            Error::Interrupted(_) => 75,
            Error::Paused(_) => 76,
            Error::Alarm(_) => 77,
            Error::Cancelled(_) => 130,
            Error::Memory(_) | Error::Tensor(T::OutOfMemory { .. } | T::HostMemory { .. }) => 3,
            Error::Corruption(_) | Error::Tensor(T::Library { .. } | T::Cuda { .. } | T::Compile { .. }) => 8,
            Error::Rank { .. } | Error::Tensor(T::Ranks { .. }) => Error::RANKS,
            Error::Tensor(_) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_device_out_of_memory_share_exit_code_3() {
        assert_eq!(Error::from(ottava_tensor::Error::HostMemory { requested: 1 }).exit_code(), 3);
        let device = ottava_tensor::Error::OutOfMemory { requested: 1, free: 0, total: 0 };
        assert_eq!(Error::from(device).exit_code(), 3);
    }

    #[test]
    fn a_failed_group_of_ranks_is_exit_code_5() {
        let fault = ottava_tensor::RankFault::Lost;
        let error = ottava_tensor::Error::Ranks { fault, message: "rank 1 ended".into(), recent: Vec::new() };
        assert_eq!((error.to_string(), Error::from(error).exit_code()), ("rank 1 ended".into(), 5));
    }

    #[test]
    fn an_error_keeps_its_kind_through_a_reader() {
        let error = std::io::Error::other(Error::Cancelled("stopped".into()));
        assert!(matches!(Error::io("file")(error), Error::Cancelled(_)));
    }
}
