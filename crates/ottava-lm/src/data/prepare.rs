//! From text files to a folder of tokens, made once and found again by the hash of everything it depends on.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tracing::{info, warn};

use super::shards::{FORMAT, Meta, SourceFile, TokenDataset, TokenType, shard_name};
use super::source::{Document, SourceOptions, documents};
use super::tokenizer::Tokenizer;
use crate::hash::{sha256, sha256_file};
use crate::{Error, Result};

/// A new file of tokens is started after this many bytes.
const SHARD_BYTES: u64 = 1 << 30;

/// Text that is read before it is tokenised on all cores: bounds memory and keeps the cores busy.
const CHUNK_BYTES: usize = 8 << 20;

/// The tokens of `sources`, from a folder under `cache` when it was made before, else made now.
///
/// Each document is tokenised by itself and ends with the tokenizer's end-of-sequence token; the order is that of the
/// files and of the documents in them, whatever the number of cores. The folder appears under its final name only when
/// it is complete. Errors with [`Error::Data`] when a file holds a bad record or all of them hold no text.
pub fn prepare(
    sources: &[PathBuf],
    options: &SourceOptions,
    tokenizer: &Tokenizer,
    cache: &Path,
) -> Result<TokenDataset> {
    prepare_sharded(sources, options, tokenizer, cache, SHARD_BYTES)
}

pub(super) fn prepare_sharded(
    sources: &[PathBuf],
    options: &SourceOptions,
    tokenizer: &Tokenizer,
    cache: &Path,
    shard_bytes: u64,
) -> Result<TokenDataset> {
    let Some(eos_id) = tokenizer.eos_id() else {
        return Err(Error::Model(format!(
            "{}: no end-of-sequence token is known; name one as eos_token in the tokenizer_config.json beside it",
            tokenizer.path().display()
        )));
    };
    let files = describe(sources)?;
    let key = key(&files, options, tokenizer, eos_id);
    let folder = cache.join(format!("tokens-{}", &key[..16]));
    if folder.exists() {
        match TokenDataset::open(&folder) {
            Ok(dataset) if dataset.meta().key == key => return Ok(dataset),
            Ok(_) => warn!("{}: made from other data; preparing it again", folder.display()),
            Err(error) => warn!("{error}; preparing it again"),
        }
        std::fs::remove_dir_all(&folder).map_err(Error::io(&folder))?;
    }
    std::fs::create_dir_all(cache).map_err(Error::io(cache))?;
    let temporary = TemporaryFolder::create(cache.join(format!(".tmp-{}-{}", &key[..16], std::process::id())))?;
    let mut writer = TokenWriter::create(&temporary.0, tokenizer.vocab_size(), shard_bytes)?;
    for source in sources {
        info!("tokenising {}", source.display());
        tokenise(source, options, tokenizer, eos_id, &mut writer)?;
    }
    if writer.starts.len() == 1 {
        let names: Vec<_> = sources.iter().map(|path| path.display().to_string()).collect();
        return Err(Error::Data(format!("no text to train on: [{}] hold no document", names.join(", "))));
    }
    writer.finish(Meta {
        format: FORMAT,
        key,
        documents: 0,
        tokens: 0,
        bytes: 0,
        dtype: TokenType::for_vocab(tokenizer.vocab_size()),
        vocab_size: tokenizer.vocab_size(),
        eos_id,
        tokenizer_sha256: tokenizer.sha256().into(),
        shards: Vec::new(),
        sources: files,
    })?;
    // When another process was faster, its folder is as good as ours; opening it tells.
    match std::fs::rename(&temporary.0, &folder) {
        Err(error) if !folder.exists() => Err(Error::io(&folder)(error)),
        _ => TokenDataset::open(&folder),
    }
}

fn describe(sources: &[PathBuf]) -> Result<Vec<SourceFile>> {
    let describe = |path: &PathBuf| {
        let (size, sha256) = sha256_file(path).map_err(|error| Error::Data(error.to_string()))?;
        Ok(SourceFile { path: path.display().to_string(), size, sha256 })
    };
    sources.par_iter().map(describe).collect()
}

/// Everything that the tokens depend on. Of a source that is its content and its name, which says how to read it;
/// where it lies does not matter.
fn key(files: &[SourceFile], options: &SourceOptions, tokenizer: &Tokenizer, eos_id: u32) -> String {
    let files: Vec<_> =
        files.iter().map(|f| (Path::new(&f.path).file_name().map(|n| n.to_string_lossy()), &f.sha256)).collect();
    let parts = serde_json::json!([FORMAT, files, options, tokenizer.sha256(), eos_id]);
    sha256(parts.to_string().as_bytes())
}

/// Tokenises one file chunk by chunk: all cores work on the documents of a chunk, and it is written in their order.
fn tokenise(
    source: &Path,
    options: &SourceOptions,
    tokenizer: &Tokenizer,
    eos_id: u32,
    writer: &mut TokenWriter,
) -> Result<()> {
    let mut reader = documents(source, options)?;
    loop {
        let (mut chunk, mut size) = (Vec::new(), 0);
        while size < CHUNK_BYTES {
            let Some(document) = reader.next().transpose()? else { break };
            // A document costs more than its text, so that many short ones end a chunk as well.
            size += document.text.len() + 64;
            chunk.push(document);
        }
        if chunk.is_empty() {
            return Ok(());
        }
        let encode = |document: &Document| {
            let ids = tokenizer.encode(&document.text);
            ids.map_err(|e| Error::Data(format!("{}:{}: {e}", source.display(), document.line)))
        };
        let encoded: Result<Vec<Vec<u32>>> = chunk.par_iter().map(encode).collect();
        for (document, mut ids) in chunk.iter().zip(encoded?) {
            ids.push(eos_id);
            writer.push(&ids, document.text.len())?;
        }
    }
}

/// Writes the files of a [`TokenDataset`] in one pass.
struct TokenWriter {
    folder: PathBuf,
    dtype: TokenType,
    shard_bytes: u64,
    shard: Option<Output>,
    shards: Vec<u64>,
    /// The first token of each document, and at the end the number of tokens.
    starts: Vec<u64>,
    bytes: Vec<u32>,
}

impl TokenWriter {
    fn create(folder: &Path, vocab_size: usize, shard_bytes: u64) -> Result<TokenWriter> {
        Ok(TokenWriter {
            folder: folder.to_path_buf(),
            dtype: TokenType::for_vocab(vocab_size),
            shard_bytes,
            shard: None,
            shards: Vec::new(),
            starts: vec![0],
            bytes: Vec::new(),
        })
    }

    fn push(&mut self, ids: &[u32], bytes: usize) -> Result<()> {
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
        for &id in ids {
            let id = id.to_le_bytes();
            shard.write(&id[..self.dtype.size()])?;
        }
        let tokens = self.shards.last_mut().expect("a file was opened above");
        *tokens += ids.len() as u64;
        self.starts.push(self.starts[self.starts.len() - 1] + ids.len() as u64);
        self.bytes.push(u32::try_from(bytes).expect("a document is smaller than 4 GiB"));
        Ok(())
    }

    fn close_shard(&mut self) -> Result<()> {
        self.shard.take().map_or(Ok(()), Output::finish)
    }

    /// Writes the tables and, last, `meta.json` with the counts filled in.
    fn finish(mut self, meta: Meta) -> Result<()> {
        self.close_shard()?;
        let mut starts = Output::create(self.folder.join("documents.bin"))?;
        self.starts.iter().try_for_each(|start| starts.write(&start.to_le_bytes()))?;
        starts.finish()?;
        let mut bytes = Output::create(self.folder.join("bytes.bin"))?;
        self.bytes.iter().try_for_each(|length| bytes.write(&length.to_le_bytes()))?;
        bytes.finish()?;
        let meta = Meta {
            documents: self.bytes.len() as u64,
            tokens: self.starts[self.starts.len() - 1],
            bytes: self.bytes.iter().map(|&length| u64::from(length)).sum(),
            shards: self.shards,
            ..meta
        };
        let mut file = Output::create(self.folder.join("meta.json"))?;
        let text = serde_json::to_string_pretty(&meta).expect("numbers and strings are JSON");
        file.write(text.as_bytes())?;
        file.write(b"\n")?;
        file.finish()
    }
}

/// A buffered file that knows its name in errors and reaches the disk before [`Output::finish`] returns: the rename
/// that follows must never be seen without the content.
struct Output {
    file: BufWriter<File>,
    path: PathBuf,
}

impl Output {
    fn create(path: PathBuf) -> Result<Output> {
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        Ok(Output { file: BufWriter::with_capacity(1 << 18, file), path })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path))
    }

    fn finish(self) -> Result<()> {
        let path = self.path;
        let file = self.file.into_inner().map_err(|e| Error::io(&path)(e.into_error()))?;
        file.sync_all().map_err(Error::io(&path))
    }
}

/// A folder that is removed again unless it was renamed.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn create(path: PathBuf) -> Result<TemporaryFolder> {
        // In containers process ids repeat, so a killed run may have left a folder of this name.
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
        std::fs::create_dir(&path).map_err(Error::io(&path))?;
        Ok(TemporaryFolder(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // Nothing is there after the rename; when removing fails, the name says that it is temporary.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
