//! File operations that write, behind a trait. Tests can make each operation fail, and simulate a power failure after it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use crate::{Error, Result};

/// File operations that change the disk. Any thread may call them.
pub trait Fs: Sync {
    /// Creates a file. Errors if the file exists.
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    /// Opens a file for appending and cuts it to `length` bytes. Creates the file if it does not exist.
    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>>;
    /// Creates a folder in an existing folder.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or folder. A file replaces an existing file.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file, or a folder with everything in it. For a link, only the link is removed.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Flushes the entries of a folder to the disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait FsFile: Write {
    /// Flushes the content to the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system of the machine.
pub struct RealFs;

impl Fs for RealFs {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>> {
        expect_regular(path)?;
        let file = File::options().create(true).append(true).open(path)?;
        file.set_len(length)?;
        Ok(Box::new(file))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if std::fs::symlink_metadata(path)?.is_dir() {
            std::fs::remove_dir_all(path)
        } else {
            std::fs::remove_file(path)
        }
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

/// Errors if `path` exists and is not a regular file. A run writes only into its own folder, and opening a FIFO would wait for its other end.
pub fn expect_regular(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => refuse("this is a link; runs do not write through links"),
        Ok(found) if found.is_dir() => refuse("this is a folder, and runs write a file here; move it away"),
        Ok(found) if !found.is_file() => refuse("this is a pipe or a device, and runs write a file here; move it away"),
        _ => Ok(()),
    }
}

/// Errors if `path` exists and is a link or not a folder. A run writes only into its own folder.
pub fn expect_folder(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            refuse("this is a link; runs do not write through links; set `output_dir` to a folder on the other disk")
        }
        Ok(found) if !found.is_dir() => refuse("this is a file, and runs make a folder here; move it away"),
        _ => Ok(()),
    }
}

fn refuse(text: &str) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Creates a folder and its missing parents, and flushes their entries so that they survive a power failure.
pub fn create_dirs(fs: &dyn Fs, path: &Path) -> Result<()> {
    let missing: Vec<_> = path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    for folder in missing.into_iter().rev() {
        match fs.create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(Error::io(folder)(error)),
            _ => sync_parent(fs, folder)?,
        }
    }
    Ok(())
}

/// Returns the folder that contains `path`.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Flushes the entry of `path` in its folder to the disk.
pub fn sync_parent(fs: &dyn Fs, path: &Path) -> Result<()> {
    let parent = parent(path);
    fs.sync_dir(parent).map_err(Error::io(parent))
}

/// Replaces the file at `path` atomically: after a power failure, it is the old file or the new file. A link is replaced, not followed.
pub fn replace_file(fs: &dyn Fs, path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().expect("a path with a name").to_string_lossy();
    let temporary = path.with_file_name(format!("{name}.tmp"));
    if std::fs::symlink_metadata(&temporary).is_ok() {
        fs.remove(&temporary).map_err(Error::io(&temporary))?;
    }
    let mut file = fs.create(&temporary).map_err(Error::io(&temporary))?;
    file.write_all(bytes).and_then(|()| file.sync()).map_err(Error::io(&temporary))?;
    drop(file);
    fs.rename(&temporary, path).map_err(Error::io(path))?;
    sync_parent(fs, path)
}

/// Renames `path` to `abandoned-NAME`, and returns the new path. If this name exists, uses `abandoned-NAME.2` and so on.
pub fn set_aside(fs: &dyn Fs, path: &Path) -> Result<std::path::PathBuf> {
    let name = path.file_name().expect("a path with a name").to_string_lossy();
    let free = |path: &std::path::PathBuf| std::fs::symlink_metadata(path).is_err();
    let first = path.with_file_name(format!("abandoned-{name}"));
    let mut others = (2..).map(|i| path.with_file_name(format!("abandoned-{name}.{i}")));
    let aside = if free(&first) { first } else { others.find(free).expect("a name is free") };
    fs.rename(path, &aside).map_err(Error::io(path))?;
    sync_parent(fs, path)?;
    Ok(aside)
}

/// Returns the free bytes of the file system that holds `path`, or will hold it if it does not exist yet; `None` if the system does not tell.
pub fn free_space(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let found = rustix::fs::statvfs(absolute.ancestors().find(|folder| folder.exists())?).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Returns whether `path` consists of plain names with `/` between them.
pub fn is_relative_path(path: &str) -> bool {
    path.split('/').all(is_plain_name)
}

/// Returns whether `name` stays within its folder on every system.
pub fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}
