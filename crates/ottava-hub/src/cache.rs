//! The cache on disk, in the layout of Hugging Face's programs.
//!
//! `models--OWNER--NAME/` has `blobs/CHECKSUM`, `snapshots/COMMIT/PATH` (relative links to blobs), and `refs/REVISION` (the commit as text). The
//! listing of a commit is `trees/COMMIT.json`, or `trees/COMMIT.ottava.json` if this crate has written it: Hugging Face's programs report a snapshot as
//! incomplete unless it has all files of `trees/COMMIT.json`, and this crate downloads only the files that it needs.

use crate::RepoId;
use crate::entry::Entry;
use crate::id::is_commit;
use ottava_common::fs::{RealFs, parent, replace_file};
use ottava_common::{Error, Result, input};
use serde_json::{Map, Value, json};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The version of the format of listings.
const FORMAT: u64 = 1;

/// The maximum size of a listing in bytes.
const MAX_LISTING: u64 = 256 << 20;

/// The folder of one repository in the cache.
pub(crate) struct Cached {
    folder: PathBuf,
    locks: PathBuf,
}

impl Cached {
    /// Returns the folder of `id` in the cache `root`.
    pub(crate) fn new(root: &Path, id: &RepoId) -> Cached {
        Cached { folder: root.join(id.folder()), locks: root.join(".locks").join(id.folder()) }
    }

    /// Returns the path of a file by its checksum.
    pub(crate) fn blob(&self, checksum: &str) -> PathBuf {
        self.folder.join("blobs").join(checksum)
    }

    /// Returns the path of the lock of a file.
    pub(crate) fn lock(&self, checksum: &str) -> PathBuf {
        self.locks.join(format!("{checksum}.lock"))
    }

    /// Returns the folder with the files of a commit.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the commit of `revision` that the cache knows.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_string());
        }
        let commit = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_string()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a branch or tag.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write(&self.folder.join("refs").join(revision), commit.as_bytes())
    }

    /// Returns the listing of a commit; `None` if the cache has none.
    pub(crate) fn listing(&self, commit: &str) -> Option<Vec<Entry>> {
        let trees = self.folder.join("trees");
        let paths = [format!("{commit}.ottava.json"), format!("{commit}.json")].map(|name| trees.join(name));
        paths.iter().find_map(|path| parse(&input::read_text(path, MAX_LISTING).ok()?))
    }

    /// Stores the listing of a commit.
    pub(crate) fn set_listing(&self, commit: &str, entries: &[Entry]) -> Result<()> {
        let files = entries.iter().map(|entry| {
            let mut file = json!({"size": entry.size, "blob_id": entry.oid});
            if let Some(sha256) = &entry.sha256 {
                file["lfs_sha256"] = json!(sha256);
                file["lfs_size"] = json!(entry.size);
            }
            (entry.path.clone(), file)
        });
        let listing = json!({"format_version": FORMAT, "files": files.collect::<Map<_, _>>()});
        let path = self.folder.join("trees").join(format!("{commit}.ottava.json"));
        write(&path, listing.to_string().as_bytes())
    }

    /// Returns the files of a snapshot, without their checksums.
    pub(crate) fn entries(&self, commit: &str) -> Vec<Entry> {
        let folder = self.snapshot(commit);
        let entry = |path: String| {
            let size = fs::metadata(folder.join(&path)).ok()?.len();
            Entry::new(&path, size, "0".repeat(40), None)
        };
        self.files(commit).into_iter().filter_map(entry).collect()
    }

    /// Returns the paths of all files of a snapshot, below the snapshot.
    fn files(&self, commit: &str) -> Vec<String> {
        let (root, mut found) = (self.snapshot(commit), Vec::new());
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => found.extend(path.strip_prefix(&root).ok().and_then(Path::to_str).map(str::to_string)),
                }
            }
        }
        found.sort();
        found
    }

    /// Whether the snapshot has the file, and the file has the size of the listing.
    pub(crate) fn has(&self, commit: &str, entry: &Entry) -> bool {
        fs::metadata(self.snapshot(commit).join(&entry.path)).is_ok_and(|found| found.len() == entry.size)
    }

    /// Makes the file of a snapshot a relative link to its blob.
    pub(crate) fn link(&self, commit: &str, path: &str, checksum: &str) -> Result<()> {
        let up = "../".repeat(path.matches('/').count() + 2);
        let (link, target) = (self.snapshot(commit).join(path), PathBuf::from(format!("{up}blobs/{checksum}")));
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            return Ok(());
        }
        create_parent(&link)?;
        let temporary = self.blob(&format!("{checksum}.link-{}", unique()));
        std::os::unix::fs::symlink(&target, &temporary).map_err(unwritable(&temporary))?;
        fs::rename(&temporary, &link).map_err(unwritable(&link))
    }
}

fn parse(text: &str) -> Option<Vec<Entry>> {
    let listing: Value = serde_json::from_str(text).ok()?;
    if listing["format_version"] != FORMAT {
        return None;
    }
    let entry = |(path, file): (&String, &Value)| {
        let text = |key: &str| file[key].as_str().map(str::to_string);
        Entry::new(path, file["lfs_size"].as_u64().or(file["size"].as_u64())?, text("blob_id")?, text("lfs_sha256"))
    };
    listing["files"].as_object()?.iter().map(entry).collect()
}

/// Creates the folder of `path`.
pub(crate) fn create_parent(path: &Path) -> Result<()> {
    let folder = parent(path);
    fs::create_dir_all(folder).map_err(unwritable(folder))
}

/// Converts a system error at `path` in the cache to an [`Error`], as [`Error::io`] does. If the cache cannot be there, the error names the variable
/// that moves the cache.
pub(crate) fn unwritable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let shown = path.display().to_string();
    move |error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied | ErrorKind::NotADirectory | ErrorKind::ReadOnlyFilesystem => {
                "set HF_HOME to a folder that you may write to"
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "free space there, or set HF_HOME to a folder of a larger disk; what has arrived is kept"
            }
            _ => return Error::io(shown)(error),
        };
        Error::Config(format!("{shown}: {error}; {remedy}"))
    }
}

/// Writes a small file of the cache. Several processes may write the same content.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    create_parent(path)?;
    let name = path.file_name().expect("a path with a name").to_string_lossy();
    let own = path.with_file_name(format!("{name}.{}", unique()));
    replace_file(&RealFs, &own, bytes)?;
    fs::rename(&own, path).map_err(unwritable(path))
}

/// Returns a name that no other thread, process or machine uses for its temporary file.
fn unique() -> String {
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}
