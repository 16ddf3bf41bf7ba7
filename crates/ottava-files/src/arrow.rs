//! Arrow files and streams. The sizes of blocks are compared with the size of the file before memory is allocated.
//!
//! `FileReader` of `arrow-ipc` trusts the lengths in a file, so a damaged file could request more memory than exists. `StreamReader` would allocate
//! 64 MiB for such a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, StreamDecoder, read_footer_length};
use arrow_ipc::{Block, root_as_footer, root_as_message};

/// The bytes at the end of a file: the length of the footer, and the magic bytes.
const TRAILER: u64 = 10;

/// The batches of an Arrow file.
pub(crate) struct ArrowFile {
    file: File,
    size: u64,
    decoder: FileDecoder,
    blocks: std::vec::IntoIter<Block>,
}

impl ArrowFile {
    /// Reads the footer and the dictionaries. Errors with the reason.
    pub(crate) fn open(file: File) -> Result<ArrowFile, String> {
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        let end = size.checked_sub(TRAILER).ok_or("it is too short")?;
        let trailer = read(&file, size, end, TRAILER)?;
        let trailer = trailer.as_slice().try_into().expect("as many bytes as were asked for");
        let length = read_footer_length(trailer).map_err(|error| error.to_string())? as u64;
        let start = end.checked_sub(length).ok_or("its footer is longer than the file")?;
        let footer = read(&file, size, start, length)?;
        let footer = root_as_footer(&footer).map_err(|error| error.to_string())?;
        let schema = footer.schema().ok_or("its footer has no schema")?;
        let schema = Arc::new(try_fb_to_schema(schema).map_err(|error| error.to_string())?);
        let mut decoder = FileDecoder::new(schema, footer.version());
        for block in footer.dictionaries().iter().flatten() {
            let data = block_of(&file, size, block)?;
            decoder.read_dictionary(block, &data).map_err(|error| error.to_string())?;
        }
        let blocks: Vec<Block> = footer.recordBatches().iter().flatten().copied().collect();
        Ok(ArrowFile { file, size, decoder, blocks: blocks.into_iter() })
    }
}

impl Iterator for ArrowFile {
    type Item = Result<RecordBatch, String>;

    fn next(&mut self) -> Option<Self::Item> {
        let block = self.blocks.next()?;
        let data = match block_of(&self.file, self.size, &block) {
            Ok(data) => data,
            Err(reason) => return Some(Err(reason)),
        };
        match self.decoder.read_record_batch(&block, &data) {
            Ok(Some(batch)) => Some(Ok(batch)),
            Ok(None) => Some(Err("a block of records holds none".into())),
            Err(error) => Some(Err(error.to_string())),
        }
    }
}

/// The first bytes of a message of a stream, before the length of its metadata.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// The batches of an Arrow stream.
pub(crate) struct ArrowStream {
    file: File,
    size: u64,
    /// The position of the next message.
    at: u64,
    decoder: StreamDecoder,
}

impl ArrowStream {
    /// Reads the schema, which is the first message. Errors with the reason.
    pub(crate) fn open(file: File) -> Result<ArrowStream, String> {
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        let mut stream = ArrowStream { file, size, at: 0, decoder: StreamDecoder::new() };
        // The schema has no body, so the decoder returns no batch for it.
        match stream.message()? {
            Some(None) => Ok(stream),
            _ => Err("its first message is no schema".into()),
        }
    }

    /// Decodes the next message. The message may be a batch. Returns `None` at the end.
    fn message(&mut self) -> Result<Option<Option<RecordBatch>>, String> {
        if self.at == self.size {
            // Some writers omit the end marker.
            return Ok(None);
        }
        let mut header = read(&self.file, self.size, self.at, 4)?;
        if header == CONTINUATION {
            header.extend(read(&self.file, self.size, self.at + 4, 4)?);
        }
        let length = &header[header.len() - 4..];
        let length = u64::from(u32::from_le_bytes(length.try_into().expect("four bytes")));
        if length == 0 {
            return Ok(None);
        }
        let start = self.at + header.len() as u64;
        let metadata = read(&self.file, self.size, start, length)?;
        let body = root_as_message(&metadata).map_err(|error| error.to_string())?.bodyLength();
        let body = u64::try_from(body).map_err(|_| "a message has a negative length")?;
        let bytes = read(&self.file, self.size, start + length, body)?;
        self.at = start + length + body;
        // Passes the whole message at once, so that the decoder does not allocate a buffer.
        let mut buffer = Buffer::from_vec([header, metadata, bytes].concat());
        let batch = self.decoder.decode(&mut buffer).map_err(|error| error.to_string())?;
        Ok(Some(batch))
    }
}

impl Iterator for ArrowStream {
    type Item = Result<RecordBatch, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.message() {
                Ok(None) => return None,
                // The message is a dictionary, not a batch.
                Ok(Some(None)) => {}
                Ok(Some(Some(batch))) => return Some(Ok(batch)),
                Err(reason) => {
                    self.at = self.size;
                    return Some(Err(reason));
                }
            }
        }
    }
}

/// Reads the bytes of a block.
fn block_of(file: &File, size: u64, block: &Block) -> Result<Buffer, String> {
    let number = |value: i64| u64::try_from(value).map_err(|_| "a block has a negative length".to_string());
    let length = number(block.bodyLength())?.checked_add(number(i64::from(block.metaDataLength()))?);
    read(file, size, number(block.offset())?, length.unwrap_or(u64::MAX)).map(Buffer::from_vec)
}

fn read(file: &File, size: u64, start: u64, length: u64) -> Result<Vec<u8>, String> {
    if start.checked_add(length).is_none_or(|end| end > size) {
        return Err(format!("a block of {length} bytes from byte {start} on ends beyond the file, which has {size}"));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, start).map_err(|error| error.to_string())?;
    Ok(bytes)
}
