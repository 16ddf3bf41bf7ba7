//! Downloads the files of a commit that the cache lacks, and returns the folder with them.

use crate::api::{Hub, Missing};
use crate::blob::{Blob, Step};
use crate::data::{Choice, choose, choose_copy, is_partial};
use crate::entry::Entry;
use crate::files::{is_metadata, weights};
use crate::{DataId, Kind, RepoId, glob};
use ottava_common::fs::free_space;
use ottava_common::threads::in_threads;
use ottava_common::{Error, Result, interrupt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// The number of requests at a time.
const THREADS: usize = 8;

/// The branch with copies in Parquet, which the Hub makes of data sets.
const COPY: &str = "refs/convert/parquet";

/// The maximum size in bytes of a README.md with configurations.
const MAX_CARD: u64 = 1 << 20;

/// Sees the progress of downloads and uploads.
pub trait Watch {
    /// `done` of `total` bytes of `what` are transferred. Only the last call for these bytes has equal numbers.
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

/// Files of a data set.
struct ChosenData {
    repo: RepoId,
    opened: Opened,
    /// Their paths.
    paths: Vec<String>,
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
        let chosen = self.choose_data(id, default_splits, watch)?;
        let entries: Vec<&Entry> =
            chosen.opened.entries.iter().filter(|entry| chosen.paths.contains(&entry.path)).collect();
        let folder = self.fetch(&chosen.repo, &chosen.opened, &entries, watch)?;
        Ok(chosen.paths.iter().map(|path| folder.join(path)).collect())
    }

    /// Returns the files that [`Hub::data_files`] downloads, each as a data set with this file alone, at its commit. Downloads no data.
    ///
    /// Has the errors of [`Hub::data_files`].
    pub fn data_shards(&self, id: &DataId, default_splits: &[&str], watch: &mut dyn Watch) -> Result<Vec<DataId>> {
        let ChosenData { repo, opened, paths } = self.choose_data(id, default_splits, watch)?;
        let repo = repo.at(&opened.commit);
        Ok(paths.into_iter().map(|pattern| DataId { repo: repo.clone(), pattern, config: None, split: None }).collect())
    }

    /// Finds the commit that [`Hub::data_files`] reads, and downloads no data.
    ///
    /// Has the errors of [`Hub::data_files`].
    pub fn look_up_data(&self, id: &DataId, default_splits: &[&str], watch: &mut dyn Watch) -> Result<()> {
        self.choose_data(id, default_splits, watch).map(drop)
    }

    fn choose_data(&self, id: &DataId, default_splits: &[&str], watch: &mut dyn Watch) -> Result<ChosenData> {
        let opened = self.open(&id.repo)?;
        let wrong = |why: String| Error::Data(format!("{}: {why}", id.repo));
        let paths: Vec<&str> = opened.entries.iter().map(|entry| entry.path.as_str()).collect();
        let named = id.split.as_deref().map(|split| [split]);
        let splits = named.as_ref().map_or(default_splits, |named| named.as_slice());
        let (config, is_copy) = (id.config.as_deref(), id.repo.revision() == COPY && id.pattern.is_empty());
        let paths = match is_copy {
            true => choose_copy(&paths, config, splits).map_err(wrong)?,
            false => {
                let card = self.card(id, &opened, watch)?;
                match choose(&paths, card.as_deref(), &id.pattern, config, splits).map_err(wrong)? {
                    Choice::Files(chosen) => chosen,
                    // Scripts and archives have a copy in Parquet on a branch of the Hub.
                    Choice::NoneReadable => {
                        let repo = id.repo.clone().pinned(Some(COPY));
                        if repo.revision() != COPY {
                            let kinds = "Parquet, Arrow, JSON, CSV, text";
                            return Err(wrong(format!("this revision has no file of a kind that is read ({kinds})")));
                        }
                        let copied = self.choose_data(&DataId { repo, ..id.clone() }, default_splits, watch);
                        return copied.map_err(|error| match error {
                            Error::Config(why) => wrong(format!("there is no file of a kind that is read, and {why}")),
                            other => other,
                        });
                    }
                }
            }
        };
        if is_copy && paths.iter().any(|path| is_partial(path)) {
            tracing::warn!("{}: the Parquet copy of the Hub has only the beginning of this split", id.repo);
        }
        Ok(ChosenData { repo: id.repo.clone(), opened, paths })
    }

    /// Returns the README.md if the files of a split are wanted.
    fn card(&self, id: &DataId, opened: &Opened, watch: &mut dyn Watch) -> Result<Option<String>> {
        let card: Vec<&Entry> = opened.entries.iter().filter(|entry| entry.path == "README.md").collect();
        let Some(entry) = card.first().filter(|_| id.pattern.is_empty()) else { return Ok(None) };
        if entry.size > MAX_CARD {
            return Err(Error::Data(format!(
                "{}: its README.md has {} bytes, more than {MAX_CARD}, and is not read; name its files, as in hf://datasets/{}/data/*.parquet",
                id.repo, entry.size, id.repo
            )));
        }
        let path = self.fetch(&id.repo, opened, &card, watch)?.join("README.md");
        Ok(std::fs::read_to_string(path).ok())
    }

    /// Finds the commit of `id` and its files, on the server or in the cache.
    fn open(&self, id: &RepoId) -> Result<Opened> {
        let cached = self.cached(id);
        let mut unreachable = self.offline.map(|name| format!("{name} is set"));
        // The files of a commit never change.
        let fixed = self.pins().get(id).or_else(|| id.is_commit().then(|| id.revision().to_string()));
        let commit = match (fixed, &unreachable) {
            (Some(commit), _) => commit,
            (None, None) => match self.commit(id) {
                Ok(commit) => {
                    cached.set_commit(id.revision(), &commit)?;
                    commit
                }
                Err(Missing::Refused(error)) => return Err(self.or_other_kind(id, error)),
                Err(Missing::Fault(fault)) => {
                    interrupt::check("asking for a model or data")?;
                    let commit = cached.commit(id.revision()).ok_or_else(|| self.absent(id, &fault.words))?;
                    tracing::warn!("{id}: {}; the commit {commit} of the cache is used", fault.words);
                    unreachable = Some(fault.words);
                    commit
                }
            },
            (None, Some(reason)) => cached.commit(id.revision()).ok_or_else(|| self.absent(id, reason))?,
        };
        let mut entries = cached.listing(&commit);
        if entries.is_none() && unreachable.is_none() {
            match self.tree(id, &commit) {
                Ok(listed) => {
                    cached.set_listing(&commit, &listed)?;
                    entries = Some(listed);
                }
                Err(Missing::Refused(error)) => return Err(error),
                Err(Missing::Fault(fault)) => {
                    interrupt::check("asking for a model or data")?;
                    unreachable = Some(fault.words);
                }
            }
        }
        // A cache of other programs, without a listing: what is there counts as all there is.
        let entries = entries.unwrap_or_else(|| cached.entries(&commit));
        match &unreachable {
            Some(reason) if entries.is_empty() => Err(self.absent(id, reason)),
            _ => {
                self.pin(id, &commit);
                Ok(Opened { commit, entries, unreachable })
            }
        }
    }

    /// Adds to the error of `id` that the server has a repository of the other kind with this name, if it has.
    fn or_other_kind(&self, id: &RepoId, error: Error) -> Error {
        let (other, name) = (id.of_other_kind(), &id.name);
        let remedy = match other.kind {
            Kind::Dataset => format!(
                "name it where data stand, as in `ottava init MODEL {name}`, or download it with `ottava download --dataset {name}`"
            ),
            Kind::Model => format!(
                "name it where a model stands, as in `ottava init {name} DATA`, or download it with `ottava download {name}`"
            ),
        };
        match (error, self.commit(&other)) {
            (Error::Config(text), Ok(_)) => {
                Error::Config(format!("{text}; {} has a {} of this name: {remedy}", self.endpoint, other.kind.words()))
            }
            (error, _) => error,
        }
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
        // It is no error, because parts of the files may be in the cache already.
        if let Some(text) = free_space(&self.cache).and_then(|free| shortage(total, free)) {
            tracing::warn!(
                "{id}: {text}, the disk of {}: free space, or set HF_HOME to a folder of another disk",
                self.cache.display()
            );
        }
        // Files with equal content are downloaded once.
        let mut unique: Vec<&Entry> = Vec::new();
        for entry in &missing {
            if !unique.iter().any(|known| known.checksum() == entry.checksum()) {
                unique.push(entry);
            }
        }
        let blobs: Vec<Blob> = unique.iter().map(|entry| Blob::new(self, id, commit, entry, &written)).collect();
        download(&blobs, &mut || {
            // The checksums are compared after the last byte has arrived. Only the last call has equal numbers.
            let done = written.load(Ordering::Relaxed);
            if done < total {
                watch.at(&id.name, done, total);
            }
        })?;
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
            "the {kind} {id} is not complete in {cache}: {reason}. Run `ottava download {flag}{id}` where there is a network and copy the folder \
             {} of its cache, or name a local folder{}",
            id.folder().display(),
            id.path_hint()
        ))
    }
}

/// Returns a sentence if files with `total` bytes do not fit a disk with `free` bytes.
fn shortage(total: u64, free: u64) -> Option<String> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    (free < total).then(|| format!("the files have {:.2} GiB, and {:.2} GiB are free on", gib(total), gib(free)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_that_does_not_fit_the_disk_is_told_with_both_sizes() {
        assert_eq!(shortage(1 << 30, 1 << 30), None);
        let told = shortage(3 << 30, 1 << 29).unwrap();
        assert!(told.contains("3.00 GiB") && told.contains("0.50 GiB are free"), "{told}");
    }
}
