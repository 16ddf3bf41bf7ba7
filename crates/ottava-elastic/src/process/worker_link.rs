//! The connection of a worker process to the keeper of its host: a socket in the memory folder, with JSON lines.

use super::memory::Listing;
use crate::message::{Epoch, Step};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The time limit of a message to the keeper.
const LIMIT: Duration = Duration::from_secs(10);

/// A message of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromWorker {
    /// The first message: the epoch for which the worker was started.
    Joined {
        epoch: Epoch,
    },
    /// All ranks have loaded their state.
    Started,
    Stepped(Step),
    /// A snapshot is about to be written.
    Begun,
    /// The host's files of a snapshot are complete, in this folder.
    Written {
        step: Step,
        folder: PathBuf,
        listing: Listing,
    },
    /// A checkpoint is complete on disk.
    Saved(Step),
    /// This rank is slower than the other ranks.
    Slow,
}

/// A message to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToWorker {
    /// All places have sealed the snapshot of this step.
    Sealed(Step),
    /// Save a checkpoint, and end.
    Stop,
}

/// Writes a message as a line.
pub(super) fn write_line(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(message).expect("messages are plain data") + "\n";
    stream.write_all(text.as_bytes())
}

/// The end of a worker's connection to its keeper.
pub struct WorkerLink {
    stream: Mutex<UnixStream>,
    /// Whether this worker speaks for its host: it is the first of its host.
    leads: bool,
    /// The step of the last snapshot that this worker began, and the step of the last one that all places have sealed.
    steps: Arc<[AtomicU64; 2]>,
}

impl WorkerLink {
    /// Connects to the keeper at `socket`, as the worker `local_rank` of its host in `epoch`. `stop` is called when the keeper asks for a checkpoint and
    /// the end of the run. If the keeper ends, this process ends at once, because nobody would stop it any more.
    pub fn connect(
        socket: &Path,
        epoch: Epoch,
        local_rank: usize,
        stop: impl Fn() + Send + 'static,
    ) -> io::Result<WorkerLink> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_write_timeout(Some(LIMIT))?;
        write_line(&mut stream, &FromWorker::Joined { epoch })?;
        let steps = Arc::<[AtomicU64; 2]>::default();
        let (lines, sealed) = (BufReader::new(stream.try_clone()?), Arc::clone(&steps));
        thread::Builder::new().name("keeper".into()).spawn(move || {
            for line in lines.lines() {
                match line.ok().and_then(|line| serde_json::from_str(&line).ok()) {
                    Some(ToWorker::Sealed(step)) => sealed[1].store(step, Ordering::Relaxed),
                    Some(ToWorker::Stop) => stop(),
                    None => break,
                }
            }
            end_process();
        })?;
        Ok(WorkerLink { stream: Mutex::new(stream), leads: local_rank == 0, steps })
    }

    /// Returns whether this worker writes the files of its host that are not of one rank.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// Returns whether the host has room for a further snapshot: all places have sealed the last one.
    pub fn has_room(&self) -> bool {
        !self.leads || self.steps[0].load(Ordering::Relaxed) <= self.steps[1].load(Ordering::Relaxed)
    }

    /// Reports that all ranks have loaded their state.
    pub fn started(&self) {
        self.send(&FromWorker::Started);
    }

    /// Reports a completed step.
    pub fn stepped(&self, step: Step) {
        self.send(&FromWorker::Stepped(step));
    }

    /// Reports that this step has a snapshot, which is being written from now on.
    pub fn begun(&self, step: Step) {
        self.steps[0].store(step, Ordering::Relaxed);
        self.send(&FromWorker::Begun);
    }

    /// Reports that the snapshot in progress was not written, so that a later one may begin.
    pub fn gave_up(&self) {
        self.steps[0].store(0, Ordering::Relaxed);
    }

    /// Reports the complete files of this host in the snapshot of `step`.
    pub fn written(&self, step: Step, folder: PathBuf, listing: Listing) {
        self.send(&FromWorker::Written { step, folder, listing });
    }

    /// Reports a complete checkpoint on disk.
    pub fn saved(&self, step: Step) {
        self.send(&FromWorker::Saved(step));
    }

    /// Reports that this rank is slower than the other ranks. Each rank of the host reports for itself.
    pub fn is_slow(&self) {
        self.send_of_rank(&FromWorker::Slow);
    }

    fn send(&self, message: &FromWorker) {
        if self.leads {
            self.send_of_rank(message);
        }
    }

    fn send_of_rank(&self, message: &FromWorker) {
        // If the keeper has ended, the thread that reads ends this process.
        let _ = write_line(&mut self.stream.lock().unwrap_or_else(PoisonError::into_inner), message);
    }
}

/// Ends this process without exit handlers, which could wait for a GPU.
fn end_process() {
    let _ = kill_process(getpid(), Signal::KILL);
}
