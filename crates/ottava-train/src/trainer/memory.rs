//! Snapshots in the memory of hosts. They are checkpoints whose files each host has in a folder of its own, written beside training as checkpoints are.

use super::environment::Environment;
use super::files::RunFiles;
use crate::run::Run;
use ottava_checkpoint::{Contents, Manifest, Progress, Saved, Saver};
use ottava_common::error::{Error, Result};
use ottava_common::hash::sha256_of_chunks;
use ottava_elastic::process::{FileEntry, Listing, WorkerLink, reserve};
use ottava_parallel::Ranks;
use std::path::{Path, PathBuf};

/// The name of the manifest of a checkpoint, which is a file of each share as well.
const MANIFEST: &str = "manifest.json";

/// The snapshots of a run, and the keeper of this host, which stores them.
pub(super) struct MemorySnapshots {
    saver: Saver,
    keeper: WorkerLink,
    /// The folder in which the ranks of this host write.
    folder: PathBuf,
    /// Whether the folder had no memory for the list of a snapshot.
    is_full: bool,
    /// Whether a snapshot was left out.
    has_left_out: bool,
}

/// What a rank tells the others at the end of a step: the state of its snapshot in progress, and whether its host has room for the next one.
pub(super) type Told = [f64; 2];

impl MemorySnapshots {
    /// Prepares the snapshots of `run`, which the ranks of this host write into `folder`. If the host has memory for it, they are written while training
    /// continues.
    pub(super) fn new(
        environment: &Environment,
        run: &mut Run,
        keeper: WorkerLink,
        folder: PathBuf,
    ) -> Result<MemorySnapshots> {
        let mut saver = Saver::of_host(folder.clone(), keeper.leads());
        if environment.resolved.config.async_save {
            let Run { model, optimizer, step, .. } = run;
            let [bytes, ..] = Contents::new(model, &mut **optimizer, step.partition())?.0.snapshot_bytes();
            saver.write_behind(&environment.device, bytes)?;
        }
        Ok(MemorySnapshots { saver, keeper, folder, is_full: false, has_left_out: false })
    }

    /// Tells the keeper of this host that all ranks have loaded their state.
    pub(super) fn started(&self) {
        self.keeper.started();
    }

    /// Tells the keeper of this host that a step is complete, and the steps of complete checkpoints.
    pub(super) fn report(&self, step: u64, saved: &[Saved]) {
        saved.iter().for_each(|saved| self.keeper.saved(saved.step));
        self.keeper.stepped(step);
    }

    /// Tells the keeper of this host that this rank is slower than the other ranks.
    pub(super) fn is_slow(&self) {
        self.keeper.is_slow();
    }

    /// Returns what this rank tells the others.
    pub(super) fn told(&mut self) -> Told {
        [self.saver.state(), f64::from(u8::from(self.keeper.has_room() && self.reserve()))]
    }

    /// Returns whether the folder has memory for the list of the next snapshot. If it has none, no host begins a snapshot.
    fn reserve(&mut self) -> bool {
        if !self.keeper.leads() {
            return true;
        }
        let reserved = reserve(&self.folder).map_err(Error::io(&self.folder));
        let was_full = std::mem::replace(&mut self.is_full, reserved.is_err());
        if let (Err(error), false) = (&reserved, was_full) {
            tracing::warn!("no snapshot in memory was written, and earlier ones stay: {error}");
        }
        reserved.is_ok()
    }

    /// Advances a snapshot in progress. `states` has the state of each of `ranks`.
    pub(super) fn advance(&mut self, ranks: &Ranks, states: impl Iterator<Item = f64>) -> Result<()> {
        let advanced = self.saver.advance(ranks, states);
        self.hand_over(advanced)
    }

    /// Leaves out the snapshot of `step`, because not all hosts have room. Warns the first time, on the leading rank.
    pub(super) fn leave_out(&mut self, step: u64, ranks: &Ranks) {
        if !std::mem::replace(&mut self.has_left_out, true) && ranks.leads() {
            tracing::warn!(
                "step {step}: this snapshot in memory is left out, because a host still writes or copies an earlier one, or has no memory; a loss costs more than \
                 `recovery.snapshot_steps` steps where this happens"
            );
        }
    }

    /// Begins a snapshot of `run` at `progress`. On the leading rank, `files` are flushed to the disk before the snapshot is complete, since a resumed run
    /// continues them.
    pub(super) fn begin(
        &mut self,
        environment: &Environment,
        progress: &Progress,
        run: &mut Run,
        files: Option<&RunFiles>,
    ) -> Result<()> {
        self.keeper.begun(progress.step);
        let Run { model, optimizer, step, .. } = run;
        let (template, ranks) = (&environment.inputs.template, &environment.ranks);
        let flushed = files.map_or(Ok(Vec::new()), RunFiles::paths);
        let prepare = flushed.map(|paths| {
            self.saver.flush_first(paths);
            Vec::new()
        });
        let begun = self.saver.begin(progress, template, model, &mut **optimizer, step.partition(), || prepare);
        self.hand_over(begun)?;
        match self.saver.is_async() {
            true => Ok(()),
            false => {
                let finished = self.saver.finish(ranks);
                self.hand_over(finished)
            }
        }
    }

    /// Gives a complete snapshot to the keeper. A snapshot that cannot be written, for example because the folder is full, does not end the run: the
    /// snapshots before it stay.
    fn hand_over(&mut self, outcome: Result<Option<Saved>>) -> Result<()> {
        let handed = outcome.and_then(|saved| {
            let Some(Saved { step, path, .. }) = saved else { return Ok(()) };
            let listing = listing(&path)?;
            self.keeper.written(step, path, listing);
            Ok(())
        });
        match handed {
            Ok(()) => Ok(()),
            // The ranks do not go on together.
            Err(error @ (Error::Tensor(ottava_tensor::Error::Ranks { .. }) | Error::Cancelled(_))) => Err(error),
            Err(error) => {
                self.discard();
                self.keeper.gave_up();
                tracing::warn!("no snapshot in memory was written, and earlier ones stay: {error}");
                Ok(())
            }
        }
    }

    /// Removes the files of a snapshot that is not complete on all hosts. No rank writes any more.
    fn discard(&self) {
        if self.keeper.leads() {
            let _ = std::fs::remove_dir_all(&self.folder);
            let _ = std::fs::create_dir_all(&self.folder);
        }
    }
}

/// Returns the files of this host in the snapshot at `path`.
fn listing(path: &Path) -> Result<Listing> {
    let manifest = Manifest::read(path)?.unwrap_or_else(|| unreachable!("a complete checkpoint has a manifest"));
    let mut listing = Listing::default();
    for (name, entry) in manifest.files {
        if path.join(&name).is_file() {
            listing.0.insert(name, FileEntry { size: entry.size, hash: entry.sha256 });
        }
    }
    let path = path.join(MANIFEST);
    let (size, hash) = sha256_of_chunks(&path).map_err(Error::io(&path))?;
    listing.0.insert(MANIFEST.into(), FileEntry { size, hash });
    Ok(listing)
}
