//! The few file operations that saving needs, behind a trait, so that tests can make each of them fail in turn.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// File operations that change the disk.
pub trait Fs {
    /// Creates a file that must not exist yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    /// Creates a folder and the folders above it where they are missing.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Gives a file or folder another name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder with everything in it.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder survive a power failure.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub trait FsFile: Write {
    /// Makes its content survive a power failure.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system of the machine.
pub struct RealFs;

impl Fs for RealFs {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

impl FsFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
