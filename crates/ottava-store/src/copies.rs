//! Local copies of objects.

use crate::{Bucket, Object};
use ottava_common::fs::{RealFs, create_dirs};
use ottava_common::hash::sha256;
use ottava_common::threads::in_threads;
use ottava_common::{Error, Result};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The number of objects that are downloaded at a time.
const THREADS: usize = 4;

/// The pause between checks whether another process has finished a copy.
const POLL: Duration = Duration::from_millis(50);

impl Bucket {
    /// Returns files with the content of `objects`, in their order. Files are in subfolders of `folder` that name the content (by the ETag), so a file
    /// is downloaded again only if its object has changed, and processes share the files. Calls `look` with the bytes that are there and all bytes.
    ///
    /// Errors with [`Error::External`] if the store fails.
    pub fn copies(&self, objects: &[Object], folder: &Path, look: &mut dyn FnMut(u64, u64)) -> Result<Vec<PathBuf>> {
        let paths: Vec<PathBuf> = objects.iter().map(|object| self.path(object, folder)).collect();
        let total = objects.iter().map(|object| object.size).sum();
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let work = |has_failed: &dyn Fn() -> bool| {
            while !has_failed() {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let (Some(object), Some(path)) = (objects.get(at), paths.get(at)) else { break };
                self.copy(object, path)?;
                done.fetch_add(object.size, Ordering::Relaxed);
            }
            Ok(())
        };
        if paths.iter().zip(objects).all(|(path, object)| is_whole(path, object)) {
            return Ok(paths);
        }
        in_threads(THREADS, "downloading", work, &mut || look(done.load(Ordering::Relaxed).min(total), total))?;
        look(total, total);
        Ok(paths)
    }

    /// Returns the path of the copy of an object.
    fn path(&self, object: &Object, folder: &Path) -> PathBuf {
        let Object { name, size, etag } = object;
        let content = sha256(format!("{}\n{size}\n{etag}", self.place(name)).as_bytes());
        folder.join(&content[..16]).join(name.rsplit('/').next().unwrap_or(name))
    }

    /// Downloads an object, unless its copy is whole. A file gets its name when it is whole.
    fn copy(&self, object: &Object, path: &Path) -> Result<()> {
        let folder = path.parent().expect("a copy is in a subfolder");
        create_dirs(&RealFs, folder)?;
        let lock_path = folder.join(".lock");
        let lock = File::options().create(true).append(true).open(&lock_path).map_err(Error::io(&lock_path))?;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => self.check("waiting for another download of the same object")?,
                Err(TryLockError::Error(error)) => return Err(Error::io(&lock_path)(error)),
            }
            std::thread::sleep(POLL);
        }
        if is_whole(path, object) {
            return Ok(());
        }
        let part = folder.join(".part");
        self.get_file(&object.name, object.size, &part)?;
        std::fs::rename(&part, path).map_err(Error::io(path))
    }
}

fn is_whole(path: &Path, object: &Object) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.len() == object.size)
}
