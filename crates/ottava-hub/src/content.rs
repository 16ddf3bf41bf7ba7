//! The contents of files that are pushed.

use ottava_common::{Error, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// The content of a file that is pushed.
#[derive(Clone, Debug)]
pub enum Content {
    /// A file on the disk.
    File(PathBuf),
    /// Bytes in memory.
    Bytes(Vec<u8>),
}

impl Content {
    pub(crate) fn size(&self) -> Result<u64> {
        match self {
            Content::File(path) => Ok(std::fs::metadata(path).map_err(Error::io(path))?.len()),
            Content::Bytes(bytes) => Ok(bytes.len() as u64),
        }
    }

    pub(crate) fn reader(&self) -> Result<Box<dyn Read + '_>> {
        match self {
            Content::File(path) => Ok(Box::new(File::open(path).map_err(Error::io(path))?)),
            Content::Bytes(bytes) => Ok(Box::new(bytes.as_slice())),
        }
    }

    pub(crate) fn bytes(&self, most: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reader()?.take(most).read_to_end(&mut bytes).map_err(Error::io(self.place()))?;
        Ok(bytes)
    }

    pub(crate) fn place(&self) -> PathBuf {
        match self {
            Content::File(path) => path.clone(),
            Content::Bytes(_) => PathBuf::from("a file that is written for the push"),
        }
    }

    /// Returns a reader of `length` bytes from the byte `start` on.
    pub(crate) fn part(&self, start: u64, length: u64) -> Result<Box<dyn Read + '_>> {
        match self {
            Content::File(path) => {
                let mut file = File::open(path).map_err(Error::io(path))?;
                file.seek(SeekFrom::Start(start)).map_err(Error::io(path))?;
                Ok(Box::new(file.take(length)))
            }
            Content::Bytes(bytes) => {
                let end = (start + length).min(bytes.len() as u64) as usize;
                Ok(Box::new(&bytes[start as usize..end]))
            }
        }
    }
}
