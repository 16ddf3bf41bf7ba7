//! Copies of checkpoints in a store.
//!
//! A thread looks for complete checkpoints in the folder of a run and uploads them, so training never waits. The objects of a checkpoint are
//! `checkpoint-STEP/FILE`. The manifest is put last and deleted first, so a checkpoint in the store is complete or absent even if the process is killed.
//! The names of objects follow from the folder, so the next start repeats a killed upload.

use crate::atomic::{self, TEMPORARY, checkpoints, latest_complete};
use crate::manifest::{FILE_NAME, Manifest, Verify, verify};
use ottava_common::ending::Ending;
use ottava_common::fs::{RealFs, create_dirs, is_relative_path, parent, replace_file, sync_parent};
use ottava_common::{Error, Result, interrupt};
use ottava_store::Bucket;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Files of a run that a resumed run on another machine reads, besides the checkpoint.
const OF_RUN: [&str; 4] = ["config.toml", "hub.json", "trackers.json", ROLLBACKS];

/// The log of rollbacks. It may change after the checkpoint to which a run returns, so the log of the store replaces an older one.
const ROLLBACKS: &str = "rollbacks.jsonl";

/// The pause between two looks at the folder.
const POLL: Duration = Duration::from_secs(1);

/// The longest pause after a fault.
const LONGEST: Duration = Duration::from_secs(60);

/// The time after which a fault that lasts is told again.
const REMINDER: Duration = Duration::from_secs(3600);

/// The number of failed looks at the end of a run after which uploads are given up.
const ATTEMPTS: u32 = 5;

/// The store of a run, and its folder.
pub struct Backup {
    bucket: Bucket,
    output_dir: PathBuf,
    /// The number of newest checkpoints in the store to keep; 0 keeps all.
    keep: usize,
    /// Whether the run ends with its best model, so that the store also keeps the best checkpoint.
    keeps_best: bool,
}

/// The objects of the checkpoints in a store: sizes by file, by step.
type Listing = BTreeMap<u64, BTreeMap<String, u64>>;

/// The checkpoints of the folder: path and text of the manifest, by step.
type Local = BTreeMap<u64, (PathBuf, Vec<u8>)>;

/// What the thread knows from earlier looks at the folder.
#[derive(Default)]
struct Known {
    /// The manifests of the checkpoints that are in the store.
    published: BTreeMap<u64, Vec<u8>>,
    /// The files of the run that are in the store.
    files: BTreeMap<&'static str, Vec<u8>>,
    /// The newest step of the folder at the last look.
    newest: Option<u64>,
    /// The steps that wait for their upload.
    waiting: BTreeSet<u64>,
    /// The number of checkpoints that were deleted before they were uploaded.
    overtaken: u64,
}

impl Known {
    /// Forgets the checkpoints that the folder no longer has. Warns of checkpoints that were deleted before they were uploaded.
    fn forget(&mut self, local: &Local) {
        self.published.retain(|step, _| local.contains_key(step));
        let newest = local.keys().next_back();
        // Steps after the newest step were abandoned by a rollback.
        let gone = self.waiting.iter().filter(|step| !local.contains_key(step) && Some(*step) < newest);
        for step in gone {
            self.overtaken += 1;
            if self.overtaken.is_power_of_two() {
                tracing::warn!(
                    "{} was deleted before it was uploaded ({} so far): uploads are slower than saves; set a larger \
                     `checkpoint.save_steps` or `checkpoint.save_total_limit`",
                    atomic::name(*step),
                    self.overtaken
                );
            }
        }
        self.waiting.retain(|step| local.contains_key(step));
    }
}

impl Backup {
    /// Creates the copy of the run in `output_dir`. `keep` is the number of newest checkpoints to keep; 0 keeps all.
    pub fn new(bucket: Bucket, output_dir: &Path, keep: usize) -> Backup {
        Backup { bucket, output_dir: output_dir.to_path_buf(), keep, keeps_best: false }
    }

    /// Returns this copy for a run that ends with its best model if `keeps_best`: the best checkpoint is also kept and restored.
    pub fn with_best(self, keeps_best: bool) -> Backup {
        Backup { keeps_best, ..self }
    }

    fn checkpoints(&self) -> PathBuf {
        self.output_dir.join("checkpoints")
    }

    /// Errors with [`Error::Config`] if the store has a complete checkpoint. A new run would replace it.
    pub fn expect_empty(&self) -> Result<()> {
        match self.listing()?.iter().rfind(|(_, files)| files.contains_key(FILE_NAME)) {
            Some((step, _)) => Err(Error::Config(format!(
                "{} exists; resume this run with --resume, or set `checkpoint.upload_to` to another prefix",
                self.bucket.place(&atomic::name(*step))
            ))),
            None => Ok(()),
        }
    }

    /// Downloads the newest complete checkpoint of the store, if it is newer than all complete checkpoints of the folder, and the best checkpoint.
    /// Returns the path of the newest. Skips checkpoints that a rollback in this folder has abandoned.
    ///
    /// Errors if the store fails, and with [`Error::Checkpoint`] if neither the folder nor the store has a checkpoint that can be used, although the
    /// store has manifests. A new run would delete them.
    pub fn restore(&self) -> Result<Option<PathBuf>> {
        let newest = latest_complete(&self.checkpoints(), Verify::Hashes)?.complete.map(|(_, manifest)| manifest.step);
        let listing = self.listing()?;
        let later = listing.iter().rev().filter(|(step, files)| Some(**step) > newest && files.contains_key(FILE_NAME));
        let mut unusable = None;
        for (&step, _) in later {
            match self.restore_step(step, &listing) {
                Ok(Some(path)) => return Ok(Some(path)),
                Ok(None) => {}
                // A damaged copy is no reason to lose the copies before it.
                Err(Error::Checkpoint(why)) => {
                    tracing::warn!("a copy in the store cannot be used: {why}");
                    unusable.get_or_insert(why);
                }
                Err(error) => return Err(error),
            }
        }
        match unusable.filter(|_| newest.is_none()) {
            Some(why) => Err(Error::Checkpoint(format!(
                "no checkpoint in the store can be used: {why}; restore it there, use the version of Ottava that wrote it, or set \
                 `checkpoint.upload_to` and `output_dir` to other places to start anew"
            ))),
            None => Ok(None),
        }
    }

    /// Downloads the checkpoint of `step`, after the best checkpoint before it. Returns `None` if the folder has abandoned the checkpoint.
    ///
    /// Errors with [`Error::Checkpoint`] if the copy is damaged.
    fn restore_step(&self, step: u64, listing: &Listing) -> Result<Option<PathBuf>> {
        let copy = self.manifest(step, listing)?;
        if self.is_abandoned(step, &copy.0)? {
            return Ok(None);
        }
        let best = self.best(&copy.1).filter(|best| *best < step && listing.contains_key(best));
        if let Some(best) =
            best.filter(|best| verify(&self.checkpoints().join(atomic::name(*best)), Verify::Sizes).is_err())
        {
            let downloaded = self.manifest(best, listing).and_then(|copy| self.download(best, &copy));
            match downloaded {
                Err(Error::Checkpoint(why)) => tracing::warn!("the copy of the best checkpoint cannot be used: {why}"),
                downloaded => drop(downloaded?),
            }
        }
        self.download(step, &copy).map(Some)
    }

    /// Returns the step of the best checkpoint of a run at this manifest, if the run ends with it.
    fn best(&self, manifest: &Manifest) -> Option<u64> {
        manifest.extra["best"]["step"].as_u64().filter(|_| self.keeps_best)
    }

    /// Returns whether the folder has renamed the checkpoint with this manifest, because the run has returned to an earlier step.
    fn is_abandoned(&self, step: u64, manifest: &[u8]) -> Result<bool> {
        let name = format!("abandoned-{}", atomic::name(step));
        let is_of_step =
            |found: &str| found.strip_prefix(&name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let folders = atomic::named(&self.checkpoints(), is_of_step)?;
        Ok(folders.iter().any(|folder| std::fs::read(folder.join(FILE_NAME)).is_ok_and(|found| found == manifest)))
    }

    fn download(&self, step: u64, (text, manifest): &(Vec<u8>, Manifest)) -> Result<PathBuf> {
        let (folder, name) = (self.checkpoints(), atomic::name(step));
        let (target, temporary) = (folder.join(&name), folder.join(format!("{TEMPORARY}{step}")));
        if temporary.exists() {
            std::fs::remove_dir_all(&temporary).map_err(Error::io(&temporary))?;
        }
        create_dirs(&RealFs, &temporary)?;
        tracing::info!("{} is downloaded", self.bucket.place(&name));
        for (file, entry) in &manifest.files {
            interrupt::check("downloading a checkpoint")?;
            if !is_relative_path(file) {
                return Err(Error::Checkpoint(format!("{file:?} of {name} is no path of a file in a folder")));
            }
            let path = temporary.join(file);
            create_dirs(&RealFs, parent(&path))?;
            self.bucket.get_file(&format!("{name}/{file}"), entry.size, &path)?;
        }
        std::fs::write(temporary.join(FILE_NAME), text).map_err(Error::io(&temporary))?;
        verify(&temporary, Verify::Hashes)?;
        // A download that is killed must not leave a checkpoint without the files of the run.
        self.download_files()?;
        if target.exists() {
            // This folder is not complete, because all complete checkpoints are older.
            std::fs::remove_dir_all(&target).map_err(Error::io(&target))?;
        }
        std::fs::rename(&temporary, &target).map_err(Error::io(&target))?;
        sync_parent(&RealFs, &target)?;
        Ok(target)
    }

    /// Downloads the files of the run that the folder lacks, and the log of rollbacks if the log of the folder lacks lines.
    fn download_files(&self) -> Result<()> {
        for file in OF_RUN {
            let path = self.output_dir.join(file);
            let Some(bytes) = self.bucket.get(file)? else { continue };
            let is_kept = match file {
                ROLLBACKS => std::fs::read(&path).is_ok_and(|found| found.starts_with(&bytes)),
                _ => path.exists(),
            };
            if !is_kept {
                replace_file(&RealFs, &path, &bytes)?;
            }
        }
        Ok(())
    }

    /// Starts to upload checkpoints, also the checkpoints that earlier starts have left.
    pub fn start(self) -> Uploads {
        let ending: Arc<Ending<()>> = Arc::default();
        let of_thread = ending.clone();
        Uploads { ending, thread: Some(std::thread::spawn(move || self.run(&of_thread))) }
    }

    fn run(mut self, ending: &Ending<()>) {
        // A request to stop the run must not end the upload of the checkpoint that it saves.
        self.bucket = self.bucket.without_stop();
        // Some accounts may put objects and may not list uploads.
        if let Err(error) = self.bucket.give_up_uploads("checkpoint-") {
            tracing::warn!("parts of files that a killed run may have left in the store are not deleted: {error}");
        }
        let (mut known, mut pause, mut failed, mut told) = (Known::default(), POLL, 0, None::<Instant>);
        loop {
            let is_last = ending.told().is_some();
            match self.upload_pending(&mut known) {
                Ok(()) if is_last => return,
                Ok(()) => (pause, failed, told) = (POLL, 0, None),
                Err(error) => {
                    failed += 1;
                    if is_last && failed >= ATTEMPTS {
                        let remedy = "`ottava train` with --resume uploads them";
                        tracing::warn!("checkpoints are not in the store yet: {error}; {remedy}");
                        return;
                    }
                    if told.is_none_or(|told| told.elapsed() >= REMINDER) {
                        tracing::warn!("checkpoints are uploaded later: {error}; the run goes on");
                        told = Some(Instant::now());
                    }
                    pause = (pause * 2).min(LONGEST);
                }
            }
            ending.wait(pause, POLL);
        }
    }

    /// Uploads the complete checkpoints of the folder that the store lacks, newest first. Deletes the copies that are no longer kept.
    fn upload_pending(&self, known: &mut Known) -> Result<()> {
        loop {
            let local = self.local()?;
            known.forget(&local);
            let Some(&newest) = local.keys().next_back() else { return Ok(()) };
            let is_pending = |(step, (path, text)): &(&u64, &(PathBuf, Vec<u8>))| {
                known.published.get(step) != Some(text) && verify(path, Verify::Sizes).is_ok()
            };
            let pending: BTreeSet<u64> = local.iter().filter(is_pending).map(|(step, _)| *step).collect();
            known.waiting = pending;
            // A run writes the log of its rollback before it renames the checkpoints, so this log is in the store before their copies are deleted.
            self.put_files(&[ROLLBACKS], known)?;
            if known.newest.is_none_or(|before| newest < before) {
                self.delete_old(&local)?;
            }
            known.newest = Some(newest);
            let Some(step) = known.waiting.last().copied() else { return Ok(()) };
            let (path, text) = &local[&step];
            let name = atomic::name(step);
            if self.bucket.get(&format!("{name}/{FILE_NAME}"))?.as_ref() != Some(text) {
                if !self.upload(&name, path, text, known)? {
                    continue;
                }
                tracing::info!("{} is complete", self.bucket.place(&name));
            }
            known.waiting.remove(&step);
            known.published.insert(step, text.clone());
            self.delete_old(&local)?;
        }
    }

    /// Returns the checkpoints of the folder that have a manifest.
    fn local(&self) -> Result<Local> {
        let mut local = Local::new();
        for (step, path) in checkpoints(&self.checkpoints())? {
            // A checkpoint may be deleted meanwhile.
            if let Ok(text) = std::fs::read(path.join(FILE_NAME)) {
                local.insert(step, (path, text));
            }
        }
        Ok(local)
    }

    /// Puts the `files` of the run that have changed since they were put.
    fn put_files(&self, files: &[&'static str], known: &mut Known) -> Result<()> {
        for &file in files {
            // Not every run has each of these files.
            let Ok(bytes) = std::fs::read(self.output_dir.join(file)) else { continue };
            if known.files.get(file) != Some(&bytes) {
                self.bucket.put(file, &bytes)?;
                known.files.insert(file, bytes);
            }
        }
        Ok(())
    }

    /// Uploads a checkpoint, also if it is deleted meanwhile. Returns false if it is gone before.
    fn upload(&self, name: &str, path: &Path, text: &[u8], known: &mut Known) -> Result<bool> {
        let Some(manifest) = Manifest::read(path)? else { return Ok(false) };
        // An open file can be read to its end after the trainer has deleted it.
        let open = manifest.files.keys().map(|name| Ok((name, File::open(path.join(name))?)));
        let files = match open.collect::<std::io::Result<Vec<_>>>() {
            Err(_) if !path.exists() => return Ok(false),
            files => files.map_err(Error::io(path))?,
        };
        // From here on, an older copy of this step is no copy.
        self.bucket.delete(&format!("{name}/{FILE_NAME}"))?;
        self.put_files(&OF_RUN, known)?;
        for (file, opened) in files {
            self.bucket.put_file(&format!("{name}/{file}"), &opened)?;
        }
        self.bucket.put(&format!("{name}/{FILE_NAME}"), text)?;
        Ok(true)
    }

    /// Deletes copies: of steps after the newest step of the folder, which a return to an earlier step has abandoned, and of old steps that neither
    /// the folder has nor `keep` counts. Keeps the best checkpoint.
    fn delete_old(&self, local: &Local) -> Result<()> {
        let Some((newest, (_, text))) = local.last_key_value() else { return Ok(()) };
        let best = Manifest::parse(text).ok().and_then(|manifest| self.best(&manifest));
        let complete = |files: &BTreeMap<String, u64>| files.contains_key(FILE_NAME);
        let mut kept = 0;
        for (step, files) in self.listing()?.iter().rev() {
            let is_old = self.keep > 0 && kept >= self.keep && best != Some(*step);
            let is_kept = step <= newest && (local.contains_key(step) || complete(files) && !is_old);
            if is_kept {
                kept += usize::from(complete(files));
                continue;
            }
            let name = atomic::name(*step);
            self.bucket.delete(&format!("{name}/{FILE_NAME}"))?;
            for file in files.keys() {
                self.bucket.delete(&format!("{name}/{file}"))?;
            }
        }
        Ok(())
    }

    /// Lists the objects of all checkpoints.
    fn listing(&self) -> Result<Listing> {
        let mut listing = Listing::new();
        for object in self.bucket.list("checkpoint-")? {
            let Some((folder, file)) = object.name.split_once('/') else { continue };
            let step = folder.strip_prefix("checkpoint-").and_then(|step| step.parse().ok());
            if let Some(step) = step.filter(|step| atomic::name(*step) == folder) {
                listing.entry(step).or_default().insert(file.to_string(), object.size);
            }
        }
        Ok(listing)
    }

    /// Returns the manifest of a step, as text and read. Errors with [`Error::Checkpoint`] if the copy is damaged, or if this version cannot read it.
    fn manifest(&self, step: u64, listing: &Listing) -> Result<(Vec<u8>, Manifest)> {
        let name = format!("{}/{FILE_NAME}", atomic::name(step));
        let wrong = |why: String| Error::Checkpoint(format!("{}: {why}", self.bucket.place(&name)));
        let text = self.bucket.get(&name)?.ok_or_else(|| wrong("there is no such object".into()))?;
        let manifest = Manifest::parse(&text).map_err(wrong)?;
        if manifest.step != step {
            return Err(wrong(format!("this is the manifest of step {}", manifest.step)));
        }
        let is_whole = |(file, size): (&String, u64)| listing[&step].get(file) == Some(&size);
        match manifest.files.iter().find(|(file, entry)| !is_whole((file, entry.size))) {
            Some((file, _)) => Err(wrong(format!("its file {file} is missing or has another size"))),
            None => Ok((text, manifest)),
        }
    }
}

/// The thread that uploads checkpoints.
pub struct Uploads {
    ending: Arc<Ending<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Uploads {
    /// Waits until all checkpoints are in the store, or until several attempts have failed.
    pub fn finish(self) {}
}

impl Drop for Uploads {
    fn drop(&mut self) {
        self.ending.tell(());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!("the thread that uploads checkpoints has panicked");
        }
    }
}

#[cfg(test)]
#[path = "backup_tests.rs"]
mod tests;
