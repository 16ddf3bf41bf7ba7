//! Parquet files whose pages are compressed with Zstandard, which Polars and other writers use by default.
//!
//! The codec of the crate `parquet` is written in C. So this module reads these pages as if they were uncompressed, and unpacks them in pure Rust.

use crate::bomb::bomb;
use arrow_schema::SchemaRef;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReader, RowGroups};
use parquet::arrow::{ProjectionMask, parquet_to_arrow_field_levels};
use parquet::basic::Compression;
use parquet::column::page::{Page, PageIterator, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;
use ruzstd::decoding::StreamingDecoder;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;

/// Whether a column of the file is compressed with Zstandard.
pub(crate) fn is_used(metadata: &ParquetMetaData) -> bool {
    metadata.row_groups().iter().flat_map(RowGroupMetaData::columns).any(is_packed)
}

fn is_packed(column: &ColumnChunkMetaData) -> bool {
    matches!(column.compression(), Compression::ZSTD(_))
}

/// Opens the records of a file, `batch_size` at a time. A page may unpack to at most `most` bytes.
pub(crate) fn open(
    file: File,
    footer: &ArrowReaderMetadata,
    batch_size: usize,
    most: u64,
) -> Result<ParquetRecordBatchReader> {
    let metadata = footer.metadata().clone();
    let schema: &SchemaRef = footer.schema();
    let parquet_schema = metadata.file_metadata().schema_descr();
    let levels = parquet_to_arrow_field_levels(parquet_schema, ProjectionMask::all(), Some(schema.fields()))?;
    let groups = Groups { file: Arc::new(file), metadata: metadata.clone(), most };
    ParquetRecordBatchReader::try_new_with_row_groups(&levels, &groups, batch_size, None)
}

/// The row groups of a file.
#[derive(Clone)]
struct Groups {
    file: Arc<File>,
    metadata: Arc<ParquetMetaData>,
    most: u64,
}

impl RowGroups for Groups {
    fn num_rows(&self) -> usize {
        self.metadata.row_groups().iter().map(rows).sum()
    }

    fn column_chunks(&self, column: usize) -> Result<Box<dyn PageIterator>> {
        Ok(Box::new(Chunks { groups: self.clone(), column, next: 0 }))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(self.metadata.row_groups().iter())
    }

    fn metadata(&self) -> &ParquetMetaData {
        &self.metadata
    }
}

fn rows(group: &RowGroupMetaData) -> usize {
    usize::try_from(group.num_rows()).unwrap_or(0)
}

/// The chunks of one column, one per row group.
struct Chunks {
    groups: Groups,
    column: usize,
    next: usize,
}

impl Iterator for Chunks {
    type Item = Result<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        let Groups { file, metadata, most } = &self.groups;
        let group = metadata.row_groups().get(self.next)?;
        self.next += 1;
        let (column, file) = (group.column(self.column), file.clone());
        if !is_packed(column) {
            let pages = SerializedPageReader::new(file, column, rows(group), None);
            return Some(pages.map(|pages| Box::new(pages) as Box<dyn PageReader>));
        }
        let open = || -> Result<Box<dyn PageReader>> {
            let plain = column.clone().into_builder().set_compression(Compression::UNCOMPRESSED).build()?;
            let inner = SerializedPageReader::new(file, &plain, rows(group), None)?;
            Ok(Box::new(Pages { inner, most: *most }))
        };
        Some(open())
    }
}

impl PageIterator for Chunks {}

/// Pages that are unpacked after they are read.
struct Pages {
    inner: SerializedPageReader<File>,
    most: u64,
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.inner.get_next_page()? else { return Ok(None) };
        match &mut page {
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => *buf = unpack(buf, 0, self.most)?.into(),
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, is_compressed: true, .. } => {
                // The levels are not compressed.
                let levels = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                *buf = unpack(buf, levels, self.most)?.into();
            }
            Page::DataPageV2 { .. } => {}
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.inner.skip_next_page()
    }
}

/// Returns the first `plain` bytes, and the unpacked bytes of the Zstandard frames after them.
fn unpack(packed: &[u8], plain: usize, most: u64) -> Result<Vec<u8>> {
    let wrong = |reason: String| ParquetError::General(format!("a Zstandard page cannot be unpacked: {reason}"));
    let (levels, mut rest) =
        packed.split_at_checked(plain).ok_or_else(|| wrong("its levels are longer than the page".into()))?;
    let mut unpacked = levels.to_vec();
    while !rest.is_empty() {
        let frame = StreamingDecoder::new(&mut rest).map_err(|error| wrong(error.to_string()))?;
        let left = most.saturating_sub(unpacked.len() as u64);
        let count = frame.take(left + 1).read_to_end(&mut unpacked).map_err(|error| wrong(error.to_string()))?;
        if count as u64 > left {
            return Err(ParquetError::General(bomb()));
        }
    }
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    #[test]
    fn levels_stay_and_a_page_unpacks_to_a_limit() {
        let text = vec![b'a'; 100_000];
        let frame = compress_to_vec(&text[..], CompressionLevel::Fastest);
        let page = [b"levels", &frame[..], &frame[..]].concat();
        let unpacked = unpack(&page, 6, 200_006).unwrap();
        assert!(
            unpacked.starts_with(b"levels") && unpacked.len() == 200_006 && unpacked[6..].iter().all(|c| *c == b'a')
        );
        let error = unpack(&page, 6, 200_005).unwrap_err().to_string();
        assert!(error.contains("unpacks to more than"), "{error}");
        assert!(unpack(&page[..6 + frame.len() / 2], 6, 200_006).is_err() && unpack(b"abc", 6, 100).is_err());
    }
}
