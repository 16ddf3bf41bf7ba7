//! The file of records: the log format of LevelDB with a header of Weights & Biases.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// The bytes at the start of a file: a name, a magic number and the version 0.
const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];

/// The bytes of a block. No record crosses the end of a block; longer records are divided.
const BLOCK: usize = 32 << 10;

/// The bytes before each part of a record: CRC-32, length and type.
const PART_HEADER: usize = 7;

/// The types of parts: a whole record, and the first, a middle and the last part of a record.
const WHOLE: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// A file to which records are appended.
pub(super) struct LogFile {
    file: BufWriter<File>,
    /// The bytes in the current block.
    used: usize,
}

impl LogFile {
    /// Creates the file, and replaces an existing one.
    pub(super) fn create(path: &Path) -> io::Result<LogFile> {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&HEADER)?;
        Ok(LogFile { file, used: HEADER.len() })
    }

    /// Appends a record.
    pub(super) fn append(&mut self, mut rest: &[u8]) -> io::Result<()> {
        let mut is_first = true;
        loop {
            if BLOCK - self.used < PART_HEADER {
                self.file.write_all(&[0; PART_HEADER][..BLOCK - self.used])?;
                self.used = 0;
            }
            let (part, more) = rest.split_at(rest.len().min(BLOCK - self.used - PART_HEADER));
            let kind = match (is_first, more.is_empty()) {
                (true, true) => WHOLE,
                (true, false) => FIRST,
                (false, false) => MIDDLE,
                (false, true) => LAST,
            };
            self.write_part(kind, part)?;
            if more.is_empty() {
                return Ok(());
            }
            (rest, is_first) = (more, false);
        }
    }

    fn write_part(&mut self, kind: u8, part: &[u8]) -> io::Result<()> {
        let mut crc = crc32fast::Hasher::new();
        crc.update(&[kind]);
        crc.update(part);
        let length = u16::try_from(part.len()).expect("a part is shorter than a block");
        self.file.write_all(&crc.finalize().to_le_bytes())?;
        self.file.write_all(&length.to_le_bytes())?;
        self.file.write_all(&[kind])?;
        self.file.write_all(part)?;
        self.used += PART_HEADER + part.len();
        Ok(())
    }

    /// Writes what is buffered.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    /// Writes what is buffered to the disk.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the records of a file, and checks the checksum of each part.
    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut found, mut at) = (Vec::new(), HEADER.len());
        assert_eq!(bytes[..at], HEADER);
        while at < bytes.len() {
            if BLOCK - at % BLOCK < PART_HEADER {
                at += BLOCK - at % BLOCK;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
            let kind = bytes[at + 6];
            let end = at + PART_HEADER + length;
            assert_eq!(crc32fast::hash(&bytes[at + 6..end]).to_le_bytes(), bytes[at..at + 4]);
            match kind {
                WHOLE | FIRST => found.push(bytes[at + PART_HEADER..end].to_vec()),
                _ => found.last_mut().unwrap().extend(&bytes[at + PART_HEADER..end]),
            }
            at = end;
            assert!((at - 1) / BLOCK == (at - length - PART_HEADER) / BLOCK, "a part crosses a block");
        }
        found
    }

    #[test]
    fn records_of_all_lengths_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/x.wandb");
        let lengths = [0, 1, 100, BLOCK - 150, 5, BLOCK, 3 * BLOCK + 7, BLOCK - PART_HEADER, 9];
        let written: Vec<Vec<u8>> = lengths.iter().zip(1..).map(|(length, byte)| vec![byte; *length]).collect();
        let mut log = LogFile::create(&path).unwrap();
        written.iter().for_each(|record| log.append(record).unwrap());
        // Records that end 0 to 9 bytes before the end of a block.
        log.finish().unwrap();
        assert_eq!(records(&std::fs::read(&path).unwrap()), written);
        for left in 0..10 {
            let mut log = LogFile::create(&path).unwrap();
            let first = vec![1; BLOCK - HEADER.len() - PART_HEADER - left];
            log.append(&first).unwrap();
            log.append(b"next").unwrap();
            log.finish().unwrap();
            assert_eq!(records(&std::fs::read(&path).unwrap()), [first, b"next".to_vec()], "{left} bytes left");
        }
    }
}
