//! Tokenizes text files into a cache folder. The name of the folder is a hash of everything that the tokens depend on.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tracing::{info, warn};

use crate::encode::Encoder;
use crate::files::{Kind, expand};
use crate::join::{PART, PartFolder, join};
use crate::parts::{Division, Part, SourceUnits, UNIT_BYTES, Units};
use crate::records::Formatting;
use crate::shards::{FORMAT, Meta, RecordKind, SourceFile, TokenDataset, TokenType};
use crate::source::{SourceOptions, documents_in, formatting};
use crate::splits::SplitUse;
use crate::stamps::{Hashes, Stamp};
use crate::token_writer::{Output, TokenWriter};
use crate::tokenize::tokenize;
use crate::tokenizer::Tokenizer;
use ottava_common::fs::{Fs, RealFs, create_dirs, sync_parent};
use ottava_common::hash::{seal, sha256, sha256_file};
use ottava_common::{Error, Result};

/// The prefix of folders that are being written.
const TEMPORARY: &str = ".tmp-";

/// Returns the tokens of `sources`. They are read from a folder in `cache`, or tokenized now.
///
/// Each document is tokenized separately, with the tokenizer's tokens at its edges. Files and documents keep their order for any number of cores. The
/// folder is written under a temporary name, and renamed when it is complete. If all parts of [`prepare_part`] exist, they are joined. Errors with
/// [`Error::Data`] if a file has a bad record, if no file has text, or if some parts are missing.
pub fn prepare(
    sources: &[PathBuf],
    options: &SourceOptions,
    tokenizer: &Tokenizer,
    cache: &Path,
) -> Result<TokenDataset> {
    Preparation::new(sources, options, tokenizer, cache, Sizes::DEFAULT)?.dataset()
}

/// Tokenizes `part` of `sources` into a folder in `cache`, unless the folder exists already. If no other part is missing, all parts are joined.
///
/// Has the errors of [`prepare`].
pub fn prepare_part(
    sources: &[PathBuf],
    options: &SourceOptions,
    tokenizer: &Tokenizer,
    cache: &Path,
    part: Part,
) -> Result<PreparedPart> {
    Preparation::new(sources, options, tokenizer, cache, Sizes::DEFAULT)?.part(part)
}

/// A part of the tokens of a data set.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedPart {
    /// The numbers of documents, tokens and bytes of text of the part. If the parts had been joined before, the numbers of all parts.
    pub counts: [u64; 3],
    /// The numbers of the parts that are still missing. If it is empty, all parts have been joined.
    pub missing: Vec<usize>,
    /// One sentence for each missing part that was prepared from files that have changed since.
    pub outdated: Vec<String>,
}

/// The sizes of files and units.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// The number of bytes after which a new file of tokens is started.
    pub(super) shard: u64,
    /// The bytes of a unit. Parts divide the sources by units.
    pub(super) unit: u64,
}

impl Sizes {
    const DEFAULT: Sizes = Sizes { shard: 1 << 30, unit: UNIT_BYTES };
}

/// The preparation of a data set: its tokens are opened or written.
pub(super) struct Preparation<'a> {
    sources: Vec<PathBuf>,
    formattings: Vec<Formatting>,
    options: &'a SourceOptions,
    encoder: Encoder<'a>,
    cache: &'a Path,
    sizes: Sizes,
    /// The content of the folder's `meta.json` before any tokens are written.
    meta: Meta,
}

impl<'a> Preparation<'a> {
    pub(super) fn new(
        sources: &[PathBuf],
        options: &'a SourceOptions,
        tokenizer: &'a Tokenizer,
        cache: &'a Path,
        sizes: Sizes,
    ) -> Result<Preparation<'a>> {
        let Some(eos_id) = tokenizer.eos_id() else {
            return Err(Error::Model(format!(
                "{}: no end-of-sequence token is known; name one as eos_token in the tokenizer_config.json beside it",
                tokenizer.path().display()
            )));
        };
        let sources = expand(sources, SplitUse::Training)?;
        let files = describe(&sources, cache)?;
        let formattings = sources.iter().map(|path| formatting(path, options)).collect::<Result<Vec<_>>>()?;
        let kind = record_kind(&sources, &formattings, options)?;
        let encoder = Encoder::new(tokenizer, options, &formattings)?;
        let meta = Meta {
            format: FORMAT,
            key: key(&files, options, &encoder, eos_id),
            documents: 0,
            tokens: 0,
            target_tokens: 0,
            loss_mask: encoder.loss_mask,
            kind,
            margins: false,
            bytes: 0,
            dtype: if encoder.loss_mask { TokenType::U32 } else { TokenType::for_vocab(tokenizer.vocab_size()) },
            vocab_size: tokenizer.vocab_size(),
            eos_id,
            tokenizer_sha256: tokenizer.sha256().into(),
            shards: Vec::new(),
            sha256: BTreeMap::new(),
            sources: files,
        };
        Ok(Preparation { sources, formattings, options, encoder, cache, sizes, meta })
    }

    /// Returns the tokens: from their folder, from parts, or tokenized now.
    pub(super) fn dataset(&self) -> Result<TokenDataset> {
        if let Some(dataset) = self.open()? {
            return Ok(dataset);
        }
        let started = PartFolder::all(self.cache, &self.meta.key);
        if let Some(complete) = started.iter().find(|folder| folder.missing().is_empty()) {
            return self.join(complete);
        }
        if let Some(folder) = started.first() {
            let text = format!("{}; or delete the folder to tokenize everything now", folder.describe_missing());
            // Another process may have joined the parts in the meantime.
            return self.open()?.ok_or(Error::Data(text));
        }
        self.write(Part::WHOLE, &self.folder())?;
        TokenDataset::open(&self.folder())
    }

    /// Tokenizes `part`. Joins all parts if no other part is missing.
    pub(super) fn part(&self, part: Part) -> Result<PreparedPart> {
        let counts = |meta: &Meta| [meta.documents, meta.tokens, meta.bytes];
        let all = |dataset: TokenDataset| PreparedPart {
            counts: counts(dataset.meta()),
            missing: Vec::new(),
            outdated: Vec::new(),
        };
        if part == Part::WHOLE {
            return self.dataset().map(all);
        }
        if let Some(dataset) = self.open()? {
            return Ok(all(dataset));
        }
        let folder = PartFolder::new(self.cache, &self.meta.key, part.of);
        let own = match folder.open(part.number) {
            Some(own) => own,
            None => {
                self.write(part, &folder.path(part.number))?;
                // Another process may also have prepared this part, and joined all parts in the meantime.
                if let Some(dataset) = self.open()? {
                    return Ok(all(dataset));
                }
                folder.expect(part.number)?
            }
        };
        let counts = counts(own.tokens.meta());
        let missing = folder.missing();
        let outdated = folder.outdated(&missing, &self.meta.sources);
        if missing.is_empty() {
            self.join(&folder)?;
        }
        Ok(PreparedPart { counts, missing, outdated })
    }

    fn folder(&self) -> PathBuf {
        self.cache.join(format!("tokens-{}", &self.meta.key[..16]))
    }

    /// Opens the tokens of a complete folder. A folder of the same name with other or damaged tokens is removed.
    fn open(&self) -> Result<Option<TokenDataset>> {
        let folder = self.folder();
        if !folder.exists() {
            return Ok(None);
        }
        match TokenDataset::open(&folder) {
            Ok(dataset) if dataset.meta().key == self.meta.key => {
                // A read-only cache can be used too; only the parts are not removed.
                if let Ok(_guard) = lock_cache(self.cache) {
                    PartFolder::all(self.cache, &self.meta.key).iter().for_each(PartFolder::remove);
                }
                return Ok(Some(dataset));
            }
            Ok(_) => warn!("{}: made from other data; preparing it again", folder.display()),
            Err(stopped @ Error::Cancelled(_)) => return Err(stopped),
            Err(error) => warn!("{error}; preparing it again"),
        }
        std::fs::remove_dir_all(&folder).map_err(Error::io(&folder))?;
        Ok(None)
    }

    /// Returns how parts divide each source.
    fn divisions(&self, parts: usize) -> Vec<Division> {
        let total = self.meta.sources.iter().map(|source| source.size).sum();
        let mut start = 0;
        let divide = |source: &SourceFile| {
            let division = Division { start, size: source.size, total, parts };
            start += source.size;
            division
        };
        self.meta.sources.iter().map(divide).collect()
    }

    /// Tokenizes `part` into `folder`.
    fn write(&self, part: Part, folder: &Path) -> Result<()> {
        create_dirs(&RealFs, self.cache)?;
        let temporary = TemporaryFolder::create(self.cache, &self.meta.key[..16])?;
        let key = if part == Part::WHOLE { self.meta.key.clone() } else { PartFolder::key(&self.meta.key, part) };
        let mut writer = TokenWriter::create(&temporary.path, Meta { key, ..self.meta.clone() }, self.sizes.shard)?;
        let (mut files, mut units) = (self.meta.sources.clone(), Vec::new());
        let sources = self.sources.iter().zip(&self.formattings).zip(self.divisions(part.of));
        for (((source, formatting), division), file) in sources.zip(&mut files) {
            if !division.owners().contains(&part.number) {
                units.push(SourceUnits::default());
                continue;
            }
            info!("tokenizing {} (records: {})", source.display(), formatting.as_str());
            let before = writer.counts()[0];
            let own = Units::of(part, division, self.sizes.unit);
            let reader = documents_in(own, source, *formatting, self.options)?;
            let (of_source, size, sha256) = tokenize(source, reader, self.options, &self.encoder, &mut writer)?;
            if with_index(source, sha256)? != file.sha256 {
                return Err(Error::Data(format!(
                    "{}: the file was changed while it was read ({} bytes before, {size} now); run again when it is complete",
                    source.display(),
                    file.size
                )));
            }
            file.documents = writer.counts()[0] - before;
            units.push(of_source);
        }
        if part != Part::WHOLE {
            let mut record = Output::create(temporary.path.join(PART))?;
            record.write(seal(&serde_json::json!({"sources": units})).as_bytes())?;
            record.finish()?;
        }
        self.publish(temporary, writer, files, folder)
    }

    /// Joins the parts in `parts`.
    fn join(&self, parts: &PartFolder) -> Result<TokenDataset> {
        // Another process may be joining the parts: then this process waits, and finds the tokens afterwards.
        let _lock = parts.lock();
        if !self.folder().exists() {
            info!("joining the {} parts in {}", parts.parts, parts.folder.display());
            let temporary = TemporaryFolder::create(self.cache, &self.meta.key[..16])?;
            let mut writer = TokenWriter::create(&temporary.path, self.meta.clone(), self.sizes.shard)?;
            let mut files = self.meta.sources.clone();
            let joined = join(parts, &self.divisions(parts.parts), &mut files, self.options, &mut writer)
                .and_then(|()| self.publish(temporary, writer, files, &self.folder()));
            // Without locks, another process may have removed the parts after it joined them.
            joined.or_else(|error| if self.folder().exists() { Ok(()) } else { Err(error) })?;
        }
        let dataset = TokenDataset::open(&self.folder())?;
        parts.remove();
        Ok(dataset)
    }

    /// Completes the files in `temporary` and renames it to `folder`.
    fn publish(
        &self,
        temporary: TemporaryFolder,
        writer: TokenWriter,
        files: Vec<SourceFile>,
        folder: &Path,
    ) -> Result<()> {
        if folder == self.folder() && writer.counts()[0] == 0 {
            let names: Vec<_> = self.sources.iter().map(|path| path.display().to_string()).collect();
            return Err(Error::Data(format!("no text to train on: [{}] hold no document", names.join(", "))));
        }
        writer.finish(files)?;
        RealFs.sync_dir(&temporary.path).map_err(Error::io(&temporary.path))?;
        create_dirs(&RealFs, folder.parent().expect("a folder in the cache"))?;
        // Another process may have been faster. Its folder is checked when it is opened.
        match std::fs::rename(&temporary.path, folder) {
            Err(error) if !folder.exists() => Err(Error::io(folder)(error)),
            _ => sync_parent(&RealFs, folder),
        }
    }
}

/// Returns the kind of the records of all files.
///
/// Errors with [`Error::Data`] if files have records of different kinds, and with [`Error::Config`] if `train_on_inputs` is set for prompts or
/// preferences.
fn record_kind(sources: &[PathBuf], formattings: &[Formatting], options: &SourceOptions) -> Result<RecordKind> {
    let first = formattings.first().copied().unwrap_or_default();
    if let Some(other) = formattings.iter().position(|other| other.kind() != first.kind()) {
        return Err(Error::Data(format!(
            "{} has records of formatting `{}`, and {} of `{}`; preferences and prompts are trained without other data, and pairs without labels",
            sources[0].display(),
            first.as_str(),
            sources[other].display(),
            formattings[other].as_str()
        )));
    }
    let data = match first.kind() {
        RecordKind::Preferences(_) => "preferences, of which only completions count",
        RecordKind::Prompts => "prompts, of which nothing is learned",
        RecordKind::Examples => "examples, whose tokens are not predicted",
        RecordKind::Documents => return Ok(RecordKind::Documents),
    };
    match options.train_on_inputs {
        true => Err(Error::Config(format!("`data.train_on_inputs` is true, and the data are {data}; set it to false"))),
        false => Ok(first.kind()),
    }
}

/// Returns the size and the hash of each source. If `cache` has the hash for a file's stamp, the file is not read.
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

/// Returns the hash of a source whose file has the hash `sha256`. For a `.bin` file, this is the hash of the pair with its index.
fn with_index(path: &Path, sha256: String) -> Result<String> {
    match Kind::of(path)?.0 {
        Kind::Megatron => Ok(pair(&sha256, &sha256_file(&path.with_extension("idx"))?.1)),
        _ => Ok(sha256),
    }
}

/// Returns the hash of a pair of files with these hashes.
fn pair(bin: &str, index: &str) -> String {
    sha256(format!("{bin}{index}").as_bytes())
}

/// Returns the hash of everything that the tokens depend on. For a source, this is its content and its file name, which determines the format, but
/// not its folder.
fn key(files: &[SourceFile], options: &SourceOptions, encoder: &Encoder, eos_id: u32) -> String {
    let tokenizer = encoder.tokenizer;
    let files: Vec<_> =
        files.iter().map(|f| (Path::new(&f.path).file_name().map(|n| n.to_string_lossy()), &f.sha256)).collect();
    let edges = (tokenizer.start_ids(), eos_id);
    let parts = serde_json::json!([FORMAT, files, options, tokenizer.sha256(), edges, encoder.template_sha256()]);
    sha256(parts.to_string().as_bytes())
}

/// A folder that is removed when it is dropped, unless it was renamed. Its process holds a lock on it, so that the folders of killed processes can be
/// recognized.
struct TemporaryFolder {
    path: PathBuf,
    _lock: File,
}

impl TemporaryFolder {
    /// Creates a folder in `cache`, and removes the folders that killed processes left.
    fn create(cache: &Path, key: &str) -> Result<TemporaryFolder> {
        // The cache is locked until the folder's own lock is held, so that no other process mistakes the folder for a leftover.
        let guard = lock_cache(cache)?;
        let locks = guard.is_some();
        // Containers that share a cache may have equal process ids, so the name is random.
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

/// Locks the cache, and removes what killed processes left in it. Returns `None` if the file system has no locks.
fn lock_cache(cache: &Path) -> Result<Option<File>> {
    let guard = File::open(cache).map_err(Error::io(cache))?;
    if guard.lock().is_err() {
        return Ok(None);
    }
    remove_leftovers(cache)?;
    Ok(Some(guard))
}

/// Removes temporary folders that no process has locked.
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
        // After the rename, nothing is left to remove. If the removal fails, the next process removes the folder.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
