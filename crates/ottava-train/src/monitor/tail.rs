//! Reads the new lines of a file. The run that writes the file appends lines, and may cut or replace the file.

use ottava_common::error::{Error, Result};
use ottava_common::input;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// The number of bytes before the current position that are compared. They show whether a file was cut and has grown again.
const COMPARED: usize = 256;

/// The number of bytes, about, after which one call stops, so that a page soon shows the first lines of a large file.
const MOST_READ: u64 = 64 << 20;

/// The number of bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// The maximum number of bytes of a line. A line of `casts.jsonl` has 200 bytes for each cast.
const MAX_LINE: usize = 64 << 20;

/// Reads a growing file.
pub struct Tail {
    path: PathBuf,
    /// The number of bytes of the lines read so far.
    read: u64,
    /// The device and the inode of the file.
    file: (u64, u64),
    /// The last bytes of the lines read so far.
    last: Vec<u8>,
}

/// An event that a [`Tail`] passes on.
pub enum Found<'a> {
    /// The file was replaced or cut. All earlier lines are void, and the lines of the file follow from its start.
    Restart,
    /// A line, without its newline.
    Line(&'a [u8]),
}

impl Tail {
    /// Makes a reader of the file at `path`, from its first line. The file need not exist yet.
    pub fn new(path: PathBuf) -> Tail {
        Tail { path, read: 0, file: (0, 0), last: Vec::new() }
    }

    /// Returns the time at which the file was last written, in seconds since 1970. Returns `None` if the file does not exist.
    pub fn written(&self) -> Option<u64> {
        let found = std::fs::symlink_metadata(&self.path).ok().filter(std::fs::Metadata::is_file)?;
        found.mtime().try_into().ok()
    }

    /// Passes the complete lines since the last call to `found`, up to about 64 MiB. Returns whether more lines are left.
    ///
    /// # Errors
    /// Errors of the system, errors of [`input::open_unlinked`], and [`Error::Data`] for a line of more than 64 MiB.
    pub fn read(&mut self, found: &mut dyn FnMut(Found)) -> Result<bool> {
        let (file, length) = match input::open_unlinked(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.restart(found);
                return Ok(false);
            }
            opened => opened.map_err(Error::io(&self.path))?,
        };
        let metadata = file.metadata().map_err(Error::io(&self.path))?;
        let id = (metadata.dev(), metadata.ino());
        let mut before = vec![0; self.last.len()];
        let same = id == self.file
            && file.read_exact_at(&mut before, self.read - self.last.len() as u64).is_ok()
            && before == self.last;
        if !same {
            self.restart(found);
            self.file = id;
        }
        let end = length.min(self.read + MOST_READ);
        let (mut bytes, mut at) = (Vec::new(), self.read);
        while at < end || (at < length && !bytes.contains(&b'\n')) {
            if bytes.len() > MAX_LINE {
                let text =
                    format!("{}: a line has more than {MAX_LINE} bytes; is it another program's?", self.path.display());
                return Err(Error::Data(text));
            }
            let start = bytes.len();
            bytes.resize(start + CHUNK, 0);
            let count = file.read_at(&mut bytes[start..], at).map_err(Error::io(&self.path))?;
            bytes.truncate(start + count);
            at += count as u64;
            if count == 0 {
                break;
            }
            let Some(complete) = bytes[start..].iter().rposition(|&byte| byte == b'\n') else { continue };
            let complete = start + complete + 1;
            for line in bytes[..complete].split_inclusive(|&byte| byte == b'\n') {
                found(Found::Line(&line[..line.len() - 1]));
            }
            self.read += complete as u64;
            self.last = bytes[complete.saturating_sub(COMPARED)..complete].to_vec();
            bytes.drain(..complete);
        }
        Ok(at < length)
    }

    fn restart(&mut self, found: &mut dyn FnMut(Found)) {
        if self.read > 0 {
            found(Found::Restart);
        }
        (self.read, self.file) = (0, (0, 0));
        self.last.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns what the next call finds. A restart is `!`.
    fn next(tail: &mut Tail) -> String {
        let mut all = String::new();
        tail.read(&mut |found| match found {
            Found::Restart => all.push('!'),
            Found::Line(line) => all += &format!("[{}]", String::from_utf8_lossy(line)),
        })
        .unwrap();
        all
    }

    #[test]
    fn only_complete_new_lines_are_read_and_a_cut_file_starts_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut tail = Tail::new(path.clone());
        let append = |text: &str| {
            let mut file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        assert_eq!(next(&mut tail), "", "there is no file yet");
        append("a\nb\nc");
        assert_eq!([next(&mut tail), next(&mut tail)], ["[a][b]", ""]);
        append("d\n\n");
        assert_eq!(next(&mut tail), "[cd][]");
        // The file is first shorter, and then as long as before with other lines. A resumed run causes this.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        assert_eq!(next(&mut tail), "![a]");
        append("x\ny\n");
        assert_eq!(next(&mut tail), "[x][y]");
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        append("z\ny2\nw\n");
        assert_eq!(next(&mut tail), "![a][z][y2][w]");
        // The file is replaced by a file with the same beginning.
        std::fs::write(folder.path().join("new"), "a\nz\ny2\nw\nv\n").unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!(next(&mut tail), "![a][z][y2][w][v]");
        std::fs::remove_file(&path).unwrap();
        assert_eq!([next(&mut tail), next(&mut tail)], ["!", ""]);
        assert_eq!(tail.written(), None);
    }

    #[test]
    fn lines_longer_than_a_chunk_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("casts.jsonl");
        let long = "x".repeat(3 * CHUNK + 7);
        std::fs::write(&path, format!("{long}\nshort\n{long}")).unwrap();
        assert_eq!(next(&mut Tail::new(path)), format!("[{long}][short]"));
    }

    #[test]
    fn pipes_are_no_files_of_a_run() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Tail::new(folder.path().to_path_buf()).read(&mut |_| {}).is_err());
    }
}
