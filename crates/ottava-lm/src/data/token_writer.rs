//! Writes tokens to disk, in one pass.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::encode::Encoded;
use super::shards::{BYTES, DOCUMENTS, LABELS, MARGINS, MASKED, Meta, PreferenceKind, TARGETS, TokenType, shard_name};
use crate::hash::{hex, seal};
use crate::{Error, Result};

/// Writes the files of a [`TokenDataset`] in one pass.
pub(super) struct TokenWriter {
    folder: PathBuf,
    dtype: TokenType,
    shard_bytes: u64,
    shard: Option<Output>,
    shards: Vec<u64>,
    /// SHA-256 of the files that are complete, by name.
    sha256: BTreeMap<String, String>,
    /// The first token of each document, and at the end the number of tokens.
    starts: Vec<u64>,
    bytes: Vec<u32>,
    /// The first target of each document behind its first token; `u32::MAX` if there is none.
    first_targets: Vec<u32>,
    target_tokens: u64,
    /// Of documents with labels.
    labels: Vec<u8>,
    margins: Vec<f32>,
}

impl TokenWriter {
    pub(super) fn create(folder: &Path, dtype: TokenType, shard_bytes: u64) -> Result<TokenWriter> {
        Ok(TokenWriter {
            folder: folder.to_path_buf(),
            dtype,
            shard_bytes,
            shard: None,
            shards: Vec::new(),
            sha256: BTreeMap::new(),
            starts: vec![0],
            bytes: Vec::new(),
            first_targets: Vec::new(),
            target_tokens: 0,
            labels: Vec::new(),
            margins: Vec::new(),
        })
    }

    /// Documents that were written.
    pub(super) fn documents(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Writes a document, whose tokens may have the bit of a loss mask.
    pub(super) fn push(&mut self, document: &Encoded, loss_mask: bool) -> Result<()> {
        let Encoded { tokens: ids, bytes, label, margin, .. } = document;
        if self.shards.last().is_some_and(|&tokens| tokens * self.dtype.size() as u64 >= self.shard_bytes) {
            self.close_shard()?;
        }
        let shard = match &mut self.shard {
            Some(shard) => shard,
            None => {
                let output = Output::create(self.folder.join(shard_name(self.shards.len())))?;
                self.shards.push(0);
                self.shard.insert(output)
            }
        };
        self.target_tokens += ids.iter().filter(|&&id| !loss_mask || id & MASKED == 0).count() as u64;
        if loss_mask {
            let first = ids.iter().skip(1).position(|id| id & MASKED == 0);
            self.first_targets.push(first.and_then(|first| u32::try_from(first + 1).ok()).unwrap_or(u32::MAX));
        }
        for &id in ids {
            let id = id.to_le_bytes();
            shard.write(&id[..self.dtype.size()])?;
        }
        let tokens = self.shards.last_mut().expect("a file was opened above");
        *tokens += ids.len() as u64;
        self.starts.push(self.starts[self.starts.len() - 1] + ids.len() as u64);
        self.labels.extend(label.map(u8::from));
        self.margins.push(*margin);
        self.bytes.push(u32::try_from(*bytes).expect("a document is smaller than 4 GiB"));
        Ok(())
    }

    fn close_shard(&mut self) -> Result<()> {
        match self.shard.take() {
            Some(shard) => self.close(shard),
            None => Ok(()),
        }
    }

    fn close(&mut self, file: Output) -> Result<()> {
        let (name, sha256) = file.finish()?;
        self.sha256.insert(name, sha256);
        Ok(())
    }

    /// Writes the tables and, last, `meta.json` with the counts and hashes filled in.
    pub(super) fn finish(mut self, meta: Meta) -> Result<()> {
        self.close_shard()?;
        let mut starts = Output::create(self.folder.join(DOCUMENTS))?;
        self.starts.iter().try_for_each(|start| starts.write(&start.to_le_bytes()))?;
        self.close(starts)?;
        let mut bytes = Output::create(self.folder.join(BYTES))?;
        self.bytes.iter().try_for_each(|length| bytes.write(&length.to_le_bytes()))?;
        self.close(bytes)?;
        if meta.preference == Some(PreferenceKind::Labels) {
            let mut labels = Output::create(self.folder.join(LABELS))?;
            labels.write(&self.labels)?;
            self.close(labels)?;
        }
        let margins = self.margins.iter().any(|&margin| margin != 0.0);
        if margins {
            let mut file = Output::create(self.folder.join(MARGINS))?;
            self.margins.iter().try_for_each(|margin| file.write(&margin.to_le_bytes()))?;
            self.close(file)?;
        }
        if meta.loss_mask {
            let mut targets = Output::create(self.folder.join(TARGETS))?;
            self.first_targets.iter().try_for_each(|first| targets.write(&first.to_le_bytes()))?;
            self.close(targets)?;
        }
        let meta = Meta {
            documents: self.bytes.len() as u64,
            tokens: self.starts[self.starts.len() - 1],
            target_tokens: self.target_tokens,
            margins,
            bytes: self.bytes.iter().map(|&length| u64::from(length)).sum(),
            shards: self.shards,
            sha256: self.sha256,
            ..meta
        };
        let mut file = Output::create(self.folder.join("meta.json"))?;
        file.write(seal(&meta).as_bytes())?;
        file.finish().map(|_| ())
    }
}

/// A buffered file that is hashed while it is written. [`Output::finish`] flushes it to the disk, so that the rename of its
/// folder cannot survive a power failure without its content.
struct Output {
    file: BufWriter<File>,
    path: PathBuf,
    hasher: Sha256,
}

impl Output {
    fn create(path: PathBuf) -> Result<Output> {
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        Ok(Output { file: BufWriter::with_capacity(1 << 18, file), path, hasher: Sha256::new() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(Error::io(&self.path))
    }

    /// Returns the file's name and SHA-256.
    fn finish(self) -> Result<(String, String)> {
        let path = self.path;
        let file = self.file.into_inner().map_err(|e| Error::io(&path)(e.into_error()))?;
        file.sync_all().map_err(Error::io(&path))?;
        let name = path.file_name().expect("a file has a name").to_string_lossy();
        Ok((name.into_owned(), hex(&self.hasher.finalize())))
    }
}
