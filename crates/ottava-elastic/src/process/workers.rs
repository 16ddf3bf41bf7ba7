//! What a keeper asks of the program that starts workers, and what it learns of them.

use crate::message::Epoch;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where workers take their state from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resume {
    /// From where the command line says. No worker of the job has run before.
    Start,
    /// From the newest checkpoint on disk, or from the beginning.
    Disk,
    /// From a snapshot in this folder of the host's memory.
    Memory(PathBuf),
}

/// The workers of one host in an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The epoch.
    pub epoch: Epoch,
    /// The place of the host. Its first rank is this number times the ranks of a host.
    pub place: u32,
    /// The number of places.
    pub places: u32,
    /// The address at which rank 0 listens.
    pub address: String,
    /// The state.
    pub resume: Resume,
    /// The socket of the keeper, for [`WorkerLink`](super::WorkerLink).
    pub socket: PathBuf,
    /// The folder in which the workers write snapshots.
    pub snapshots: PathBuf,
}

/// How the workers of a host ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkersEnd {
    /// A worker was killed, or lost other ranks. The text names it.
    Lost(String),
    /// All workers ended by themselves, with this exit code: the first one that is not 0.
    Ended(u8),
}

/// The worker processes of a host.
pub trait Workers {
    /// Starts workers. Errors with the reason if the system starts no process.
    fn start(&mut self, launch: &Launch) -> Result<(), String>;

    /// Kills all workers, and returns when they have ended.
    fn stop(&mut self);

    /// Returns how the workers ended, if they have ended or if one of them was killed. Returns it once.
    fn poll(&mut self) -> Option<WorkersEnd>;
}
