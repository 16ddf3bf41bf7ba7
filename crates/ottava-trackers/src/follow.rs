//! Reads new lines of `metrics.jsonl`, and notices when a run has returned to an earlier step.

use crate::Line;
use ottava_common::hash::sha256;
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The maximum number of bytes that are read together.
const MOST: u64 = 1 << 20;

/// A position in `metrics.jsonl`. The lines before it were sent.
pub(crate) struct Follower {
    path: PathBuf,
    /// The bytes of the lines that were sent.
    offset: u64,
    /// The digest of each line that was sent.
    digests: Vec<Digest>,
    attempt: u64,
}

/// The beginning of the SHA-256 of a line, and the length of the line.
#[derive(Clone, Copy, PartialEq)]
struct Digest(u64, u32);

impl Digest {
    fn of(line: &[u8]) -> Digest {
        let text = sha256(line);
        Digest(u64::from_str_radix(&text[..16], 16).unwrap_or(0), u32::try_from(line.len()).unwrap_or(u32::MAX))
    }
}

/// Lines that were read, with what [`Follower::advance`] records once they were sent.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) lines: Vec<Line>,
    digests: Vec<Digest>,
    bytes: u64,
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }
}

impl Follower {
    /// Continues after the first `sent` lines of the file at `path`. If there are fewer lines, because the run has resumed at an earlier step, this is
    /// another attempt.
    pub(crate) fn after(path: &Path, sent: u64, attempt: u64) -> io::Result<Follower> {
        let mut follower = Follower { path: path.to_path_buf(), offset: 0, digests: Vec::new(), attempt };
        let mut reader = BufReader::new(File::open(path)?);
        while (follower.digests.len() as u64) < sent {
            let line = line(&mut reader)?;
            if line.is_empty() {
                follower.attempt += 1;
                break;
            }
            follower.offset += line.len() as u64;
            follower.digests.push(Digest::of(&line));
        }
        Ok(follower)
    }

    /// Returns the number of lines that were sent, and the attempt.
    pub(crate) fn position(&self) -> (u64, u64) {
        (self.digests.len() as u64, self.attempt)
    }

    /// Returns to the beginning of the file.
    pub(crate) fn start_over(&mut self) {
        (self.offset, self.digests) = (0, Vec::new());
    }

    /// Goes back to the last line that is still in the file. Returns whether lines are gone.
    pub(crate) fn look_back(&mut self) -> io::Result<bool> {
        let Some(last) = self.digests.last() else { return Ok(false) };
        let mut file = File::open(&self.path)?;
        if file.metadata()?.len() >= self.offset {
            file.seek(SeekFrom::Start(self.offset - u64::from(last.1)))?;
            let mut found = vec![0; last.1 as usize];
            file.read_exact(&mut found)?;
            if Digest::of(&found) == *last {
                return Ok(false);
            }
        }
        file.rewind()?;
        let (mut reader, mut kept, mut offset) = (BufReader::new(file), 0, 0);
        for digest in &self.digests {
            let line = line(&mut reader)?;
            if Digest::of(&line) != *digest {
                break;
            }
            (kept, offset) = (kept + 1, offset + line.len() as u64);
        }
        self.digests.truncate(kept);
        (self.offset, self.attempt) = (offset, self.attempt + 1);
        Ok(true)
    }

    /// Reads the next complete lines.
    pub(crate) fn read(&self) -> io::Result<Batch> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let (mut reader, mut batch) = (BufReader::new(file), Batch::default());
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        while batch.bytes < MOST {
            let line = line(&mut reader)?;
            if line.is_empty() {
                break;
            }
            batch.bytes += line.len() as u64;
            let digest = Digest::of(&line);
            batch.digests.push(digest);
            batch.lines.extend(parse(&line, digest, self.attempt, time));
        }
        Ok(batch)
    }

    /// Records that the lines of `batch` were sent.
    pub(crate) fn advance(&mut self, batch: Batch) {
        self.offset += batch.bytes;
        self.digests.extend(batch.digests);
    }
}

/// Reads a line with its newline; nothing if the line is not complete yet.
fn line(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line)?;
    Ok(if line.ends_with(b"\n") { line } else { Vec::new() })
}

fn parse(line: &[u8], Digest(digest, _): Digest, attempt: u64, time: u64) -> Option<Line> {
    let record: Value = serde_json::from_slice(line).ok()?;
    let record = record.as_object()?;
    let numbers = record.iter().filter(|(key, _)| *key != "step");
    let numbers = numbers.filter_map(|(key, value)| Some((key.clone(), value.as_f64()?)));
    Some(Line { step: record.get("step")?.as_u64()?, numbers: numbers.collect(), attempt, time, digest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(batch: &Batch) -> Vec<(u64, u64)> {
        batch.lines.iter().map(|line| (line.step, line.attempt)).collect()
    }

    fn write(path: &Path, steps: &[(u64, f64)]) {
        let lines = steps.iter().map(|(step, loss)| format!("{{\"step\":{step},\"loss\":{loss},\"x\":null}}\n"));
        std::fs::write(path, lines.collect::<String>()).unwrap();
    }

    #[test]
    fn lines_are_read_once_and_a_return_to_an_earlier_step_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write(&path, &[(1, 1.0), (2, 2.0), (3, 3.0)]);
        let mut follower = Follower::after(&path, 1, 0).unwrap();
        let batch = follower.read().unwrap();
        assert_eq!(steps(&batch), [(2, 0), (3, 0)]);
        assert_eq!(batch.lines[0].numbers, [("loss".to_string(), 2.0)]);
        // Lines that were not sent are read again.
        assert_eq!(steps(&follower.read().unwrap()), [(2, 0), (3, 0)]);
        follower.advance(batch);
        assert!(!follower.look_back().unwrap() && follower.read().unwrap().is_empty());
        // The run has returned to step 1, and has made more steps than before.
        write(&path, &[(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.0)]);
        assert!(follower.look_back().unwrap());
        assert_eq!(steps(&follower.read().unwrap()), [(2, 1), (3, 1), (4, 1)]);
        // The file is shorter than before.
        follower.advance(follower.read().unwrap());
        write(&path, &[(1, 1.0)]);
        assert!(follower.look_back().unwrap() && follower.read().unwrap().is_empty());
        assert_eq!(follower.position(), (1, 2));
        assert_eq!(Follower::after(&path, 9, 2).unwrap().position(), (1, 3));
    }

    #[test]
    fn an_incomplete_line_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\nno json\n{\"step\":2,\"lo").unwrap();
        let mut follower = Follower::after(&path, 0, 0).unwrap();
        let batch = follower.read().unwrap();
        assert_eq!(steps(&batch), [(1, 0)]);
        follower.advance(batch);
        assert_eq!(follower.position().0, 2);
        assert!(follower.read().unwrap().is_empty());
    }
}
