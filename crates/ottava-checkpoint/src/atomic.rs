//! Atomic checkpoints: a checkpoint is complete or absent, whenever the program or the machine stops.
//!
//! Files are written into a `.tmp-` folder, hashed and flushed to the disk. The manifest is written last. Renaming the folder creates the checkpoint.
//! Before a checkpoint is deleted, it is renamed. Only one process writes into a run's folder, since the trainer holds its lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use ottava_tensor::comm::report_progress;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::manifest::{FILE_NAME, FORMAT, FileEntry, Manifest, Verify, verify};
use ottava_common::fs::{Fs, FsFile, create_dirs, is_relative_path, parent, set_aside, sync_parent};
use ottava_common::hash::{hex, sha256_of_chunks};
use ottava_common::{Error, Result};

/// The prefix of a folder that is being written.
pub(crate) const TEMPORARY: &str = ".tmp-checkpoint-";

/// The prefix of a folder that is being deleted.
const TRASH: &str = ".trash-checkpoint-";

/// The first bytes of a file that may grow.
pub struct FileStart {
    path: PathBuf,
    bytes: u64,
}

impl FileStart {
    /// Returns a start with all bytes that the file at `path` has now.
    pub fn now(path: &Path) -> Result<FileStart> {
        let bytes = std::fs::metadata(path).map_err(Error::io(path))?.len();
        Ok(FileStart { path: path.to_path_buf(), bytes })
    }
}

/// A checkpoint that is being written. If it is dropped before [`CheckpointWriter::finish`], the files written so far are removed.
///
/// Several processes can write files of one checkpoint. One process begins it, and the others join it at its path. The process that began it lists
/// the files of all processes.
pub struct CheckpointWriter<'a> {
    fs: &'a dyn Fs,
    /// The path of the complete checkpoint.
    target: PathBuf,
    temporary: PathBuf,
    step: u64,
    files: BTreeMap<String, FileEntry>,
    /// The subfolders made so far.
    subfolders: BTreeSet<PathBuf>,
    /// Whether a drop removes the files written so far.
    discards: bool,
    hashing: Hashing,
}

/// The hash of a file in the manifest.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Hashing {
    /// The SHA-256 of the file, computed while it is written.
    Whole,
    /// The hash of its chunks, which all processors compute when it is written. Only for snapshots in memory, which are as fast to read as to write.
    Chunks,
}

impl<'a> CheckpointWriter<'a> {
    /// Begins the checkpoint of `step` in the run's `folder`, and removes the leftovers of killed processes.
    pub fn begin(fs: &'a dyn Fs, folder: &Path, step: u64) -> Result<CheckpointWriter<'a>> {
        let temporary = CheckpointWriter::temporary(folder, step);
        remove_leftovers(fs, folder)?;
        CheckpointWriter::begin_at(fs, folder.join(name(step)), temporary, step)
    }

    /// Returns the path at which the checkpoint of `step` in `folder` is written until it is complete.
    pub fn temporary(folder: &Path, step: u64) -> PathBuf {
        folder.join(format!("{TEMPORARY}{step}"))
    }

    /// Begins a plain model folder at `path`. [`CheckpointWriter::finish_folder`] finishes it.
    pub fn begin_folder(fs: &'a dyn Fs, path: &Path) -> Result<CheckpointWriter<'a>> {
        let name = path.file_name().ok_or_else(|| {
            Error::Config(format!("{}: this is not the name of a new folder; name one", path.display()))
        })?;
        let temporary = path.with_file_name(format!("{TEMPORARY}{}", name.to_string_lossy()));
        if temporary.symlink_metadata().is_ok() {
            fs.remove(&temporary).map_err(Error::io(&temporary))?;
        }
        CheckpointWriter::begin_at(fs, path.to_path_buf(), temporary, 0)
    }

    fn begin_at(fs: &'a dyn Fs, target: PathBuf, temporary: PathBuf, step: u64) -> Result<CheckpointWriter<'a>> {
        create_dirs(fs, parent(&target))?;
        let (files, subfolders) = (BTreeMap::new(), BTreeSet::new());
        let hashing = Hashing::Whole;
        let writer = CheckpointWriter { fs, target, temporary, step, files, subfolders, discards: true, hashing };
        fs.create_dir(&writer.temporary).map_err(Error::io(&writer.temporary))?;
        Ok(writer)
    }

    /// Joins the checkpoint of `step` that another process has begun at the path `temporary` with these `subfolders`. The other process finishes it.
    pub fn join(fs: &'a dyn Fs, temporary: &Path, step: u64, subfolders: &[&str]) -> CheckpointWriter<'a> {
        CheckpointWriter {
            fs,
            target: PathBuf::new(),
            temporary: temporary.to_path_buf(),
            step,
            files: BTreeMap::new(),
            subfolders: subfolders.iter().map(|name| temporary.join(name)).collect(),
            discards: false,
            hashing: Hashing::Whole,
        }
    }

    /// Hashes files in this way from now on.
    pub(crate) fn with_hashing(mut self, hashing: Hashing) -> CheckpointWriter<'a> {
        self.hashing = hashing;
        self
    }

    /// Returns the temporary folder, which holds the files until the checkpoint is complete.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Takes the list of files written so far, for the process that began the checkpoint.
    pub fn take_files(&mut self) -> BTreeMap<String, FileEntry> {
        std::mem::take(&mut self.files)
    }

    /// Lists files that another process has written.
    pub fn adopt(&mut self, files: BTreeMap<String, FileEntry>) {
        self.files.extend(files);
    }

    /// Makes a subfolder.
    pub fn subfolder(&mut self, name: &str) -> Result<()> {
        let path = self.temporary.join(name);
        if self.subfolders.insert(path.clone()) {
            self.fs.create_dir(&path).map_err(Error::io(&path))?;
        }
        Ok(())
    }

    /// Writes the file at the relative path `name`: `content` writes its bytes, then it is flushed to the disk and listed in the manifest.
    pub fn file(&mut self, name: &str, content: impl FnOnce(&mut CheckpointFile) -> Result<()>) -> Result<()> {
        if !is_relative_path(name) || name == FILE_NAME || self.files.contains_key(name) {
            return Err(Error::Checkpoint(format!("a checkpoint cannot hold a second or special file {name:?}")));
        }
        if let Some((subfolder, _)) = name.rsplit_once('/') {
            let within: Vec<_> = Path::new(subfolder).ancestors().filter(|path| *path != Path::new("")).collect();
            for folder in within.into_iter().rev().filter_map(Path::to_str) {
                self.subfolder(folder)?;
            }
        }
        let entry = self.write(name, content)?;
        self.files.insert(name.to_string(), entry);
        Ok(())
    }

    /// Copies a file to the relative path `name`.
    pub fn copy(&mut self, name: &str, FileStart { path, bytes }: &FileStart) -> Result<()> {
        let mut from = File::open(path).map_err(Error::io(path))?.take(*bytes);
        let mut buffer = vec![0; 1 << 20];
        self.file(name, |to| {
            loop {
                match from.read(&mut buffer).map_err(Error::io(path))? {
                    0 => return Ok(()),
                    count => to.write(&buffer[..count])?,
                }
            }
        })
    }

    /// Writes the manifest with the fields `extra`, renames the folder and returns its final path.
    ///
    /// If the final path exists, it is renamed. It does not belong to this run, since [`abandon_after`] renamed all later checkpoints when the run
    /// began.
    pub fn finish(mut self, extra: Value) -> Result<PathBuf> {
        let ottava = env!("CARGO_PKG_VERSION").to_string();
        let files = std::mem::take(&mut self.files);
        let manifest = Manifest { format: FORMAT, ottava, step: self.step, files, extra };
        self.write(FILE_NAME, |file| file.write(manifest.render().as_bytes()))?;
        if self.target.symlink_metadata().is_ok() {
            set_aside(self.fs, &self.target)?;
        }
        self.finish_folder()
    }

    /// Renames the folder and returns its final path, which must not exist before.
    pub fn finish_folder(mut self) -> Result<PathBuf> {
        for folder in self.subfolders.iter().chain([&self.temporary]) {
            self.fs.sync_dir(folder).map_err(Error::io(folder))?;
        }
        self.fs.rename(&self.temporary, &self.target).map_err(Error::io(&self.target))?;
        self.discards = false;
        sync_parent(self.fs, &self.target)?;
        Ok(std::mem::take(&mut self.target))
    }

    fn write(&self, name: &str, content: impl FnOnce(&mut CheckpointFile) -> Result<()>) -> Result<FileEntry> {
        let path = self.temporary.join(name);
        let file = self.fs.create(&path).map_err(Error::io(&path))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let hasher = (self.hashing == Hashing::Whole).then(Sha256::new);
        let mut file = CheckpointFile { file, path, hasher, size: 0 };
        content(&mut file)?;
        file.finish()
    }
}

impl Drop for CheckpointWriter<'_> {
    fn drop(&mut self) {
        if self.discards {
            // On a failing disk, this may fail too. Then the next save removes the folder.
            let _ = self.fs.remove(&self.temporary);
        }
    }
}

/// A file of a checkpoint while it is written.
pub struct CheckpointFile {
    file: BufWriter<Box<dyn FsFile>>,
    path: PathBuf,
    /// `None` if the chunks of the complete file are hashed.
    hasher: Option<Sha256>,
    size: u64,
}

impl CheckpointFile {
    /// Appends `bytes`.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path))?;
        self.hasher.iter_mut().for_each(|hasher| hasher.update(bytes));
        self.size += bytes.len() as u64;
        report_progress();
        Ok(())
    }

    fn finish(mut self) -> Result<FileEntry> {
        self.file.flush().map_err(Error::io(&self.path))?;
        self.file.get_mut().sync().map_err(Error::io(&self.path))?;
        let sha256 = match self.hasher {
            Some(hasher) => hex(&hasher.finalize()),
            None => sha256_of_chunks(&self.path).map_err(Error::io(&self.path))?.1,
        };
        Ok(FileEntry { size: self.size, sha256 })
    }
}

/// The result of [`latest_complete`].
#[derive(Debug)]
pub struct Latest {
    /// The newest complete checkpoint.
    pub complete: Option<(PathBuf, Manifest)>,
    /// The damaged checkpoints that are newer, each with the reason.
    pub damaged: Vec<(PathBuf, Error)>,
}

/// Finds the newest complete checkpoint in a run's `folder`, by step and not by time.
pub fn latest_complete(folder: &Path, depth: Verify) -> Result<Latest> {
    latest_complete_until(folder, u64::MAX, depth)
}

/// Finds the newest complete checkpoint of a step up to `last`.
pub fn latest_complete_until(folder: &Path, last: u64, depth: Verify) -> Result<Latest> {
    let mut latest = Latest { complete: None, damaged: Vec::new() };
    for (step, path) in checkpoints(folder)?.into_iter().rev().filter(|(step, _)| *step <= last) {
        match complete(&path, step, depth) {
            Ok(manifest) => {
                latest.complete = Some((path, manifest));
                break;
            }
            Err(error @ Error::Cancelled(_)) => return Err(error),
            Err(error) => latest.damaged.push((path, error)),
        }
    }
    Ok(latest)
}

/// Deletes old checkpoints. The `count` newest complete checkpoints and the checkpoints of the `protected` steps (such as the best) are kept. A
/// checkpoint that was saved only on a signal does not count, and is deleted when there is a newer checkpoint.
///
/// Keeps at least one complete checkpoint. Also keeps damaged checkpoints that are newer than the oldest kept checkpoint.
pub fn delete_old(fs: &dyn Fs, folder: &Path, count: usize, protected: &[u64]) -> Result<()> {
    let (mut kept, mut has_newer) = (0, false);
    for (step, path) in checkpoints(folder)?.into_iter().rev() {
        let manifest = complete(&path, step, Verify::Sizes).ok();
        let is_superseded = has_newer && manifest.as_ref().is_some_and(Manifest::is_interruption);
        if kept < count.max(1) && !is_superseded {
            has_newer |= manifest.is_some();
            kept += usize::from(manifest.is_some_and(|manifest| !manifest.is_interruption()));
        } else if !protected.contains(&step) {
            remove(fs, &path, step)?;
        }
    }
    Ok(())
}

fn complete(path: &Path, step: u64, depth: Verify) -> Result<Manifest> {
    let manifest = verify(path, depth)?;
    if manifest.step != step {
        return Err(Error::Checkpoint(format!("{}: its manifest is of step {}", path.display(), manifest.step)));
    }
    Ok(manifest)
}

/// Removes the leftovers of killed processes in a run's `folder`: checkpoints that were being written or deleted.
pub fn remove_leftovers(fs: &dyn Fs, folder: &Path) -> Result<()> {
    for leftover in named(folder, |name| name.starts_with(TEMPORARY) || name.starts_with(TRASH))? {
        fs.remove(&leftover).map_err(Error::io(&leftover))?;
    }
    Ok(())
}

/// Renames before deleting, so that a half-deleted checkpoint is never read.
fn remove(fs: &dyn Fs, path: &Path, step: u64) -> Result<()> {
    let trash = path.with_file_name(format!("{TRASH}{step}"));
    if trash.symlink_metadata().is_ok() {
        fs.remove(&trash).map_err(Error::io(&trash))?;
    }
    fs.rename(path, &trash).map_err(Error::io(path))?;
    fs.remove(&trash).map_err(Error::io(&trash))
}

/// Renames all checkpoints in a run's `folder` of steps after `step`, complete or not, newest first, and returns their new paths. Otherwise, the next
/// `--resume` of a run that continues after `step` would use one of them.
pub fn abandon_after(fs: &dyn Fs, folder: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let later = checkpoints(folder)?.into_iter().rev().take_while(|(other, _)| *other > step);
    later.map(|(_, path)| set_aside(fs, &path)).collect()
}

/// Returns whether `folder` holds a checkpoint, complete or not.
pub fn holds_checkpoints(folder: &Path) -> Result<bool> {
    Ok(!checkpoints(folder)?.is_empty())
}

/// Returns the name of the checkpoint of `step`.
pub fn name(step: u64) -> String {
    format!("checkpoint-{step}")
}

/// Returns the folders with names of checkpoints, in the order of their steps.
pub(crate) fn checkpoints(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    // Other spellings of a number, such as +5 or 05, are not names of checkpoints.
    let step_of = |file_name: &str| {
        let step = file_name.strip_prefix("checkpoint-")?.parse().ok()?;
        (name(step) == file_name).then_some(step)
    };
    let step_of_path = |path: PathBuf| Some((step_of(path.file_name()?.to_str()?)?, path));
    let folders = named(folder, |_| true)?.into_iter().filter(|path| path.is_dir());
    let mut found: Vec<_> = folders.filter_map(step_of_path).collect();
    found.sort_unstable();
    Ok(found)
}

/// Returns the entries of `folder` whose names match. Returns no entries if `folder` does not exist.
pub(crate) fn named(folder: &Path, matches: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io(folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io(folder))?;
        if entry.file_name().to_str().is_some_and(&matches) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
#[path = "atomic_tests.rs"]
mod tests;
