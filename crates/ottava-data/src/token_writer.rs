//! Writes tokens to disk in one pass. The memory does not depend on the number of tokens.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::columns::{COLUMN_STARTS, COLUMNS};
use crate::encode::Encoded;
use crate::shards::{
    BYTES, DOCUMENTS, LABELS, MARGINS, MASKED, Meta, PreferenceKind, RecordKind, SourceFile, TARGETS, TokenType,
    shard_name,
};
use ottava_common::hash::{hex, seal};
use ottava_common::{Error, Result};

/// Writes the files of a [`TokenDataset`](super::shards::TokenDataset) in one pass.
pub(super) struct TokenWriter {
    folder: PathBuf,
    /// The content of `meta.json`, with the counts so far.
    meta: Meta,
    shard_bytes: u64,
    shard: Option<Output>,
    /// The first token of each document. The last entry is the number of tokens.
    starts: Output,
    bytes: Output,
    /// With a loss mask: for each document, the first target after its first token; `u32::MAX` without targets.
    first_targets: Option<Output>,
    /// The labels of documents, if they have labels.
    labels: Option<Output>,
    /// The margin of each document in F32. The file is started at the first margin that is not zero.
    margins: Option<Output>,
    /// The columns of prompts or examples.
    columns: Option<ColumnsOutput>,
    /// A buffer for the bytes of a document's tokens.
    buffer: Vec<u8>,
}

impl TokenWriter {
    /// Creates the files in `folder`. `meta` says which tables are written; the writer sets the counts and hashes of `meta`.
    pub(super) fn create(folder: &Path, meta: Meta, shard_bytes: u64) -> Result<TokenWriter> {
        let table = |name: &str| Output::create(folder.join(name));
        let has = |kind| meta.kind == kind;
        Ok(TokenWriter {
            folder: folder.to_path_buf(),
            shard_bytes,
            shard: None,
            starts: table(DOCUMENTS)?,
            bytes: table(BYTES)?,
            first_targets: meta.loss_mask.then(|| table(TARGETS)).transpose()?,
            labels: has(RecordKind::Preferences(PreferenceKind::Labels)).then(|| table(LABELS)).transpose()?,
            margins: None,
            columns: meta.kind.has_columns().then(|| ColumnsOutput::create(folder)).transpose()?,
            buffer: Vec::new(),
            meta: Meta { documents: 0, tokens: 0, target_tokens: 0, bytes: 0, shards: Vec::new(), ..meta },
        })
    }

    /// Returns the numbers of written documents, tokens and bytes of text.
    pub(super) fn counts(&self) -> [u64; 3] {
        [self.meta.documents, self.meta.tokens, self.meta.bytes]
    }

    /// Writes a document. Its tokens may have the bit of the loss mask.
    pub(super) fn push(&mut self, Encoded { tokens: ids, bytes, label, margin, columns, .. }: &Encoded) -> Result<()> {
        let size = self.meta.dtype.size();
        if self.meta.shards.last().is_some_and(|&tokens| tokens * size as u64 >= self.shard_bytes) {
            self.close_shard()?;
        }
        let shard = match &mut self.shard {
            Some(shard) => shard,
            None => {
                let output = Output::create(self.folder.join(shard_name(self.meta.shards.len())))?;
                self.meta.shards.push(0);
                self.shard.insert(output)
            }
        };
        self.buffer.clear();
        match self.meta.dtype {
            TokenType::U16 => self.buffer.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            TokenType::U32 => self.buffer.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
        shard.write(&self.buffer)?;
        let is_target = |id: &u32| self.first_targets.is_none() || id & MASKED == 0;
        self.meta.target_tokens += ids.iter().filter(|id| is_target(id)).count() as u64;
        if let Some(table) = &mut self.first_targets {
            let first = ids.iter().skip(1).position(|id| id & MASKED == 0);
            let first = first.and_then(|first| u32::try_from(first + 1).ok()).unwrap_or(u32::MAX);
            table.write(&first.to_le_bytes())?;
        }
        if let (Some(table), Some(label)) = (&mut self.labels, label) {
            table.write(&[u8::from(*label)])?;
        }
        if let (Some(output), Some(columns)) = (&mut self.columns, columns) {
            output.push(columns)?;
        }
        self.starts.write(&self.meta.tokens.to_le_bytes())?;
        self.bytes.write(&u32::try_from(*bytes).expect("a document is smaller than 4 GiB").to_le_bytes())?;
        *self.meta.shards.last_mut().expect("a file was opened above") += ids.len() as u64;
        if self.margins.is_none() && *margin != 0.0 {
            let table = self.margins.insert(Output::create(self.folder.join(MARGINS))?);
            (0..self.meta.documents).try_for_each(|_| table.write(&0f32.to_le_bytes()))?;
        }
        if let Some(table) = &mut self.margins {
            table.write(&margin.to_le_bytes())?;
        }
        self.meta.documents += 1;
        self.meta.tokens += ids.len() as u64;
        self.meta.bytes += *bytes as u64;
        Ok(())
    }

    fn close_shard(&mut self) -> Result<()> {
        match self.shard.take() {
            Some(shard) => close(shard, &mut self.meta.sha256),
            None => Ok(()),
        }
    }

    /// Completes the tables, and writes `meta.json` with `sources` last.
    pub(super) fn finish(mut self, sources: Vec<SourceFile>) -> Result<()> {
        self.close_shard()?;
        self.starts.write(&self.meta.tokens.to_le_bytes())?;
        self.meta.margins = self.margins.is_some();
        let tables = [Some(self.starts), Some(self.bytes), self.first_targets, self.labels, self.margins];
        let of_columns = self.columns.map(ColumnsOutput::complete).transpose()?.into_iter().flatten();
        let mut files = tables.into_iter().flatten().chain(of_columns);
        files.try_for_each(|file| close(file, &mut self.meta.sha256))?;
        let mut file = Output::create(self.folder.join("meta.json"))?;
        file.write(seal(&Meta { sources, ..self.meta }).as_bytes())?;
        file.finish().map(|_| ())
    }
}

/// The writer of the columns of prompts, and of the table of their first bytes.
struct ColumnsOutput {
    objects: Output,
    starts: Output,
    /// The number of bytes of the objects so far.
    bytes: u64,
}

impl ColumnsOutput {
    fn create(folder: &Path) -> Result<ColumnsOutput> {
        let create = |name: &str| Output::create(folder.join(name));
        Ok(ColumnsOutput { objects: create(COLUMNS)?, starts: create(COLUMN_STARTS)?, bytes: 0 })
    }

    /// Writes the object of the next document.
    fn push(&mut self, json: &str) -> Result<()> {
        self.starts.write(&self.bytes.to_le_bytes())?;
        self.bytes += json.len() as u64;
        self.objects.write(json.as_bytes())
    }

    /// Completes the table. Returns both files, which are not closed yet.
    fn complete(mut self) -> Result<[Output; 2]> {
        self.starts.write(&self.bytes.to_le_bytes())?;
        Ok([self.objects, self.starts])
    }
}

/// Completes a file, and adds its hash to `sha256`.
fn close(file: Output, sha256: &mut BTreeMap<String, String>) -> Result<()> {
    let (name, hash) = file.finish()?;
    sha256.insert(name, hash);
    Ok(())
}

/// A buffered file that is hashed while it is written. [`Output::finish`] flushes it to the disk. Otherwise, after a power failure, the folder could
/// have its final name while the file lacks content.
pub(super) struct Output {
    file: BufWriter<Hashed>,
    path: PathBuf,
}

impl Output {
    pub(super) fn create(path: PathBuf) -> Result<Output> {
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        Ok(Output { file: BufWriter::with_capacity(1 << 18, Hashed { file, hasher: Sha256::new() }), path })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path))
    }

    /// Completes the file, and returns its name and SHA-256.
    pub(super) fn finish(self) -> Result<(String, String)> {
        let path = self.path;
        let Hashed { file, hasher } = self.file.into_inner().map_err(|e| Error::io(&path)(e.into_error()))?;
        file.sync_all().map_err(Error::io(&path))?;
        let name = path.file_name().expect("a file has a name").to_string_lossy();
        Ok((name.into_owned(), hex(&hasher.finalize())))
    }
}

/// A file that is hashed while it is written.
struct Hashed {
    file: File,
    hasher: Sha256,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
