//! The new lines of a file that a run appends to, and that it may cut or replace.

use ottava_common::error::{Error, Result};
use ottava_common::input;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// The bytes before the place read so far that are compared, to notice a file that was cut and has grown again.
const COMPARED: usize = 256;

/// Bytes that one call reads, about, so that a page shows the first lines of a large file soon.
const MOST_READ: u64 = 64 << 20;

/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// The most bytes of a line: a line of `casts.jsonl` has 200 for each cast.
const MAX_LINE: usize = 64 << 20;

/// Reads a growing file.
pub struct Tail {
    path: PathBuf,
    /// Bytes of the lines read so far.
    read: u64,
    /// Device and number of the file.
    file: (u64, u64),
    /// The last bytes of the lines read so far.
    last: Vec<u8>,
}

/// Something that a [`Tail`] found.
pub enum Found<'a> {
    /// The file is another one, or was cut: all earlier lines are void, and its lines follow from the first.
    Restart,
    /// A line, without its end.
    Line(&'a [u8]),
}

impl Tail {
    /// Reads the file at `path`, which need not exist yet, from its first line.
    pub fn new(path: PathBuf) -> Tail {
        Tail { path, read: 0, file: (0, 0), last: Vec::new() }
    }

    /// Seconds since 1970 at which the file was last written; `None` if there is none.
    pub fn written(&self) -> Option<u64> {
        let found = std::fs::symlink_metadata(&self.path).ok().filter(std::fs::Metadata::is_file)?;
        found.mtime().try_into().ok()
    }

    /// Passes on the complete lines since the last call, up to about 64 MiB. Returns whether there are more.
    ///
    /// # Errors
    /// Errors of the system, of [`input::open_unlinked`], and [`Error::Data`] for a line of more than 64 MiB.
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

    /// What the next call finds; `!` is a restart.
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
        // Shorter, and then as long as before with other lines: a resumed run.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        assert_eq!(next(&mut tail), "![a]");
        append("x\ny\n");
        assert_eq!(next(&mut tail), "[x][y]");
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        append("z\ny2\nw\n");
        assert_eq!(next(&mut tail), "![a][z][y2][w]");
        // Replaced by a file that begins alike.
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
