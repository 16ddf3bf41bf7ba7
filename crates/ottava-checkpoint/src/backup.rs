//! Copies of checkpoints in a store.
//!
//! A thread looks for complete checkpoints in the folder of a run and uploads them, so training never waits. The objects of a checkpoint are
//! `checkpoint-STEP/FILE`. The manifest is put last and deleted first, so a checkpoint in the store is complete or absent, whenever the process stops.
//! The names of objects follow from the folder, so a killed upload is made again by the next start.

use crate::atomic::{self, TEMPORARY, checkpoints, latest_complete};
use crate::manifest::{FILE_NAME, Manifest, Verify, is_relative_path, verify};
use ottava_common::fs::{RealFs, create_dirs, parent, sync_parent};
use ottava_common::{Error, Result, interrupt};
use ottava_store::Bucket;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Files of a run that a resumed run on another machine reads, besides the checkpoint.
const OF_RUN: [&str; 3] = ["config.toml", "hub.json", "trackers.json"];

/// The pause between two looks at the folder.
const POLL: Duration = Duration::from_secs(1);

/// The longest pause after a fault.
const LONGEST: Duration = Duration::from_secs(60);

/// The number of failed looks at the end of a run after which uploads are given up.
const ATTEMPTS: u32 = 5;

/// The store of a run, and its folder.
pub struct Backup {
    bucket: Bucket,
    output_dir: PathBuf,
    /// The number of newest checkpoints in the store to keep; 0 keeps all.
    keep: usize,
}

/// The objects of the checkpoints in a store: sizes by file, by step.
type Listing = BTreeMap<u64, BTreeMap<String, u64>>;

impl Backup {
    /// Creates the copy of the run in `output_dir`. `keep` is the number of newest checkpoints to keep; 0 keeps all.
    pub fn new(bucket: Bucket, output_dir: &Path, keep: usize) -> Backup {
        Backup { bucket, output_dir: output_dir.to_path_buf(), keep }
    }

    fn checkpoints(&self) -> PathBuf {
        self.output_dir.join("checkpoints")
    }

    /// Errors with [`Error::Config`] if the store has a checkpoint. A new run would replace it.
    pub fn expect_empty(&self) -> Result<()> {
        match self.listing()?.keys().next_back() {
            Some(step) => Err(Error::Config(format!(
                "{} exists; resume this run with --resume, or set `checkpoint.upload_to` to another prefix",
                self.bucket.place(&atomic::name(*step))
            ))),
            None => Ok(()),
        }
    }

    /// Downloads the newest complete checkpoint of the store, if it is newer than all complete checkpoints of the folder. Returns its path.
    ///
    /// Errors if the store fails.
    pub fn restore(&self) -> Result<Option<PathBuf>> {
        let folder = self.checkpoints();
        let newest = latest_complete(&folder, Verify::Sizes)?.complete.map(|(_, manifest)| manifest.step);
        for (step, files) in self.listing()?.into_iter().rev().filter(|(step, _)| Some(*step) > newest) {
            let Some(manifest) = self.manifest(step)? else { continue };
            let is_whole = |(name, size): (&String, u64)| files.get(name) == Some(&size);
            if !manifest.1.files.iter().all(|(name, entry)| is_whole((name, entry.size))) {
                tracing::warn!("{} lacks files", self.bucket.place(&atomic::name(step)));
                continue;
            }
            match self.download(step, &manifest) {
                Ok(path) => return Ok(Some(path)),
                // A damaged copy is no reason to lose the copies before it.
                Err(Error::Checkpoint(why)) => tracing::warn!("the copy in the store is damaged: {why}"),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
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
        if target.exists() {
            // This folder is not complete, because all complete checkpoints are older.
            std::fs::remove_dir_all(&target).map_err(Error::io(&target))?;
        }
        std::fs::rename(&temporary, &target).map_err(Error::io(&target))?;
        sync_parent(&RealFs, &target)?;
        for file in OF_RUN {
            let path = self.output_dir.join(file);
            if let Some(bytes) = self.bucket.get(file)?.filter(|_| !path.exists()) {
                std::fs::write(&path, bytes).map_err(Error::io(&path))?;
            }
        }
        Ok(target)
    }

    /// Starts to upload checkpoints, also the checkpoints that earlier starts have left.
    pub fn start(self) -> Uploads {
        let stop: Arc<Stop> = Arc::default();
        let of_thread = stop.clone();
        Uploads { stop, thread: Some(std::thread::spawn(move || self.run(&of_thread))) }
    }

    fn run(mut self, stop: &Stop) {
        // A request to stop the run must not end the upload of the checkpoint that it saves.
        self.bucket = self.bucket.without_stop();
        let (mut published, mut pause, mut failed) = (BTreeMap::new(), POLL, 0);
        let mut is_clean = false;
        loop {
            let is_last = stop.is_asked();
            let outcome = if is_clean { Ok(()) } else { self.bucket.give_up_uploads("checkpoint-") };
            is_clean |= outcome.is_ok();
            match outcome.and_then(|()| self.upload_pending(&mut published)) {
                Ok(()) if is_last => return,
                Ok(()) => (pause, failed) = (POLL, 0),
                Err(error) => {
                    failed += 1;
                    if is_last && failed >= ATTEMPTS {
                        let remedy = "`ottava train` with --resume uploads them";
                        tracing::warn!("checkpoints are not in the store yet: {error}; {remedy}");
                        return;
                    }
                    if failed == 1 {
                        tracing::warn!("checkpoints are uploaded later: {error}; the run goes on");
                    }
                    pause = (pause * 2).min(LONGEST);
                }
            }
            stop.wait(pause);
        }
    }

    /// Uploads the complete checkpoints of the folder that the store lacks, newest first, and deletes the copies that are no longer kept. `published`
    /// are the manifests of the checkpoints that are known to be in the store.
    fn upload_pending(&self, published: &mut BTreeMap<u64, Vec<u8>>) -> Result<()> {
        loop {
            let mut local: BTreeMap<u64, (PathBuf, Vec<u8>)> = BTreeMap::new();
            for (step, path) in checkpoints(&self.checkpoints())? {
                // A checkpoint may be deleted meanwhile.
                if let Ok(text) = std::fs::read(path.join(FILE_NAME)) {
                    local.insert(step, (path, text));
                }
            }
            published.retain(|step, _| local.contains_key(step));
            let pending = local
                .iter()
                .rev()
                .find(|(step, (path, text))| published.get(step) != Some(text) && verify(path, Verify::Sizes).is_ok());
            let Some((&step, (path, text))) = pending else { return Ok(()) };
            let name = atomic::name(step);
            if self.bucket.get(&format!("{name}/{FILE_NAME}"))?.as_ref() != Some(text) {
                if !self.upload(&name, path, text)? {
                    continue;
                }
                tracing::info!("{} is complete", self.bucket.place(&name));
            }
            published.insert(step, text.clone());
            self.delete_old(&local.keys().copied().collect::<Vec<_>>())?;
        }
    }

    /// Uploads a checkpoint. Returns false if it was deleted meanwhile.
    fn upload(&self, name: &str, path: &Path, text: &[u8]) -> Result<bool> {
        let Some(manifest) = Manifest::read(path)? else { return Ok(false) };
        // From here on, an older copy of this step is no copy.
        self.bucket.delete(&format!("{name}/{FILE_NAME}"))?;
        for file in OF_RUN {
            let file_path = self.output_dir.join(file);
            if file_path.is_file() {
                self.bucket.put_file(file, &file_path)?;
            }
        }
        for file in manifest.files.keys() {
            match self.bucket.put_file(&format!("{name}/{file}"), &path.join(file)) {
                Err(_) if !path.exists() => return Ok(false),
                put => put?,
            }
        }
        self.bucket.put(&format!("{name}/{FILE_NAME}"), text)?;
        Ok(true)
    }

    /// Deletes copies: of steps after the newest step of the folder, which a return to an earlier step has abandoned, and of old steps that neither
    /// the folder has nor `keep` counts.
    fn delete_old(&self, local: &[u64]) -> Result<()> {
        let (listing, newest) = (self.listing()?, local.last().copied().unwrap_or(0));
        let complete = |files: &BTreeMap<String, u64>| files.contains_key(FILE_NAME);
        let mut kept = 0;
        for (step, files) in listing.iter().rev() {
            let is_old = self.keep > 0 && kept >= self.keep;
            let is_kept = *step <= newest && (local.contains(step) || complete(files) && !is_old);
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

    /// Returns the manifest of a step, as text and read; `None` if there is none that can be read.
    fn manifest(&self, step: u64) -> Result<Option<(Vec<u8>, Manifest)>> {
        let name = format!("{}/{FILE_NAME}", atomic::name(step));
        let Some(text) = self.bucket.get(&name)? else { return Ok(None) };
        match Manifest::parse(&text) {
            Ok(manifest) if manifest.step == step => Ok(Some((text, manifest))),
            _ => {
                tracing::warn!("{} is damaged", self.bucket.place(&name));
                Ok(None)
            }
        }
    }
}

/// Tells the thread that the run has ended.
#[derive(Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn is_asked(&self) -> bool {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `time`, or until the run ends. After the end of the run, waits for a shorter time.
    fn wait(&self, time: Duration) {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let (had_ended, time) = (*asked, if *asked { time.min(POLL) } else { time });
        drop(self.changed.wait_timeout_while(asked, time, |now| *now == had_ended));
    }
}

/// The thread that uploads checkpoints.
pub struct Uploads {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Uploads {
    /// Waits until all checkpoints are in the store, or until several attempts have failed.
    pub fn finish(self) {}
}

impl Drop for Uploads {
    fn drop(&mut self) {
        *self.stop.asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!("the thread that uploads checkpoints has panicked");
        }
    }
}

#[cfg(test)]
#[path = "backup_tests.rs"]
mod tests;
