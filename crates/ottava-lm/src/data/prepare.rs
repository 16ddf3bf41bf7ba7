//! Tokenizes text files into a cached folder, whose name is the hash of everything that it depends on.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tracing::{info, warn};

use super::encode::{Encoded, Encoder};
use super::files::{Kind, expand};
use super::left_out::{BadRecords, LeftOutOfFile};
use super::records::Formatting;
use super::shards::{FORMAT, Meta, PreferenceKind, SourceFile, TokenDataset, TokenType};
use super::source::{Document, Failure, SourceOptions, documents, formatting};
use super::stamps::{Hashes, Stamp};
use super::token_writer::TokenWriter;
use super::tokenizer::Tokenizer;
use crate::fs::{Fs, RealFs, create_dirs, sync_parent};
use crate::hash::{sha256, sha256_file};
use crate::{Error, Result, interrupt, limits};

/// A new file of tokens is started after this many bytes.
const SHARD_BYTES: u64 = 1 << 30;

/// Bytes of text that are tokenized together on all cores: bounds memory and keeps the cores busy.
const CHUNK_BYTES: usize = 8 << 20;

/// Prefix of folders that are being written.
const TEMPORARY: &str = ".tmp-";

/// Returns the tokens of `sources`, from a folder in `cache` or tokenized now.
///
/// Each document is tokenized separately, with the tokenizer's tokens at its edges. Files and documents keep
/// their order, whatever the number of cores. The folder appears by rename when it is complete.
/// Errors with [`Error::Data`] when a file holds a bad record or all of them hold no text.
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
    let sources = &expand(sources)?;
    let mut files = describe(sources, cache)?;
    let formattings = sources.iter().map(|path| formatting(path, options)).collect::<Result<Vec<_>>>()?;
    let prompts = formattings.iter().any(|formatting| formatting.has_prompts());
    let preference = preference(sources, &formattings, options)?;
    let encoder = Encoder::new(tokenizer, options, prompts)?;
    let key = key(&files, options, &encoder, eos_id);
    let folder = cache.join(format!("tokens-{}", &key[..16]));
    if folder.exists() {
        match TokenDataset::open(&folder) {
            Ok(dataset) if dataset.meta().key == key => {
                // A cache that may only be read serves all the same.
                let _ = lock_cache(cache);
                return Ok(dataset);
            }
            Ok(_) => warn!("{}: made from other data; preparing it again", folder.display()),
            Err(stopped @ Error::Cancelled(_)) => return Err(stopped),
            Err(error) => warn!("{error}; preparing it again"),
        }
        std::fs::remove_dir_all(&folder).map_err(Error::io(&folder))?;
    }
    create_dirs(&RealFs, cache)?;
    let temporary = TemporaryFolder::create(cache, &key[..16])?;
    let dtype = if encoder.loss_mask { TokenType::U32 } else { TokenType::for_vocab(tokenizer.vocab_size()) };
    let mut writer = TokenWriter::create(&temporary.path, dtype, shard_bytes)?;
    for ((source, expected), formatting) in sources.iter().zip(&mut files).zip(formattings) {
        info!("tokenizing {} (records: {})", source.display(), formatting.as_str());
        let before = writer.documents();
        let (size, sha256) = tokenize(source, options, &encoder, &mut writer)?;
        if sha256 != expected.sha256 {
            return Err(Error::Data(format!(
                "{}: the file was changed while it was read ({} bytes before, {size} now); run again when it is complete",
                source.display(),
                expected.size
            )));
        }
        expected.documents = writer.documents() - before;
    }
    if writer.documents() == 0 {
        let names: Vec<_> = sources.iter().map(|path| path.display().to_string()).collect();
        return Err(Error::Data(format!("no text to train on: [{}] hold no document", names.join(", "))));
    }
    writer.finish(Meta {
        format: FORMAT,
        key,
        documents: 0,
        tokens: 0,
        target_tokens: 0,
        loss_mask: encoder.loss_mask,
        preference,
        margins: false,
        bytes: 0,
        dtype,
        vocab_size: tokenizer.vocab_size(),
        eos_id,
        tokenizer_sha256: tokenizer.sha256().into(),
        shards: Vec::new(),
        sha256: BTreeMap::new(),
        sources: files,
    })?;
    RealFs.sync_dir(&temporary.path).map_err(Error::io(&temporary.path))?;
    // Another process may have been faster; its folder is checked on opening.
    match std::fs::rename(&temporary.path, &folder) {
        Err(error) if !folder.exists() => return Err(Error::io(&folder)(error)),
        _ => sync_parent(&RealFs, &folder)?,
    }
    TokenDataset::open(&folder)
}

/// The kind of preferences in the records of all files.
///
/// Errors with [`Error::Data`] when files differ in it, and with [`Error::Config`] when prompts of preferences are to be learned.
fn preference(
    sources: &[PathBuf],
    formattings: &[Formatting],
    options: &SourceOptions,
) -> Result<Option<PreferenceKind>> {
    let first = formattings.first().copied().unwrap_or_default();
    if let Some(other) = formattings.iter().position(|other| other.preference() != first.preference()) {
        return Err(Error::Data(format!(
            "{} has records of formatting `{}`, and {} of `{}`; preferences are trained without other data, and pairs without labels",
            sources[0].display(),
            first.as_str(),
            sources[other].display(),
            formattings[other].as_str()
        )));
    }
    if first.preference().is_some() && options.train_on_inputs {
        let text = "`data.train_on_inputs` is true, and the data are preferences, of which only completions count; set it to false";
        return Err(Error::Config(text.into()));
    }
    Ok(first.preference())
}

/// Size and hash of each source. Files whose stamp is that of a hash in `cache` are not read.
fn describe(sources: &[PathBuf], cache: &Path) -> Result<Vec<SourceFile>> {
    let hashes = Hashes::read(cache);
    let hash = |path: &PathBuf| -> Result<_> {
        let as_data = |error| match error {
            Error::Io { .. } => Error::Data(error.to_string()),
            other => other,
        };
        let stamp = Stamp::of(path);
        if let Some(known) = hashes.get(path, stamp.as_ref()) {
            return Ok((known.to_string(), None));
        }
        let settled = stamp.filter(Stamp::is_settled);
        let (_, sha256) = sha256_file(path).map_err(as_data)?;
        Ok((sha256.clone(), settled.map(|stamp| (path.clone(), stamp, sha256))))
    };
    let indices = sources.iter().filter(|path| Kind::of(path).is_ok_and(|(kind, _)| kind == Kind::Megatron));
    let indices: Vec<PathBuf> = indices.map(|path| path.with_extension("idx")).collect();
    let all: Vec<&PathBuf> = sources.iter().chain(&indices).collect();
    let hashed = all.par_iter().map(|path| hash(path)).collect::<Result<Vec<_>>>()?;
    let (sums, new): (Vec<_>, Vec<_>) = hashed.into_iter().unzip();
    if new.iter().any(Option::is_some) && create_dirs(&RealFs, cache).is_ok() {
        let mut hashes = hashes;
        hashes.add(new.into_iter().flatten());
        hashes.write();
    }
    let (of_sources, mut of_indices) = (&sums[..sources.len()], sums[sources.len()..].iter());
    let describe = |(path, sum): (&PathBuf, &String)| -> Result<SourceFile> {
        let size = std::fs::metadata(path).map_err(|error| Error::Data(format!("{}: {error}", path.display())))?.len();
        let sha256 = match Kind::of(path)?.0 {
            Kind::Megatron => pair(sum, of_indices.next().expect("an index of each pair")),
            _ => sum.clone(),
        };
        Ok(SourceFile { path: path.display().to_string(), size, sha256, documents: 0 })
    };
    sources.iter().zip(of_sources).map(describe).collect()
}

/// The hash of a `.bin` and its index.
fn with_index(path: &Path, sha256: &str) -> Result<String> {
    let (_, index) = sha256_file(&path.with_extension("idx"))?;
    Ok(pair(sha256, &index))
}

/// The hash of two files with these hashes.
fn pair(bin: &str, index: &str) -> String {
    sha256(format!("{bin}{index}").as_bytes())
}

/// The hash of everything that the tokens depend on. A source counts with its content and its name, which decides its
/// format, not with its folder.
fn key(files: &[SourceFile], options: &SourceOptions, encoder: &Encoder, eos_id: u32) -> String {
    let tokenizer = encoder.tokenizer;
    let files: Vec<_> =
        files.iter().map(|f| (Path::new(&f.path).file_name().map(|n| n.to_string_lossy()), &f.sha256)).collect();
    let edges = (tokenizer.start_ids(), eos_id);
    let parts = serde_json::json!([FORMAT, files, options, tokenizer.sha256(), edges, encoder.template_sha256()]);
    sha256(parts.to_string().as_bytes())
}

/// Tokenizes one file chunk by chunk: all cores work on the documents of a chunk, which are written in order. Returns size
/// and SHA-256 of the bytes read.
fn tokenize(
    source: &Path,
    options: &SourceOptions,
    encoder: &Encoder,
    writer: &mut TokenWriter,
) -> Result<(u64, String)> {
    let mut reader = documents(source, options)?;
    let mut left_out = LeftOutOfFile::default();
    let mut bad = BadRecords::new(options);
    loop {
        let (mut chunk, mut size) = (Vec::new(), 0);
        while size < CHUNK_BYTES {
            interrupt::check("tokenizing")?;
            let document = match reader.next_or_failure() {
                None => break,
                Some(Ok(document)) => document,
                Some(Err(Failure::Record(error))) => {
                    bad.skip(error)?;
                    continue;
                }
                Some(Err(Failure::File(error))) => return Err(error),
            };
            // The overhead of a document counts too, so that many short ones end a chunk.
            size += document.bytes + 64;
            chunk.push(document);
        }
        if chunk.is_empty() {
            left_out.warn(source, encoder);
            bad.warn(source);
            let (size, sha256) = reader.finish()?;
            let is_pair = Kind::of(source)?.0 == Kind::Megatron;
            return Ok((size, if is_pair { with_index(source, &sha256)? } else { sha256 }));
        }
        let encode = |document: &Document| {
            interrupt::check("tokenizing")?;
            encoder.encode(document).map_err(|e| Error::Data(format!("{}:{}: {e}", source.display(), document.line)))
        };
        let mut rest = &chunk[..];
        while !rest.is_empty() {
            let (together, others) = rest.split_at(fitting(rest, encoder, source)?);
            // All are encoded before the first error is taken, which then is that of the lowest line.
            let encoded: Vec<Result<Vec<Encoded>>> = together.par_iter().map(encode).collect();
            for (encoded, document) in encoded.into_iter().zip(together) {
                let encoded = match encoded {
                    Err(error @ Error::Data(_)) => {
                        bad.skip(error)?;
                        continue;
                    }
                    other => other?,
                };
                for encoded in encoded {
                    left_out.add(&encoded.left_out, document.line);
                    writer.push(&encoded, encoder.loss_mask)?;
                }
            }
            rest = others;
        }
    }
}

/// The number of `documents`, at least one, that can be tokenized at once in the available memory. Errors with [`Error::Data`] when
/// the first one alone does not fit.
fn fitting(documents: &[Document], encoder: &Encoder, source: &Path) -> Result<usize> {
    let available = limits::available_memory().unwrap_or(u64::MAX);
    let needed = |document: &Document| encoder.memory(document);
    let first = needed(&documents[0]);
    if first > available {
        return Err(Error::Data(format!(
            "{}:{}: tokenizing this document of {:.1} MiB takes about {:.1} GiB of memory, \
             {:.1} GiB available; split it, or set text_documents = \"line\"",
            source.display(),
            documents[0].line,
            documents[0].bytes as f64 / f64::from(1 << 20),
            first as f64 / f64::from(1 << 30),
            available as f64 / f64::from(1 << 30),
        )));
    }
    // Half of it is left to everything else.
    let mut total = first;
    let more = documents[1..].iter().take_while(|document| {
        total = total.saturating_add(needed(document));
        total <= available / 2
    });
    Ok(1 + more.count())
}

/// A folder that is removed on drop unless it was renamed. Its process holds a lock on it, so that leftovers of killed
/// processes can be told apart.
struct TemporaryFolder {
    path: PathBuf,
    _lock: File,
}

impl TemporaryFolder {
    /// Creates a folder in `cache` and removes those that killed processes left.
    fn create(cache: &Path, key: &str) -> Result<TemporaryFolder> {
        // The cache is locked until the folder's own lock is held, so that no process takes it for a leftover.
        let guard = lock_cache(cache)?;
        let locks = guard.is_some();
        // Containers that share a cache have equal process ids, so the name is random.
        let nonce = std::collections::hash_map::RandomState::new().build_hasher().finish();
        let path = cache.join(format!("{TEMPORARY}{key}-{nonce:016x}"));
        std::fs::create_dir(&path).map_err(Error::io(&path))?;
        let lock = File::open(&path).map_err(Error::io(&path))?;
        if locks {
            lock.try_lock().map_err(|e| Error::io(&path)(e.into()))?;
        }
        Ok(TemporaryFolder { path, _lock: lock })
    }
}

/// Locks the cache and removes what killed processes left in it; `None` where the file system has no locks.
fn lock_cache(cache: &Path) -> Result<Option<File>> {
    let guard = File::open(cache).map_err(Error::io(cache))?;
    if guard.lock().is_err() {
        return Ok(None);
    }
    remove_leftovers(cache)?;
    Ok(Some(guard))
}

/// Removes temporary folders whose lock nobody holds.
fn remove_leftovers(cache: &Path) -> Result<()> {
    for entry in std::fs::read_dir(cache).map_err(Error::io(cache))? {
        let entry = entry.map_err(Error::io(cache))?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) && path.is_dir() {
            let folder = File::open(&path).map_err(Error::io(&path))?;
            if folder.try_lock().is_ok() {
                std::fs::remove_dir_all(&path).map_err(Error::io(&path))?;
            }
        }
    }
    Ok(())
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // After the rename there is nothing to remove; a failure leaves a leftover for the next process.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
