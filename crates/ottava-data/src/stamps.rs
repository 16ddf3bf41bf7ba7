//! Stamps of files. A stamp is what the file system knows of a file, so a change of the content is noticed without reading the file.
//!
//! A run does not read content again that was checked before: hashes of sources and checks of prepared tokens are valid as long as the files have the
//! same stamps. Any write to a file changes its time of the last status change, which programs cannot set.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use ottava_common::fs::{RealFs, replace_file};
use ottava_common::hash::{seal, unseal};
use ottava_common::{Error, input};

/// The maximum number of seconds by which file systems round the times of files.
const GRANULARITY: i64 = 2;

/// The maximum size of a file of stamps in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// The stamp of a file. For a link, the stamp of its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stamp {
    size: u64,
    inode: u64,
    /// The seconds and nanoseconds of the last change of the content.
    modified: [i64; 2],
    /// The seconds and nanoseconds of the last change of content, name or permissions.
    changed: [i64; 2],
}

impl Stamp {
    /// Returns the stamp of a file; `None` if the file cannot be found.
    pub(super) fn of(path: &Path) -> Option<Stamp> {
        let found = std::fs::metadata(path).ok()?;
        Some(Stamp {
            size: found.size(),
            inode: found.ino(),
            modified: [found.mtime(), found.mtime_nsec()],
            changed: [found.ctime(), found.ctime_nsec()],
        })
    }

    /// Whether any write from now on changes the stamp. Right after a write, another write may leave the times unchanged.
    pub(super) fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
        self.changed[0] < now - GRANULARITY
    }
}

/// The known hashes of files, by path. They are stored in a file of the cache.
#[derive(Default)]
pub(super) struct Hashes {
    known: BTreeMap<String, (Stamp, String)>,
    path: PathBuf,
}

impl Hashes {
    /// Reads the hashes in `cache`. If the file is missing or damaged, no hashes are known.
    pub(super) fn read(cache: &Path) -> Hashes {
        let path = cache.join("sources.json");
        Hashes { known: read(&path).unwrap_or_default(), path }
    }

    /// Returns the hash of the file at `path` if the file still has the `stamp`.
    pub(super) fn get(&self, path: &Path, stamp: Option<&Stamp>) -> Option<&str> {
        let (known, hash) = self.known.get(&*absolute(path))?;
        (Some(known) == stamp).then_some(hash)
    }

    /// Adds the hashes of files, with the stamps that the files had before they were hashed.
    pub(super) fn add(&mut self, files: impl IntoIterator<Item = (PathBuf, Stamp, String)>) {
        self.known.extend(files.into_iter().map(|(path, stamp, hash)| (absolute(&path), (stamp, hash))));
    }

    /// Writes the file of hashes. A read-only cache stays unchanged.
    pub(super) fn write(&self) {
        write(&self.path, &self.known);
    }
}

fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).display().to_string()
}

/// Reads a sealed file; `None` if it is missing or damaged.
pub(super) fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    let text = input::read(path, MAX_BYTES).ok()?;
    let mut value = unseal(&text).ok()?;
    serde_json::from_value(value.get_mut("known")?.take()).ok()
}

/// Writes a sealed file. The file only saves time: if it cannot be written, the next start repeats the work. A read-only cache causes no warning.
pub(super) fn write<T: Serialize>(path: &Path, known: &T) {
    #[derive(Serialize)]
    struct File<'a, T> {
        known: &'a T,
    }
    match replace_file(&RealFs, path, seal(&File { known }).as_bytes()) {
        Err(Error::Io { source, .. }) if is_read_only(&source) => {}
        Err(error) => {
            tracing::warn!("{error}; this file of the cache only saves time, and the next start works without it")
        }
        Ok(()) => {}
    }
}

fn is_read_only(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_known_while_the_stamp_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        std::fs::write(&path, "one").unwrap();
        let stamp = Stamp::of(&path).unwrap();
        assert!(!stamp.is_settled(), "it was written just now");
        assert!(Stamp { changed: [stamp.changed[0] - 60, 0], ..stamp.clone() }.is_settled());
        let mut hashes = Hashes::read(folder.path());
        hashes.add([(path.clone(), stamp.clone(), "h".to_string())]);
        hashes.write();
        let hashes = Hashes::read(folder.path());
        assert_eq!(hashes.get(&path, Some(&stamp)), Some("h"));
        assert_eq!((hashes.get(&other, Some(&stamp)), hashes.get(&path, None)), (None, None));
        // The content changes, but the size and the time of the last change stay the same.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::write(&path, "two").unwrap();
        std::fs::File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_eq!(hashes.get(&path, Stamp::of(&path).as_ref()), None);
        // A damaged file is read as an empty file.
        let file = folder.path().join("sources.json");
        let text = std::fs::read_to_string(&file).unwrap().replace("\"h\"", "\"g\"");
        std::fs::write(&file, text).unwrap();
        assert_eq!(Hashes::read(folder.path()).get(&path, Some(&stamp)), None);
    }
}
