//! The records of a file, read in batches.

use std::fs::File;
use std::io::{Read, Seek};

use arrow_array::RecordBatch;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::file::metadata::ParquetMetaData;
use serde_json::{Map, Value};

use crate::arrow::{ArrowFile, ArrowStream};
use crate::bomb::{bomb, most_unpacked_bytes};
use crate::{value, zstandard};

/// The maximum number of records that are decoded together.
const BATCH: usize = 1024;

/// The memory in bytes that a batch of records of a small Parquet file may take. Each record may refer to the same large text.
const BATCH_BYTES: u64 = 64 << 20;

/// The first bytes of an Arrow file. A stream of batches, which `datasets` writes, does not have them.
const ARROW_FILE: &[u8] = b"ARROW1";

/// A columnar format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Apache Parquet; pages are uncompressed or compressed with Snappy, gzip, LZ4 or Zstandard.
    Parquet,
    /// Arrow IPC, as a file or a stream, uncompressed.
    Arrow,
}

/// The records of a file in order, each as a JSON object. Fields without a value are `null`. Columns of types that JSON lacks are omitted.
pub struct Rows {
    batches: Box<dyn Iterator<Item = Result<RecordBatch, String>> + Send>,
    batch: Option<RecordBatch>,
    /// The index of the next record in `batch`.
    next: usize,
}

impl Rows {
    /// Opens a file. Errors with the reason if the file does not have this format, or needs a codec that is not built in.
    pub fn open(mut file: File, format: Format) -> Result<Rows, String> {
        let batches: Box<dyn Iterator<Item = Result<RecordBatch, String>> + Send> = match format {
            Format::Parquet => {
                let most = most_unpacked_bytes(file.metadata().map_err(|error| error.to_string())?.len());
                let reader = open_parquet(file, most).map_err(|error| parquet_reason(&error.to_string()))?;
                let mut left = most;
                Box::new(reader.map(move |batch| {
                    let batch = batch.map_err(|error| parquet_reason(&error.to_string()))?;
                    left = left.checked_sub(batch.get_array_memory_size() as u64).ok_or_else(bomb)?;
                    Ok(batch)
                }))
            }
            Format::Arrow => {
                let mut start = [0; ARROW_FILE.len()];
                let is_file = file.read_exact(&mut start).is_ok() && start == ARROW_FILE;
                file.rewind().map_err(|error| error.to_string())?;
                let wrong = |reason: String| format!("this is not a readable Arrow file: {reason}");
                match is_file {
                    true => {
                        let batches = ArrowFile::open(file).map_err(wrong)?;
                        Box::new(batches.map(move |batch| batch.map_err(wrong)))
                    }
                    false => {
                        let batches = ArrowStream::open(file).map_err(wrong)?;
                        Box::new(batches.map(move |batch| batch.map_err(wrong)))
                    }
                }
            }
        };
        Ok(Rows { batches, batch: None, next: 0 })
    }

    /// Returns the type of column `name` in the last decoded batch, if JSON lacks this type.
    pub fn unread_type(&self, name: &str) -> Option<String> {
        value::unread_type(self.batch.as_ref()?, name)
    }
}

impl Iterator for Rows {
    type Item = Result<Map<String, Value>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(batch) = self.batch.as_ref().filter(|batch| self.next < batch.num_rows()) {
                self.next += 1;
                return Some(Ok(value::record(batch, self.next - 1)));
            }
            (self.batch, self.next) = match self.batches.next()? {
                Ok(batch) => (Some(batch), 0),
                Err(error) => return Some(Err(error)),
            };
        }
    }
}

/// Opens the records of a Parquet file whose pages may unpack to `most` bytes.
fn open_parquet(file: File, most: u64) -> parquet::errors::Result<ParquetRecordBatchReader> {
    let footer = ArrowReaderMetadata::load(&file, ArrowReaderOptions::default())?;
    let records = together(footer.metadata(), BATCH_BYTES.max(most));
    match zstandard::is_used(footer.metadata()) {
        true => zstandard::open(file, &footer, records, most),
        false => ParquetRecordBatchReaderBuilder::new_with_metadata(file, footer).with_batch_size(records).build(),
    }
}

/// Returns the number of records that are decoded together. They take at most `bytes`, even if each record is as large as a whole column of its row
/// group.
fn together(file: &ParquetMetaData, bytes: u64) -> usize {
    let columns = file.row_groups().iter().flat_map(|group| group.columns());
    let largest = columns.map(|column| column.uncompressed_size()).max().unwrap_or(0);
    let records = bytes / u64::try_from(largest).unwrap_or(0).max(1);
    usize::try_from(records).map_or(BATCH, |records| records.clamp(1, BATCH))
}

fn parquet_reason(error: &str) -> String {
    match error.contains("BROTLI") {
        true => format!("{error}; write the file with compression = \"snappy\", the default of pandas and datasets"),
        false => format!("this is not a readable Parquet file: {error}"),
    }
}

#[cfg(test)]
mod tests;
