//! Reads untrusted files: only regular files, up to a limit.
//!
//! A FIFO without a writer blocks its reader, and devices such as `/dev/zero` never end. Both are rejected before they are opened.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// The first bytes of a pointer that Git LFS left in place of a file, and the maximum size of a pointer.
const LFS_POINTER: (&[u8], u64) = (b"version https://git-lfs.github.com/spec/", 1024);

/// Opens the regular file at `path`, and returns it with its size. Links are followed.
///
/// # Errors
/// Errors of the system, and [`ErrorKind::InvalidInput`] for a folder, FIFO, socket or device, and for a pointer of Git LFS.
pub fn open(path: &Path) -> io::Result<(File, u64)> {
    // The type is checked before opening, because opening a FIFO waits for its writer.
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        let kind = if found.is_dir() { "this is a folder" } else { "this is a pipe or a device" };
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("{kind}; name a file")));
    }
    let file = File::open(path)?;
    let (start, most) = LFS_POINTER;
    let mut bytes = [0; LFS_POINTER.0.len()];
    if found.len() <= most && file.read_exact_at(&mut bytes, 0).is_ok() && bytes == start {
        let text =
            "this is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder, or download the file";
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    Ok((file, found.len()))
}

/// Opens a file as [`open`] does, but does not follow a link. Used for files that anybody may have put into a folder, such as the folder of a run on
/// a shared disk.
///
/// # Errors
/// Errors of [`open`], and [`ErrorKind::InvalidInput`] for a link.
pub fn open_unlinked(path: &Path) -> io::Result<(File, u64)> {
    let expect_no_link = || {
        let found = std::fs::symlink_metadata(path)?;
        match found.is_symlink() {
            true => Err(io::Error::new(
                ErrorKind::InvalidInput,
                "this is a link, which is not followed; copy the file here",
            )),
            false => Ok((found.dev(), found.ino())),
        }
    };
    // A run may replace the file in the meantime, and another user may replace it by a link.
    for _ in 0..3 {
        expect_no_link()?;
        let (file, size) = open(path)?;
        let metadata = file.metadata()?;
        if expect_no_link()? == (metadata.dev(), metadata.ino()) {
            return Ok((file, size));
        }
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "this file is replaced again and again"))
}

/// Returns whether `path`, which does not exist, looks like a name of the Hugging Face Hub, `owner/name`.
pub fn is_hub_id(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let is_word = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    let mut words = text.split('/');
    let owner = words.next().unwrap_or_default();
    let parent_exists = path.parent().is_some_and(Path::exists);
    !owner.starts_with('.')
        && is_word(owner)
        && words.next().is_some_and(is_word)
        && words.next().is_none()
        && !parent_exists
}

/// Reads the regular file at `path`.
///
/// # Errors
/// Errors of [`open`], and [`ErrorKind::FileTooLarge`] for more than `max_bytes`, also if the file grows while it is read.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_opened(open(path)?, max_bytes)
}

/// Reads an open file whose size was `size` when it was opened.
fn read_opened((file, size): (File, u64), max_bytes: u64) -> io::Result<Vec<u8>> {
    let too_large = |size: u64| {
        let text = format!("{size} bytes or more; such a file has at most {max_bytes}");
        Err(io::Error::new(ErrorKind::FileTooLarge, text))
    };
    if size > max_bytes {
        return too_large(size);
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes { too_large(bytes.len() as u64) } else { Ok(bytes) }
}

/// Reads the regular file at `path` as UTF-8.
///
/// # Errors
/// Errors of [`read`], and [`ErrorKind::InvalidData`] for invalid UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    as_text(read(path, max_bytes)?)
}

/// Reads the file at `path` as UTF-8, without following a link.
///
/// # Errors
/// Errors of [`open_unlinked`], and errors of [`read_text`].
pub fn read_text_unlinked(path: &Path, max_bytes: u64) -> io::Result<String> {
    as_text(read_opened(open_unlinked(path)?, max_bytes)?)
}

fn as_text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        io::Error::new(ErrorKind::InvalidData, format!("byte {} is not UTF-8", at + 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_devices_and_folders_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [fifo.as_path(), Path::new("/dev/zero"), Path::new("/dev/null"), folder.path()] {
            assert_eq!(read(path, 100).unwrap_err().kind(), ErrorKind::InvalidInput, "{}", path.display());
        }
        assert_eq!(read(&folder.path().join("absent"), 100).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn links_are_not_followed_where_anybody_may_put_them() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "text").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_text_unlinked(&file, 10).unwrap(), "text");
        let error = open_unlinked(&link).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().starts_with("this is a link"), "{error}");
        assert_eq!(open_unlinked(&folder.path().join("absent")).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(open_unlinked(Path::new("/dev/zero")).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn pointers_of_git_lfs_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        std::fs::write(file.path(), pointer).unwrap();
        assert!(read(file.path(), 4096).unwrap_err().to_string().contains("git lfs pull"));
        // A longer file with the same beginning is a text, not a pointer.
        std::fs::write(file.path(), pointer.repeat(20)).unwrap();
        assert!(read(file.path(), 4096).is_ok());
    }

    #[test]
    fn files_beyond_the_limit_and_other_encodings_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"ab\xffd").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"ab\xffd");
        assert_eq!(read(&path, 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_text(&path, 4).unwrap_err().to_string(), "byte 3 is not UTF-8");
    }
}
