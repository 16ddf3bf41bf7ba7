//! Downloads the files of a commit that the cache lacks, and returns the folder with them.

use crate::api::{Hub, Missing};
use crate::blob::{Blob, Step};
use crate::data::{Choice, choose};
use crate::entry::Entry;
use crate::files::{is_metadata, weights};
use crate::threads::in_threads;
use crate::{DataId, Kind, RepoId, glob};
use ottava_common::{Error, Result, interrupt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// The number of requests at a time.
const THREADS: usize = 8;

/// Sees the progress of downloads and uploads.
pub trait Watch {
    /// `done` of `total` bytes of `what` are transferred. The last call has equal numbers.
    fn at(&mut self, what: &str, done: u64, total: u64);
}

/// A commit, its files, and whether the server can be asked for more.
struct Opened {
    commit: String,
    /// All files; only the files in the snapshot if no listing is known.
    entries: Vec<Entry>,
    /// Why the server cannot be asked; `None` if it can.
    unreachable: Option<String>,
}

impl Hub {
    /// Returns the folder of a model or an adapter: its configuration, its tokenizer, its templates and, if `with_weights`, its safetensors. Other
    /// weights and programs are not downloaded.
    ///
    /// Errors with [`Error::Config`] if there is no such model, if it may not be read, or if the cache lacks it and there is no network; with
    /// [`Error::Model`] if its weights are no safetensors; with [`Error::External`] if the server fails.
    pub fn model(&self, id: &RepoId, with_weights: bool, watch: &mut dyn Watch) -> Result<PathBuf> {
        let opened = self.open(id)?;
        let metadata: Vec<&Entry> = opened.entries.iter().filter(|entry| is_metadata(entry)).collect();
        let folder = self.fetch(id, &opened, &metadata, watch)?;
        if with_weights {
            let chosen = weights(&folder, &opened.entries).map_err(|why| Error::Model(format!("{id}: {why}")))?;
            self.fetch(id, &opened, &chosen, watch)?;
        }
        Ok(folder)
    }

    /// Returns the folder with all files of a repository whose paths match one of `patterns`; all files if there are none.
    ///
    /// Has the errors of [`Hub::model`].
    pub fn files(&self, id: &RepoId, patterns: &[String], watch: &mut dyn Watch) -> Result<PathBuf> {
        let opened = self.open(id)?;
        let fits =
            |entry: &&Entry| patterns.is_empty() || patterns.iter().any(|pattern| glob::matches(pattern, &entry.path));
        let chosen: Vec<&Entry> = opened.entries.iter().filter(fits).collect();
        if chosen.is_empty() {
            return Err(Error::Config(format!("{id}: no file has a name of the pattern {}", patterns.join(", "))));
        }
        self.fetch(id, &opened, &chosen, watch)
    }

    /// Returns the files of a data set that match the pattern, or the files of the split. If `id` names no split, it is
    /// the first of `default_splits` that the data set has.
    ///
    /// Errors with [`Error::Data`] if the data set has no such files, and as [`Hub::model`].
    pub fn data_files(&self, id: &DataId, default_splits: &[&str], watch: &mut dyn Watch) -> Result<Vec<PathBuf>> {
        let opened = self.open(&id.repo)?;
        let card: Vec<&Entry> = opened.entries.iter().filter(|entry| entry.path == "README.md").collect();
        let card = match card.is_empty() || !id.pattern.is_empty() {
            true => None,
            false => std::fs::read_to_string(self.fetch(&id.repo, &opened, &card, watch)?.join("README.md")).ok(),
        };
        let paths: Vec<&str> = opened.entries.iter().map(|entry| entry.path.as_str()).collect();
        let named = id.split.as_deref().map(|split| [split]);
        let splits = named.as_ref().map_or(default_splits, |named| named.as_slice());
        let wrong = |why: String| Error::Data(format!("{}: {why}", id.repo));
        let chosen = match choose(&paths, card.as_deref(), &id.pattern, id.config.as_deref(), splits).map_err(wrong)? {
            Choice::Files(chosen) => chosen,
            // Scripts and archives have a copy in Parquet on a branch of the Hub.
            Choice::NoneReadable if !id.repo.revision().starts_with("refs/convert/") => {
                let repo = id.repo.clone().pinned(Some("refs/convert/parquet"));
                if repo.revision() != "refs/convert/parquet" {
                    return Err(wrong(
                        "this revision has no file of a kind that is read (Parquet, Arrow, JSON, CSV, text)".into(),
                    ));
                }
                return self.data_files(&DataId { repo, ..id.clone() }, default_splits, watch);
            }
            Choice::NoneReadable => return Err(wrong("there is no file of a kind that is read".into())),
        };
        let entries: Vec<&Entry> = opened.entries.iter().filter(|entry| chosen.contains(&entry.path)).collect();
        let folder = self.fetch(&id.repo, &opened, &entries, watch)?;
        Ok(chosen.iter().map(|path| folder.join(path)).collect())
    }

    /// Finds the commit of `id` and its files, on the server or in the cache.
    fn open(&self, id: &RepoId) -> Result<Opened> {
        let cached = self.cached(id);
        let mut unreachable = self.offline.map(|name| format!("{name} is set"));
        let known = cached.commit(id.revision());
        // The files of a commit never change.
        let is_known = |commit: &String| id.is_commit() && cached.listing(commit).is_some();
        let commit = match (known.clone().filter(is_known), &unreachable) {
            (Some(commit), _) => commit,
            (None, None) => match self.commit(id) {
                Ok(commit) => {
                    cached.set_commit(id.revision(), &commit)?;
                    commit
                }
                Err(Missing::Refused(error)) => return Err(error),
                Err(Missing::Fault(fault)) => {
                    interrupt::check("asking for a model or data")?;
                    let commit = known.ok_or_else(|| self.absent(id, &fault.words))?;
                    tracing::warn!("{id}: {}; the commit {commit} of the cache is used", fault.words);
                    unreachable = Some(fault.words);
                    commit
                }
            },
            (None, Some(reason)) => known.ok_or_else(|| self.absent(id, reason))?,
        };
        let entries = match (cached.listing(&commit), &unreachable) {
            (Some(entries), _) => entries,
            (None, None) => {
                let entries = self.tree(id, &commit).map_err(|missing| match missing {
                    Missing::Refused(error) => error,
                    Missing::Fault(fault) => self.absent(id, &fault.words),
                })?;
                cached.set_listing(&commit, &entries)?;
                entries
            }
            // A cache of other programs, without a listing: what is there counts as all there is.
            (None, Some(reason)) => {
                let folder = cached.snapshot(&commit);
                let entry = |path: String| {
                    let size = std::fs::metadata(folder.join(&path)).ok()?.len();
                    Entry::new(&path, size, "0".repeat(40), None)
                };
                let entries: Vec<Entry> = cached.files(&commit).into_iter().filter_map(entry).collect();
                if entries.is_empty() {
                    return Err(self.absent(id, reason));
                }
                entries
            }
        };
        Ok(Opened { commit, entries, unreachable })
    }

    /// Downloads the `chosen` files that the cache lacks, and returns the folder of the commit.
    fn fetch(&self, id: &RepoId, opened: &Opened, chosen: &[&Entry], watch: &mut dyn Watch) -> Result<PathBuf> {
        let (cached, commit) = (self.cached(id), &opened.commit);
        let missing: Vec<&Entry> = chosen.iter().copied().filter(|entry| !cached.has(commit, entry)).collect();
        if missing.is_empty() {
            return Ok(cached.snapshot(commit));
        }
        if let Some(reason) = &opened.unreachable {
            let example = &missing[0].path;
            return Err(self
                .absent(id, &format!("{} of its files, such as {example}, are missing, and {reason}", missing.len())));
        }
        let (written, total) = (AtomicU64::new(0), missing.iter().map(|entry| entry.size).sum());
        // Files with equal content are downloaded once.
        let mut unique: Vec<&Entry> = Vec::new();
        for entry in &missing {
            if !unique.iter().any(|known| known.checksum() == entry.checksum()) {
                unique.push(entry);
            }
        }
        let blobs: Vec<Blob> = unique.iter().map(|entry| Blob::new(self, id, commit, entry, &written)).collect();
        download(&blobs, &mut || watch.at(&id.name, written.load(Ordering::Relaxed).min(total), total))?;
        watch.at(&id.name, total, total);
        for entry in &missing {
            cached.link(commit, &entry.path, entry.checksum())?;
        }
        Ok(cached.snapshot(commit))
    }

    /// Returns the error for files that the cache lacks and the server cannot send.
    fn absent(&self, id: &RepoId, reason: &str) -> Error {
        let (kind, cache) = (id.kind.words(), self.cache.display());
        let flag = if id.kind == Kind::Dataset { "--dataset " } else { "" };
        Error::Config(format!(
            "{id} is no file or folder here, and the {kind} is not complete in {cache}: {reason}. Run `ottava download {flag}{id}` where there \
             is a network and copy the folder {} of its cache, or name a local folder",
            id.folder().display()
        ))
    }
}

/// Downloads `blobs` with several threads. Calls `look` from this thread meanwhile.
fn download(blobs: &[Blob], look: &mut dyn FnMut()) -> Result<()> {
    let work = |has_failed: &dyn Fn() -> bool| {
        while !has_failed() && blobs.iter().any(|blob| !blob.is_finished()) {
            match blobs.iter().map(Blob::step).find(|step| !matches!(step, Ok(Step::Idle))) {
                Some(worked) => {
                    worked?;
                }
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
        Ok(())
    };
    in_threads(THREADS, "downloading", work, look)
}
