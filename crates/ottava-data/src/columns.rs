//! The columns of prompts: all fields of each prompt's record. Rewards read them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ottava_jinja::json_text;
use serde_json::{Map, Value};

use crate::table::{Table, open_exactly};
use ottava_common::{Error, Result};

/// The name of the file with the objects of all documents.
pub(super) const COLUMNS: &str = "columns.bin";

/// The name of the table with the first byte of each object.
pub(super) const COLUMN_STARTS: &str = "column_starts.bin";

/// The maximum size of an object in bytes, which is also the maximum size of a record in a file.
pub(super) const MAX_COLUMN_BYTES: u64 = 64 << 20;

/// The columns in a folder of tokens, open for random access.
pub(super) struct Columns {
    file: File,
    path: PathBuf,
    /// The first byte of each document's object. The last entry is the number of bytes.
    starts: Table<8>,
    documents: u64,
}

impl Columns {
    /// Opens the columns of `documents` documents in `folder`. Errors with [`Error::Data`] if a file has another size than expected.
    pub(super) fn open(folder: &Path, documents: u64) -> Result<Columns> {
        let starts = Table::open(folder, COLUMN_STARTS, documents.saturating_add(1))?;
        let path = folder.join(COLUMNS);
        let file = open_exactly(&path, u64::from_le_bytes(starts.get(documents)?), COLUMN_STARTS)?;
        Ok(Columns { file, path, starts, documents })
    }

    /// Returns the paths of the two files.
    pub(super) fn paths(&self) -> [&Path; 2] {
        [&self.path, self.starts.path()]
    }

    /// Checks that the first bytes rise from 0, and that no object is larger than [`MAX_COLUMN_BYTES`].
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |i, start, end| self.wrong(&format!("document {i} has the bytes {start}..{end}"));
        for i in 0..self.documents {
            let (start, end) = (self.start_of(i)?, self.start_of(i + 1)?);
            if (i == 0 && start != 0) || end <= start || end - start > MAX_COLUMN_BYTES {
                return Err(wrong(i, start, end));
            }
        }
        Ok(())
    }

    fn start_of(&self, i: u64) -> Result<u64> {
        self.starts.get(i).map(u64::from_le_bytes)
    }

    fn wrong(&self, reason: &str) -> Error {
        Error::Data(format!("{}: {reason}; delete the folder to prepare it again", self.path.display()))
    }

    /// Returns the JSON of the columns of document `i`. Errors with [`Error::Data`] if the files have changed.
    pub(super) fn json(&self, i: u64) -> Result<String> {
        let (start, end) = (self.start_of(i)?, self.start_of(i + 1)?);
        let changed = || self.wrong(&format!("the columns of document {i} were changed while they are in use"));
        let len = end.checked_sub(start).filter(|len| *len <= MAX_COLUMN_BYTES).ok_or_else(changed)?;
        let mut json = vec![0; len as usize];
        self.file
            .read_exact_at(&mut json, start)
            .map_err(|error| self.wrong(&format!("the columns of document {i} cannot be read any more: {error}")))?;
        String::from_utf8(json).map_err(|_| changed())
    }

    /// Returns the columns of document `i`. Has the errors of [`Columns::json`].
    pub(super) fn get(&self, i: u64) -> Result<Map<String, Value>> {
        match json_text::parse(&self.json(i)?) {
            Ok(Value::Object(columns)) => Ok(columns),
            Ok(_) => Err(self.wrong(&format!("the columns of document {i} are no object"))),
            Err(reason) => Err(self.wrong(&format!("the columns of document {i} are no JSON: {reason}"))),
        }
    }
}
