//! Token files of Megatron-LM: `NAME.bin` has the ids, and `NAME.idx` has the lengths of sequences and the edges of documents.
//!
//! The format is Megatron-LM's `MMapIndexedDataset` (`megatron/core/datasets/indexed_dataset.py`), little-endian. The index has: magic, u64 version
//! 1, u8 type code, u64 number of sequences, u64 number of entries of the document index, i32 length of each sequence, i64 offset in bytes of each
//! sequence, i64 first sequence of each document, and at the end the number of sequences.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::shards::TokenDataset;
use ottava_common::{Error, Result, input, interrupt};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const HEADER: u64 = 34;

/// The maximum number of tokens of a document.
const MAX_TOKENS: u64 = 1 << 24;

/// Reads the documents of a pair of files.
pub(super) struct MegatronReader {
    file: File,
    size: u64,
    /// The number of bytes of a token.
    width: usize,
    /// The offset in bytes and the length in tokens of each sequence.
    sequences: Vec<(u64, u32)>,
    /// The first sequence of each document. The last entry is the number of sequences.
    documents: Vec<u64>,
    next: usize,
}

impl MegatronReader {
    /// Opens `path`, a `.bin` file, and its `.idx` file. Errors with [`Error::Data`].
    pub(super) fn open(path: &Path) -> Result<MegatronReader> {
        let index_path = path.with_extension("idx");
        let wrong = |reason: &str| Error::Data(format!("{}: {reason}", index_path.display()));
        let (index, index_size) = input::open(&index_path).map_err(|error| wrong(&error.to_string()))?;
        let mut header = [0; HEADER as usize];
        index.read_exact_at(&mut header, 0).map_err(|_| wrong("it is too short for an index of Megatron-LM"))?;
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        if &header[..9] != MAGIC || number(9) != 1 {
            return Err(wrong("this is not an index of Megatron-LM, version 1"));
        }
        let width = match header[17] {
            4 => 4,
            8 => 2,
            code => return Err(wrong(&format!("its tokens have the type {code}; int32 (4) and uint16 (8) are read"))),
        };
        let (count, entries) = (number(18), number(26));
        let needed =
            count.checked_mul(12).and_then(|bytes| bytes.checked_add(entries.checked_mul(8)?)?.checked_add(HEADER));
        // The index may be longer, because multimodal data have further entries at its end.
        if entries == 0 || needed.is_none_or(|needed| needed > index_size) {
            return Err(wrong("it is cut off, or its counts are damaged"));
        }
        let read = |start: u64, bytes: u64| {
            let mut buffer = vec![0; bytes as usize];
            index.read_exact_at(&mut buffer, start).map_err(|error| wrong(&error.to_string()))?;
            Ok::<_, Error>(buffer)
        };
        let lengths = read(HEADER, 4 * count)?;
        let offsets = read(HEADER + 4 * count, 8 * count)?;
        let documents = read(HEADER + 12 * count, 8 * entries)?;
        let words = |bytes: &[u8]| {
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
        };
        let documents: Vec<u64> = words(&documents);
        let lengths = lengths.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        let offsets: Vec<u64> = words(&offsets);
        let sequences: Vec<(u64, u32)> = offsets.into_iter().zip(lengths).collect();
        let (file, size) = input::open(path).map_err(|error| Error::Data(format!("{}: {error}", path.display())))?;
        let in_file = |&(offset, length): &(u64, u32)| {
            offset.checked_add(u64::from(length) * width as u64).is_some_and(|end| end <= size)
        };
        if let Some(at) = sequences.iter().position(|sequence| !in_file(sequence)) {
            return Err(wrong(&format!("sequence {at} ends beyond {}, which has {size} bytes", path.display())));
        }
        if documents[0] != 0 || documents.last() != Some(&count) || documents.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(wrong("its document index is damaged"));
        }
        Ok(MegatronReader { file, size, width, sequences, documents, next: 0 })
    }

    /// Returns the ids of the next document, and its number from 1; `None` at the end. Errors with the reason.
    pub(super) fn next(&mut self) -> Result<Option<(Vec<u32>, u64)>, String> {
        let Some(&end) = self.documents.get(self.next + 1) else { return Ok(None) };
        let sequences = &self.sequences[self.documents[self.next] as usize..end as usize];
        self.next += 1;
        let tokens: u64 = sequences.iter().map(|(_, length)| u64::from(*length)).sum();
        if tokens > MAX_TOKENS {
            return Err(format!("a document of {tokens} tokens, {MAX_TOKENS} are the most"));
        }
        let mut ids = Vec::with_capacity(tokens as usize);
        for (offset, length) in sequences {
            let mut bytes = vec![0; *length as usize * self.width];
            self.file
                .read_exact_at(&mut bytes, *offset)
                .map_err(|error| format!("cannot be read at byte {offset} of {}: {error}", self.size))?;
            ids.extend(bytes.chunks_exact(self.width).map(|token| match self.width {
                2 => u32::from(u16::from_le_bytes([token[0], token[1]])),
                _ => u32::from_le_bytes(token.try_into().expect("four bytes")),
            }));
        }
        Ok(Some((ids, self.next as u64)))
    }
}

/// Writes the documents of `dataset` as `PREFIX.bin` and `PREFIX.idx`. These files must not exist.
///
/// Errors with [`Error::Config`] if tokens have a loss mask, which these files cannot store, or if a file cannot be written.
pub fn write_megatron(dataset: &TokenDataset, prefix: &Path) -> Result<()> {
    if dataset.meta().loss_mask {
        return Err(Error::Config(
            "tokens of chats and completions have a loss mask, which files of Megatron-LM do not hold; set data.train_on_inputs = true".into(),
        ));
    }
    let name = prefix.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = |extension: &str| prefix.with_file_name(format!("{name}.{extension}"));
    let (bin_path, idx_path) = (path("bin"), path("idx"));
    let create = |path: &Path| File::create_new(path).map(BufWriter::new).map_err(Error::io(path));
    let (mut bin, mut index) = (create(&bin_path)?, create(&idx_path)?);
    // Uses Megatron-LM's rule: uint16 if the vocabulary has fewer than 65,500 entries, else int32.
    let (code, width) = if dataset.meta().vocab_size < 65_500 { (8_u8, 2) } else { (4, 4) };
    let count = dataset.len() as u64;
    let mut lengths = Vec::with_capacity(4 * dataset.len());
    let mut offsets = Vec::with_capacity(8 * dataset.len());
    let mut offset = 0_u64;
    for i in 0..dataset.len() {
        interrupt::check("writing tokens")?;
        let ids = dataset.document(i)?;
        for id in &ids {
            bin.write_all(&id.to_le_bytes()[..width]).map_err(Error::io(&bin_path))?;
        }
        lengths.extend((ids.len() as u32).to_le_bytes());
        offsets.extend(offset.to_le_bytes());
        offset += (ids.len() * width) as u64;
    }
    let documents = (0..=count).flat_map(u64::to_le_bytes);
    let header =
        [MAGIC.as_slice(), &1_u64.to_le_bytes(), &[code], &count.to_le_bytes(), &(count + 1).to_le_bytes()].concat();
    let tables: Vec<u8> = header.into_iter().chain(lengths).chain(offsets).chain(documents).collect();
    index.write_all(&tables).map_err(Error::io(&idx_path))?;
    for (file, path) in [(bin, &bin_path), (index, &idx_path)] {
        let file = file.into_inner().map_err(|error| Error::io(path)(error.into_error()))?;
        file.sync_all().map_err(Error::io(path))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "megatron_tests.rs"]
mod tests;
