//! Local copies of objects.

use crate::{Bucket, Object};
use ottava_common::fs::{RealFs, create_dirs, is_relative_path};
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
    /// Returns a folder with copies of `objects`, under their names without `start`, with which all names begin.
    ///
    /// Each content is downloaded once into a subfolder of `folder`, by its name and ETag, so an object is downloaded again only if it has changed, and
    /// processes share the files. The returned folder has links to the contents. Calls `look` with the bytes that are there and all bytes.
    ///
    /// Errors with [`Error::External`] if the store fails, and with [`Error::Data`] if a name is no path.
    pub fn copies(
        &self,
        objects: &[Object],
        start: &str,
        folder: &Path,
        look: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf> {
        let contents: Vec<PathBuf> = objects.iter().map(|object| self.path(object, folder)).collect();
        let mut names = Vec::new();
        for object in objects {
            names.push(relative(&object.name, start).ok_or_else(|| {
                let why = "its name is no path of a file in a folder; name other objects, or rename it";
                Error::Data(format!("{}: {why}", self.place(&object.name)))
            })?);
        }
        let tree = tree(&names, &contents, folder);
        if names.iter().zip(objects).all(|(name, object)| is_whole(&tree.join(name), object)) {
            return Ok(tree);
        }
        self.download(objects, &contents, look)?;
        let _lock = self.lock(&tree)?;
        for ((name, content), object) in names.iter().zip(&contents).zip(objects) {
            // Another process may have made the link, and may read it now.
            let path = tree.join(name);
            if !is_whole(&path, object) {
                link(content, &path)?;
            }
        }
        Ok(tree)
    }

    /// Removes the copies that [`Bucket::copies`] with the same arguments has made. What cannot be removed stays.
    pub fn remove_copies(&self, objects: &[Object], start: &str, folder: &Path) {
        let contents: Vec<PathBuf> = objects.iter().map(|object| self.path(object, folder)).collect();
        let names: Vec<&str> = objects.iter().filter_map(|object| relative(&object.name, start)).collect();
        let of_contents = contents.iter().filter_map(|content| Some(content.parent()?.to_path_buf()));
        for copy in of_contents.chain([tree(&names, &contents, folder)]) {
            let _ = std::fs::remove_dir_all(copy);
        }
    }

    /// Downloads the objects whose copies in `paths` are not whole.
    fn download(&self, objects: &[Object], paths: &[PathBuf], look: &mut dyn FnMut(u64, u64)) -> Result<()> {
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
        in_threads(THREADS, "downloading", work, &mut || {
            // Only the last call has equal numbers.
            let done = done.load(Ordering::Relaxed);
            if done < total {
                look(done, total);
            }
        })?;
        look(total, total);
        Ok(())
    }

    /// Returns the path of the copy of an object.
    fn path(&self, object: &Object, folder: &Path) -> PathBuf {
        let Object { name, size, etag } = object;
        let content = sha256(format!("{}\n{size}\n{etag}", self.place(name)).as_bytes());
        folder.join(&content[..16]).join(name.rsplit('/').next().unwrap_or(name))
    }

    fn lock(&self, folder: &Path) -> Result<File> {
        lock(folder, &|| self.check("waiting for another download of the same object"))
    }

    /// Downloads an object, unless its copy is whole. A file gets its name when it is whole.
    fn copy(&self, object: &Object, path: &Path) -> Result<()> {
        let folder = path.parent().expect("a copy is in a subfolder");
        let _lock = self.lock(folder)?;
        if is_whole(path, object) {
            return Ok(());
        }
        let part = folder.join(".part");
        self.get_file(&object.name, object.size, &part)?;
        std::fs::rename(&part, path).map_err(Error::io(path))
    }
}

/// Returns the folder in `folder` with the links `names` to `contents`.
fn tree(names: &[&str], contents: &[PathBuf], folder: &Path) -> PathBuf {
    let list = names.iter().zip(contents).map(|(name, content)| format!("{name}\n{}\n", content.display()));
    let key = sha256(list.collect::<String>().as_bytes());
    folder.join("trees").join(&key[..16])
}

/// Makes `folder`, and returns its lock, after other processes that write into it. `check` ends the wait by an error.
pub(crate) fn lock(folder: &Path, check: &dyn Fn() -> Result<()>) -> Result<File> {
    create_dirs(&RealFs, folder)?;
    let path = folder.join(".lock");
    let lock = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => check()?,
            Err(TryLockError::Error(error)) => return Err(Error::io(&path)(error)),
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the name without `start`, if it is the path of a file in a folder.
fn relative<'a>(name: &'a str, start: &str) -> Option<&'a str> {
    let name = name.strip_prefix(start)?;
    is_relative_path(name).then_some(name)
}

/// Makes `path` a link to the file `content`, or a copy of it on a file system without links.
fn link(content: &Path, path: &Path) -> Result<()> {
    let folder = path.parent().expect("a link is in a folder");
    create_dirs(&RealFs, folder)?;
    if path.exists() {
        std::fs::remove_file(path).map_err(Error::io(path))?;
    }
    if std::fs::hard_link(content, path).is_err() {
        let part = folder.join(".part");
        std::fs::copy(content, &part).map_err(Error::io(&part))?;
        std::fs::rename(&part, path).map_err(Error::io(path))?;
    }
    Ok(())
}

fn is_whole(path: &Path, object: &Object) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.len() == object.size)
}
