//! The columns of prompts: all fields of the record of each document, which rewards read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ottava_jinja::json_text;
use serde_json::{Map, Value};

use crate::table::{Table, open_exactly};
use ottava_common::{Error, Result};

/// The objects of all documents.
pub(super) const COLUMNS: &str = "columns.bin";

/// The table of their first bytes.
pub(super) const COLUMN_STARTS: &str = "column_starts.bin";

/// The largest object, in bytes: as large as a record of a file.
pub(super) const MAX_COLUMN_BYTES: u64 = 64 << 20;

/// The columns of a folder of tokens, open for reading at random.
pub(super) struct Columns {
    file: File,
    path: PathBuf,
    /// The first byte of the object of each document, then the number of bytes.
    starts: Table<8>,
    documents: u64,
}

impl Columns {
    /// Opens the columns of `documents` in `folder`. Errors with [`Error::Data`] when a file has another size.
    pub(super) fn open(folder: &Path, documents: u64) -> Result<Columns> {
        let starts = Table::open(folder, COLUMN_STARTS, documents.saturating_add(1))?;
        let path = folder.join(COLUMNS);
        let file = open_exactly(&path, u64::from_le_bytes(starts.get(documents)?), COLUMN_STARTS)?;
        Ok(Columns { file, path, starts, documents })
    }

    /// Its files.
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

    /// The JSON of the columns of document `i`. Errors with [`Error::Data`] when the files have changed.
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

    /// The columns of document `i`. Errors as [`Columns::json`].
    pub(super) fn get(&self, i: u64) -> Result<Map<String, Value>> {
        match json_text::parse(&self.json(i)?) {
            Ok(Value::Object(columns)) => Ok(columns),
            Ok(_) => Err(self.wrong(&format!("the columns of document {i} are no object"))),
            Err(reason) => Err(self.wrong(&format!("the columns of document {i} are no JSON: {reason}"))),
        }
    }
}
