//! Saves of a run. Tensors are copied to host memory, and files are written from there while training continues.
//!
//! A save has two stages. First every rank writes its files. Then the leading rank lists the files of all ranks, writes the manifest and renames the
//! folder. A thread runs each stage without the communicator, which only the training thread may call. Ranks begin a stage together at the end of a
//! step, where they exchange messages anyway.

use crate::atomic::Hashing;
use crate::live::LiveTensors;
use crate::progress::Progress;
use crate::slices::{FOLDER, SliceWriter};
use crate::template::FolderTemplate;
use crate::training::Contents;
use crate::{CheckpointWriter, FileStart, delete_old};
use ottava_common::error::{Error, Result};
use ottava_common::fs::{Fs, RealFs};
use ottava_models::Decoder;
use ottava_parallel::optim::Optimizer;
use ottava_parallel::{Partition, Ranks};
use ottava_tensor::{Device, Snapshot};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A complete checkpoint.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The step after which the checkpoint was saved.
    pub step: u64,
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The time for which training was paused, while the state was copied or written and while the preceding save was completed.
    pub paused: Duration,
    /// The time from the beginning of the save until the checkpoint was complete.
    pub took: Duration,
}

/// The saver of a run's checkpoints. At most one save is in progress.
///
/// If it is dropped during a save, it removes the files written so far.
pub struct Saver {
    fs: &'static dyn Fs,
    /// The folder of all checkpoints of the run.
    folder: PathBuf,
    /// The number of newest checkpoints to keep; 0 keeps all checkpoints.
    keep: usize,
    /// The step of the best checkpoint, which is never deleted.
    best: Option<u64>,
    /// Which processes complete a checkpoint.
    completes: Completes,
    /// Whether training continues while files are written.
    is_async: bool,
    /// Files that the next save flushes to the disk before it writes its own files.
    flushed: Vec<PathBuf>,
    /// The host memory for copies of tensors; `None` without such memory, or while a save uses it.
    snapshot: Option<Snapshot>,
    in_flight: Option<InFlight>,
}

/// The processes that list the files of all ranks, write the manifest and rename the folder.
#[derive(Clone, Copy, PartialEq)]
enum Completes {
    /// The leading rank, in a folder that all ranks share.
    LeadingRank,
    /// One rank of each host, in a folder that the ranks of a host share. The value says whether this rank is one of them. The manifest lists the files
    /// of all hosts, so a folder with the files of all hosts is a checkpoint.
    RankOfHost(bool),
}

/// A save in progress.
struct InFlight {
    step: u64,
    began: Instant,
    paused: Duration,
    /// The fields of the manifest that this run adds, from the leading rank.
    progress: Value,
    /// A flag that asks the thread to stop, because the save will not be completed.
    stop: Arc<AtomicBool>,
    stage: Stage,
}

enum Stage {
    /// Every rank writes its files.
    Files(Task<Box<Written>>),
    /// The leading rank completes the checkpoint and returns its path.
    End(Task<Result<Option<PathBuf>>>),
}

/// The files that a rank has written.
struct Written {
    writer: CheckpointWriter<'static>,
    slices: Result<SliceWriter>,
    snapshot: Option<Snapshot>,
}

/// The state of a save on a rank, which it reports to the other ranks. The smallest state of all ranks determines the next action.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum State {
    Failed,
    Busy,
    Ready,
}

/// The work of a thread, or its result.
struct Task<T> {
    thread: Option<JoinHandle<T>>,
    done: Option<T>,
}

impl<T: Send + 'static> Task<T> {
    fn done(value: T) -> Task<T> {
        Task { thread: None, done: Some(value) }
    }

    /// Runs `work`, in its own thread if `is_async`.
    fn run(is_async: bool, work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        if !is_async {
            return Task::done(work());
        }
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
        Task { thread: Some(thread.expect("the system starts a thread")), done: None }
    }

    fn join(&mut self) {
        let joined = self.thread.take().map(JoinHandle::join);
        self.done =
            joined.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).or(self.done.take());
    }

    /// Returns the result if the work is done.
    fn peek(&mut self) -> Option<&T> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join();
        }
        self.done.as_ref()
    }

    fn wait(mut self) -> T {
        self.join();
        self.done.expect("a thread that has ended leaves a result")
    }
}

impl Saver {
    /// Makes a saver that saves into `folder` and keeps the `keep` newest checkpoints (0 keeps all). Training is paused during a save.
    pub fn new(folder: PathBuf, keep: usize) -> Saver {
        let completes = Completes::LeadingRank;
        let flushed = Vec::new();
        Saver {
            fs: &RealFs,
            folder,
            keep,
            best: None,
            completes,
            is_async: false,
            flushed,
            snapshot: None,
            in_flight: None,
        }
    }

    /// Makes a saver of checkpoints that hosts divide: each host has the files that its ranks write, in its own `folder`. `leads_host` is true on one
    /// rank of each host, the leading rank among them. All checkpoints are kept.
    pub fn of_host(folder: PathBuf, leads_host: bool) -> Saver {
        let mut saver = Saver::new(folder, 0);
        saver.completes = Completes::RankOfHost(leads_host);
        saver
    }

    /// Returns whether this rank completes checkpoints.
    fn completes(&self, ranks: &Ranks) -> bool {
        match self.completes {
            Completes::LeadingRank => ranks.leads(),
            Completes::RankOfHost(leads_host) => leads_host,
        }
    }

    /// Allocates `bytes` of host memory for copies of tensors, so that files are written while training continues.
    pub fn write_behind(&mut self, device: &Device, bytes: usize) -> Result<()> {
        self.snapshot = Some(Snapshot::new(device, bytes)?);
        self.is_async = true;
        Ok(())
    }

    /// Lets the next save flush the files at `paths` to the disk before it writes its own files. If training continues meanwhile, it does not wait for the
    /// disk.
    pub fn flush_first(&mut self, paths: Vec<PathBuf>) {
        self.flushed = paths;
    }

    /// Returns how the files of a checkpoint are hashed.
    fn hashing(&self) -> Hashing {
        match self.completes {
            Completes::LeadingRank => Hashing::Whole,
            Completes::RankOfHost(_) => Hashing::Chunks,
        }
    }

    /// Protects the checkpoint of this step from deletion.
    pub fn keep_best(&mut self, step: Option<u64>) {
        self.best = step;
    }

    /// Sets the file system for later writes, so that tests can make operations slow or fail.
    pub fn set_fs(&mut self, fs: &'static dyn Fs) {
        self.fs = fs;
    }

    /// Returns whether training continues while files are written.
    pub fn is_async(&self) -> bool {
        self.is_async
    }

    /// Completes the save in progress as [`Saver::finish`] does, and begins to save a run at `progress`. All ranks call it together. On the leading
    /// rank, `prepare` first flushes the files that a checkpoint refers to, and returns the logs that belong to the checkpoint.
    ///
    /// Errors on all ranks if the folder cannot be made. Later failures are reported by [`Saver::advance`] and [`Saver::finish`].
    pub fn begin(
        &mut self,
        progress: &Progress,
        template: &FolderTemplate,
        model: &mut Decoder,
        optimizer: &mut dyn Optimizer,
        partition: &Partition,
        prepare: impl FnOnce() -> Result<Vec<(String, FileStart)>>,
    ) -> Result<Option<Saved>> {
        let (pauses, ranks, step) = (Instant::now(), partition.ranks(), progress.step);
        let before = self.complete(ranks)?;
        let began = Instant::now();
        let begin = || -> Result<_> {
            let logs = if ranks.leads() { prepare()? } else { Vec::new() };
            let mut writer = CheckpointWriter::begin(self.fs, &self.folder, step)?.with_hashing(self.hashing());
            writer.subfolder(FOLDER)?;
            Ok((writer, logs))
        };
        let (begun, mine) = match self.completes(ranks).then(begin).transpose() {
            Ok(begun) => {
                let path = begun.as_ref().map_or(PathBuf::new(), |(writer, _)| writer.path().to_path_buf());
                (begun, Ok((path, ranks.leads().then(|| json!(progress)))))
            }
            Err(error) => (None, Err(error)),
        };
        let (shared, fields) = ranks.all("begin of a checkpoint", mine)?.swap_remove(0);
        let path = match self.completes {
            Completes::LeadingRank => shared,
            Completes::RankOfHost(_) => CheckpointWriter::temporary(&self.folder, step),
        };
        let files = if ranks.leads() { template.files(model) } else { Vec::new() };
        let (mut contents, mut live) = Contents::new(model, optimizer, partition)?;
        contents.carry(template.carried())?;
        contents.flush_first(std::mem::take(&mut self.flushed));
        if progress.is_model_only {
            contents.keep_model();
        }
        let mut writer = match begun {
            Some((writer, logs)) => {
                contents.add_files(logs, files);
                writer
            }
            None => CheckpointWriter::join(self.fs, &path, step, &[FOLDER]).with_hashing(self.hashing()),
        };
        let stop = Arc::<AtomicBool>::default();
        let task = match self.snapshot.take() {
            None => {
                let slices = contents.write(&mut writer, |name| Ok(live.get(name)?.read_bytes()?));
                let rest = live.gather_rest();
                let slices = slices.and_then(|slices| rest.map(|()| slices));
                Task::done(Box::new(Written { writer, slices, snapshot: None }))
            }
            Some(mut snapshot) => match copy(&contents, live, &mut snapshot) {
                Err(error) => Task::done(Box::new(Written { writer, slices: Err(error), snapshot: Some(snapshot) })),
                Ok(places) => {
                    let stop = stop.clone();
                    Task::run(true, move || {
                        let slices = contents.write(&mut writer, |name| match stop.load(Ordering::Relaxed) {
                            true => Err(Error::Cancelled("the save was given up".into())),
                            false => Ok(snapshot.bytes(places[name].clone())),
                        });
                        Box::new(Written { writer, slices, snapshot: Some(snapshot) })
                    })
                }
            },
        };
        let paused = pauses.elapsed();
        self.in_flight = Some(InFlight {
            step,
            began,
            paused,
            progress: fields.unwrap_or_default(),
            stop,
            stage: Stage::Files(task),
        });
        Ok(before)
    }

    /// Returns the state of this rank's save, for [`Saver::advance`].
    pub fn state(&mut self) -> f64 {
        let done = match self.in_flight.as_mut().map(|save| &mut save.stage) {
            None => Some(true),
            Some(Stage::Files(task)) => task.peek().map(|written| written.slices.is_ok()),
            Some(Stage::End(task)) => task.peek().map(Result::is_ok),
        };
        let state = match done {
            Some(true) => State::Ready,
            Some(false) => State::Failed,
            None => State::Busy,
        };
        f64::from(state as u8)
    }

    /// Advances the save in progress if no rank is busy. `states` has the state of each of `ranks`. When the checkpoint is complete, returns it on
    /// the ranks that complete checkpoints.
    ///
    /// Errors on all ranks if a rank has failed.
    pub fn advance(&mut self, ranks: &Ranks, states: impl Iterator<Item = f64>) -> Result<Option<Saved>> {
        let least = states.fold(f64::INFINITY, f64::min);
        let Some(save) = self.in_flight.as_ref().filter(|_| least != f64::from(State::Busy as u8)) else {
            return Ok(None);
        };
        // If a rank has failed, the other ranks stop writing.
        save.stop.store(least == f64::from(State::Failed as u8), Ordering::Relaxed);
        self.next_stage(ranks)
    }

    /// Waits until the save in progress is complete, and returns its checkpoint on the ranks that complete checkpoints. All ranks call it together.
    /// Returns `None` if no save is in progress.
    ///
    /// Errors on all ranks if a rank has failed.
    pub fn finish(&mut self, ranks: &Ranks) -> Result<Option<Saved>> {
        let waits = Instant::now();
        let mut saved = self.complete(ranks)?;
        saved.iter_mut().for_each(|saved| saved.paused += waits.elapsed());
        Ok(saved)
    }

    fn complete(&mut self, ranks: &Ranks) -> Result<Option<Saved>> {
        let mut saved = None;
        while self.in_flight.is_some() {
            saved = self.next_stage(ranks)?;
        }
        Ok(saved)
    }

    /// Waits for the stage in progress, and begins the next stage.
    fn next_stage(&mut self, ranks: &Ranks) -> Result<Option<Saved>> {
        let InFlight { step, began, paused, progress, stop, stage } = self.in_flight.take().expect("a save is begun");
        match stage {
            Stage::Files(task) => {
                let Written { mut writer, slices, mut snapshot } = *task.wait();
                snapshot.iter_mut().for_each(Snapshot::clear);
                self.snapshot = snapshot;
                let outcome = match slices {
                    // Another rank reports the reason.
                    Err(Error::Cancelled(_)) => Ok(Default::default()),
                    slices => slices.map(|slices| (writer.take_files(), slices)),
                };
                let all = ranks.all("files of a checkpoint", outcome)?;
                let (fs, folder, keep) = (self.fs, self.folder.clone(), self.keep);
                let protected: Vec<u64> = self.best.into_iter().chain([step]).collect();
                let fields = progress.clone();
                let complete = move || -> Result<Option<PathBuf>> {
                    let mut slices = SliceWriter::default();
                    for (files, index) in all {
                        writer.adopt(files);
                        slices.adopt(index);
                    }
                    slices.finish(&mut writer)?;
                    let path = writer.finish(fields)?;
                    if keep > 0 {
                        delete_old(fs, &folder, keep, &protected)?;
                    }
                    Ok(Some(path))
                };
                let task = match self.completes(ranks) {
                    true => Task::run(self.is_async, complete),
                    false => Task::done(Ok(None)),
                };
                self.in_flight = Some(InFlight { step, began, paused, progress, stop, stage: Stage::End(task) });
                Ok(None)
            }
            Stage::End(task) => {
                let (path, ended) = match task.wait() {
                    Ok(path) => (path, Ok(())),
                    Err(error) => (None, Err(error)),
                };
                ranks.all("end of a checkpoint", ended)?;
                let took = began.elapsed();
                Ok(path.map(|path| Saved { step, path, paused, took }))
            }
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let Some(InFlight { stop, stage, .. }) = self.in_flight.take() else { return };
        stop.store(true, Ordering::Relaxed);
        match stage {
            Stage::Files(task) => drop(task.wait()),
            Stage::End(task) => drop(task.wait()),
        }
    }
}

/// Copies all tensors to `snapshot`, and returns the place of each tensor, by name.
fn copy(contents: &Contents, mut live: LiveTensors, snapshot: &mut Snapshot) -> Result<HashMap<String, Range<usize>>> {
    let mut places = HashMap::new();
    let copied = contents.names().try_for_each(|name| -> Result<()> {
        places.insert(name.to_string(), snapshot.copy(&live.get(name)?)?);
        Ok(())
    });
    // This also runs after an error, since other ranks wait for it.
    let rest = live.gather_rest();
    snapshot.wait()?;
    copied.and(rest).map(|()| places)
}
