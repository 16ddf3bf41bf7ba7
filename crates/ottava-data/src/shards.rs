//! Tokens on disk: a folder that [`prepare`](super::prepare()) wrote. It is checked when it is first opened, and read as needed.
//!
//! | file | content, little endian |
//! |---|---|
//! | `tokens-00000.bin`, ... | the ids of all documents in order, u16 or u32; a document never spans two files |
//! | `documents.bin` | u64 for each document: its first token, counted over all files; last, the number of tokens |
//! | `bytes.bin` | u32 for each document: bytes of its text in UTF-8, for bits per byte |
//! | `labels.bin` | only for completions with labels, u8 for each document: 1 for a desirable completion, else 0 |
//! | `margins.bin` | only if some pairs have margins, f32 for each document: the margin of the pair for the chosen document, 0 for the rejected |
//! | `columns.bin` | only for prompts and examples: for each document a JSON object in UTF-8; for prompts with all fields of the record, which rewards read; for examples with the label, and with the number of tokens of each text |
//! | `column_starts.bin` | only with `columns.bin`, u64 for each document: the first byte of its object in `columns.bin`; last, the number of bytes |
//! | `targets.bin` | only with a loss mask, u32 for each document: its first target, counted in tokens from 0; `u32::MAX` without targets |
//! | `meta.json` | [`Meta`] with its own checksum; written last |
//! | `checked.json` | the stamps of these files when they were checked; while the stamps are equal, opening reads none of the files |
//! | `rows-*.json` | [`Statistics`](super::statistics::Statistics) of a run |
//!
//! With a loss mask, ids are u32, and the highest bit of a token says that the token is not a target.
//!
//! Tokens and tables are read with positioned reads. So a file that is truncated in the meantime is an error and not SIGBUS, and memory does not grow
//! with the data.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ottava_tensor::ops::IGNORE_INDEX;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::columns::Columns;
use crate::example_records::LENGTHS;
use crate::stamps::{self, Stamp};
use crate::table::{Table, open_exactly};
use ottava_common::hash::{hex, sha256_file, unseal};
use ottava_common::{Error, Result, input, interrupt};

/// The version of the folder's layout that this program writes and reads.
pub const FORMAT: u32 = 6;

/// A bit of a stored token: the loss ignores the token as a target. Only used if [`Meta::loss_mask`] is set.
pub const MASKED: u32 = 1 << 31;

/// The content of `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// The value of [`FORMAT`] when the folder was written.
    pub format: u32,
    /// The hash of everything that the tokens depend on: sources, tokenizer and options.
    pub key: String,
    /// The number of documents.
    pub documents: u64,
    /// The number of tokens, including the tokens at the edges of documents.
    pub tokens: u64,
    /// The number of tokens that contribute to the loss.
    pub target_tokens: u64,
    /// Whether the loss ignores some tokens as targets.
    pub loss_mask: bool,
    /// The kind of the records. Folders of earlier versions have preferences in the field `preference`.
    #[serde(default, alias = "preference", skip_serializing_if = "RecordKind::is_documents")]
    pub kind: RecordKind,
    /// Whether some pairs have margins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub margins: bool,
    /// The number of bytes in UTF-8 of all texts that contribute to the loss, without the tokens that separate documents.
    pub bytes: u64,
    /// The storage type of a token.
    pub dtype: TokenType,
    /// All ids are below this number.
    pub vocab_size: usize,
    /// The id that ends a text.
    pub eos_id: u32,
    /// SHA-256 of the `tokenizer.json` that made the ids.
    pub tokenizer_sha256: String,
    /// The number of tokens in each `tokens-*.bin`.
    pub shards: Vec<u64>,
    /// SHA-256 of each file of the folder except `meta.json`, by file name.
    pub sha256: BTreeMap<String, String>,
    /// The source files of the tokens.
    pub sources: Vec<SourceFile>,
}

/// The file names of the tables.
pub(super) const DOCUMENTS: &str = "documents.bin";
pub(super) const BYTES: &str = "bytes.bin";
pub(super) const LABELS: &str = "labels.bin";
pub(super) const MARGINS: &str = "margins.bin";
pub(super) const TARGETS: &str = "targets.bin";

/// The name of the file with the stamps of checked files.
const CHECKED: &str = "checked.json";

/// The maximum size of `meta.json` in bytes. The file has a line for each source.
const MAX_META_BYTES: u64 = 256 << 20;

/// The number of bytes of tokens that are checked at a time.
const CHECK_BYTES: usize = 1 << 20;

/// The kind of the records of a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordKind {
    /// Documents that the model is trained on.
    #[default]
    Documents,
    /// Prompts with columns. The model writes completions of the prompts.
    Prompts,
    /// Examples of a classifier or of an embedding model, with columns. A document has the tokens of all texts of an example, one text after another.
    Examples,
    /// Preferences.
    #[serde(untagged)]
    Preferences(PreferenceKind),
}

impl RecordKind {
    fn is_documents(&self) -> bool {
        *self == RecordKind::Documents
    }

    /// Returns the number of documents of a record.
    pub fn documents(self) -> usize {
        self.preference().map_or(1, PreferenceKind::documents)
    }

    /// Returns the kind of preferences, if the records are preferences.
    pub fn preference(self) -> Option<PreferenceKind> {
        match self {
            RecordKind::Documents | RecordKind::Prompts | RecordKind::Examples => None,
            RecordKind::Preferences(kind) => Some(kind),
        }
    }

    /// Returns whether each document has columns beside its tokens.
    pub fn has_columns(self) -> bool {
        matches!(self, RecordKind::Prompts | RecordKind::Examples)
    }
}

/// The form of preferences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceKind {
    /// Documents `2i` and `2i + 1` are the chosen and the rejected completion of one prompt.
    Pairs,
    /// Each document has a label.
    Labels,
}

impl PreferenceKind {
    /// Returns the number of documents of a record.
    pub fn documents(self) -> usize {
        match self {
            PreferenceKind::Pairs => 2,
            PreferenceKind::Labels => 1,
        }
    }
}

/// The storage type of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// Two bytes, for vocabularies of up to 65,536.
    U16,
    /// Four bytes.
    U32,
}

impl TokenType {
    /// Returns the smallest type that can store every id below `vocab_size`.
    pub fn for_vocab(vocab_size: usize) -> TokenType {
        if vocab_size <= 1 << 16 { TokenType::U16 } else { TokenType::U32 }
    }

    /// Returns the number of bytes of one token.
    pub fn size(self) -> usize {
        match self {
            TokenType::U16 => 2,
            TokenType::U32 => 4,
        }
    }
}

/// A source file of the tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// The path of the file, as the user wrote it.
    pub path: String,
    /// The size of the file in bytes.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: String,
    /// The number of documents of the file.
    pub documents: u64,
}

/// Returns the name of file number `index` of the tokens.
pub fn shard_name(index: usize) -> String {
    format!("tokens-{index:05}.bin")
}

/// A folder of tokens, open for random access. It was checked that no document is empty, that all ids are in range, and that each file is unchanged
/// since it was written.
pub struct TokenDataset {
    folder: PathBuf,
    meta: Meta,
    shards: Vec<Shard>,
    /// The first token of each document. The last entry is the number of tokens.
    starts: Table<8>,
    /// The number of text bytes of each document.
    bytes: Table<4>,
    /// With a loss mask: for each document, the first target after its first token, counted in tokens; `u32::MAX` without targets.
    first_targets: Option<Table<4>>,
    /// The labels of documents, if they have labels: 1 for a desirable document, else 0.
    labels: Option<Table<1>>,
    /// The margins of pairs, if pairs have margins. The margin of a pair is stored with its chosen document.
    margins: Option<Table<4>>,
    /// The columns of prompts or examples.
    columns: Option<Columns>,
}

struct Shard {
    file: File,
    path: PathBuf,
    /// The number of the file's first token, counted over all files.
    start: u64,
}

impl TokenDataset {
    /// Opens `folder`. If it was checked before and no file has changed since, the time does not depend on its size; otherwise, its files are
    /// checked. Errors with [`Error::Data`], which names the file and, if a document is wrong, the document.
    pub fn open(folder: &Path) -> Result<TokenDataset> {
        let dataset = TokenDataset::open_part(folder)?;
        match dataset.meta.documents {
            0 => Err(Error::Data(format!("{}: it has no documents", folder.join("meta.json").display()))),
            _ => Ok(dataset),
        }
    }

    /// Opens a part of a preparation, like [`TokenDataset::open`]. A part may be empty.
    pub(super) fn open_part(folder: &Path) -> Result<TokenDataset> {
        let path = folder.join("meta.json");
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
        let text = input::read(&path, MAX_META_BYTES).map_err(Error::io(&path))?;
        // The version determines the meaning of the other fields, so it is checked first.
        let value: Value = serde_json::from_slice(&text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        if value["format"] != FORMAT {
            let found = &value["format"];
            return Err(wrong(format!(
                "format {found}, this program reads {FORMAT}; delete the folder to prepare it again"
            )));
        }
        let meta: Meta = serde_json::from_value(unseal(&text).map_err(wrong)?).map_err(|e| wrong(e.to_string()))?;
        let tokens = meta.shards.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n));
        if tokens != Some(meta.tokens) || (meta.documents == 0) != (meta.tokens == 0) {
            return Err(wrong("its counts of documents and tokens do not agree".into()));
        }
        if meta.loss_mask && (meta.dtype != TokenType::U32 || meta.vocab_size > MASKED as usize) {
            return Err(wrong("its tokens have no room for a loss mask".into()));
        }
        let mut shards = Vec::with_capacity(meta.shards.len());
        let mut start = 0;
        for (index, &tokens) in meta.shards.iter().enumerate() {
            let path = folder.join(shard_name(index));
            let file = open_exactly(&path, tokens.saturating_mul(meta.dtype.size() as u64), "meta.json")?;
            shards.push(Shard { file, path, start });
            start += tokens;
        }
        let starts = Table::open(folder, DOCUMENTS, meta.documents.saturating_add(1))?;
        let bytes = Table::open(folder, BYTES, meta.documents)?;
        let first_targets = meta.loss_mask.then(|| Table::open(folder, TARGETS, meta.documents)).transpose()?;
        let has_labels = meta.kind == RecordKind::Preferences(PreferenceKind::Labels);
        let labels = has_labels.then(|| Table::open(folder, LABELS, meta.documents)).transpose()?;
        let margins = meta.margins.then(|| Table::open(folder, MARGINS, meta.documents)).transpose()?;
        let columns = meta.kind.has_columns().then(|| Columns::open(folder, meta.documents)).transpose()?;
        if !meta.documents.is_multiple_of(meta.kind.documents() as u64) {
            return Err(wrong(format!("{} documents are no pairs", meta.documents)));
        }
        let folder = folder.to_path_buf();
        let dataset = TokenDataset { folder, meta, shards, starts, bytes, first_targets, labels, margins, columns };
        let (checked, stamps) = (dataset.folder.join(CHECKED), dataset.stamps());
        if stamps.is_none() || stamps::read(&checked) != stamps {
            dataset.check()?;
            stamps::write(&checked, &stamps);
        }
        Ok(dataset)
    }

    /// Returns the stamps of all files of the folder; `None` if a file cannot be found.
    fn stamps(&self) -> Option<BTreeMap<String, Stamp>> {
        let names = self.meta.sha256.keys().map(String::as_str).chain(["meta.json"]);
        names.map(|name| Some((name.to_string(), Stamp::of(&self.folder.join(name))?))).collect()
    }

    /// Reads all files and checks the facts on which the functions below rely:
    /// * Offsets rise from 0 to the number of tokens.
    /// * Each document is within one file.
    /// * Ids are below the vocabulary.
    /// * The byte counts of documents add up.
    /// * No file has changed since it was written.
    ///
    /// Has the errors of [`TokenDataset::open`].
    pub fn check(&self) -> Result<()> {
        let wrong = |name: &str, reason: String| Error::Data(format!("{}: {reason}", self.folder.join(name).display()));
        let tables = [
            Some(self.starts.path()),
            Some(self.bytes.path()),
            self.first_targets.as_ref().map(Table::path),
            self.labels.as_ref().map(Table::path),
            self.margins.as_ref().map(Table::path),
        ];
        let of_columns = self.columns.iter().flat_map(Columns::paths);
        for path in tables.into_iter().flatten().chain(of_columns) {
            let (_, found) = sha256_file(path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.meta.expect_hash(&name, &found).map_err(|reason| wrong(&name, reason))?;
        }
        if let Some(columns) = &self.columns {
            columns.check()?;
        }
        let mut shard_starts = self.shards.iter().map(|shard| shard.start).peekable();
        let (mut start, mut bytes) = (self.start_of(0)?, 0);
        for i in 0..self.meta.documents {
            let end = self.start_of(i + 1)?;
            if (i == 0 && start != 0) || end <= start || end > self.meta.tokens {
                return Err(wrong(DOCUMENTS, format!("document {i} has the token range {start}..{end}")));
            }
            // Each file must begin at the start of a document.
            if shard_starts.next_if_eq(&start).is_none() && shard_starts.peek().is_some_and(|&shard| shard < start) {
                return Err(wrong(DOCUMENTS, format!("document {} spans two files of tokens", i - 1)));
            }
            bytes += u64::from(self.document_bytes(i as usize)?);
            start = end;
        }
        if start != self.meta.tokens || shard_starts.next().is_some() {
            return Err(wrong(
                DOCUMENTS,
                "the last document spans two files of tokens or ends before the last token".into(),
            ));
        }
        if bytes != self.meta.bytes {
            return Err(wrong(BYTES, format!("the sum is {bytes}, meta.json says {}", self.meta.bytes)));
        }
        let shards = self.shards.par_iter().zip(&self.meta.shards);
        shards.map(|(shard, &tokens)| self.check_shard(shard, tokens)).collect()
    }

    /// Reads a file of tokens once, to check its ids and its hash.
    fn check_shard(&self, shard: &Shard, tokens: u64) -> Result<()> {
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", shard.path.display()));
        let (size, vocab) = (self.meta.dtype.size(), self.meta.vocab_size);
        let (mut hasher, mut buffer, mut at) = (Sha256::new(), Vec::new(), 0);
        while at < tokens {
            interrupt::check("checking tokens")?;
            let count = (tokens - at).min((CHECK_BYTES / size) as u64);
            buffer.resize(count as usize * size, 0);
            shard
                .file
                .read_exact_at(&mut buffer, at * size as u64)
                .map_err(|e| wrong(format!("cannot be read: {e}")))?;
            hasher.update(&buffer);
            if let Some(bad) = decode(&buffer, size).position(|token| self.id(token) as usize >= vocab) {
                let token = shard.start + at + bad as u64;
                let document = self.document_at(token)?;
                let id = self.id(decode(&buffer[bad * size..], size).next().unwrap_or_default());
                let at = token - self.start_of(document)?;
                return Err(wrong(format!(
                    "document {document} has the id {id} at token {at}, the vocabulary has {vocab}"
                )));
            }
            at += count;
        }
        let name = shard.path.file_name().unwrap_or_default().to_string_lossy();
        self.meta.expect_hash(&name, &hex(&hasher.finalize())).map_err(wrong)
    }

    /// Returns the document that has token number `token`, counted over all documents.
    fn document_at(&self, token: u64) -> Result<u64> {
        let (mut low, mut high) = (0, self.meta.documents);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.start_of(middle)? <= token {
                true => low = middle,
                false => high = middle,
            }
        }
        Ok(low)
    }

    /// Whether one of the first `inputs` tokens of document `i` has a target after it.
    pub fn has_target(&self, i: usize, inputs: usize) -> Result<bool> {
        let first = match &self.first_targets {
            Some(table) => u32::from_le_bytes(table.get(i as u64)?) as usize,
            None => 0,
        };
        Ok(inputs > 0 && first <= inputs)
    }

    /// Returns the folder of the tokens.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the first target of document `i` after its first token; without targets, its length. Only for data with a loss mask. Has the errors of
    /// [`TokenDataset::document_len`].
    pub(super) fn first_target(&self, i: usize) -> Result<usize> {
        let first = self.first_targets.as_ref().map(|table| table.get(i as u64)).transpose()?;
        Ok(first.map_or(0, |first| u32::from_le_bytes(first) as usize).min(self.document_len(i)?))
    }

    /// Returns the number of records of preferences; for other data, the number of documents.
    pub fn records(&self) -> usize {
        self.len() / self.meta.kind.documents()
    }

    /// Returns the columns of document `i`: of a prompt all fields of its record, including `prompt`, in their order. Numbers that JSON does not have are in the form of
    /// [`parse_json`](crate::parse_json()).
    ///
    /// Errors with [`Error::Data`] if a file can no longer be read. Panics if the records have no columns, which the caller must ensure.
    pub fn columns(&self, i: usize) -> Result<Map<String, Value>> {
        self.columns.as_ref().expect("the records have columns").get(i as u64)
    }

    /// Returns the number of tokens of the longest text of example `i`; `None` if the records are not examples. Has the errors of
    /// [`TokenDataset::columns`].
    pub(super) fn longest_text(&self, i: usize) -> Result<Option<usize>> {
        if self.meta.kind != RecordKind::Examples {
            return Ok(None);
        }
        let columns = self.columns(i)?;
        let lengths = columns.get(LENGTHS).and_then(Value::as_array).into_iter().flatten();
        Ok(lengths.filter_map(Value::as_u64).max().map(|longest| longest as usize))
    }

    /// Returns the JSON of [`TokenDataset::columns`]; `None` if the records have no columns.
    pub(super) fn column_json(&self, i: usize) -> Result<Option<String>> {
        self.columns.as_ref().map(|columns| columns.json(i as u64)).transpose()
    }

    /// Whether document `i` of preferences is chosen or desirable. Has the errors of [`TokenDataset::document_len`].
    pub fn is_chosen(&self, i: usize) -> Result<bool> {
        Ok(self.label(i)?.unwrap_or(i.is_multiple_of(2)))
    }

    /// Returns the margin of a pair if document `i` is its chosen document, else 0: the difference by which the reward of the chosen document should
    /// be higher. Has the errors of [`TokenDataset::document_len`].
    pub fn margin(&self, i: usize) -> Result<f32> {
        let margin = self.margins.as_ref().map(|table| table.get(i as u64)).transpose()?;
        Ok(margin.map_or(0.0, f32::from_le_bytes))
    }

    /// Returns the content of `meta.json`.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns the number of documents, which is never 0.
    #[expect(clippy::len_without_is_empty, reason = "a dataset is never empty")]
    pub fn len(&self) -> usize {
        self.meta.documents as usize
    }

    /// Returns the number of tokens, including the tokens at the edges of documents.
    pub fn total_tokens(&self) -> u64 {
        self.meta.tokens
    }

    /// Returns the label of document `i`; `None` if documents have no labels. Has the errors of [`TokenDataset::document_len`].
    pub(super) fn label(&self, i: usize) -> Result<Option<bool>> {
        let label = self.labels.as_ref().map(|table| table.get(i as u64)).transpose()?;
        Ok(label.map(|[label]| label != 0))
    }

    /// Returns the number of bytes in UTF-8 of all texts.
    pub fn total_bytes(&self) -> u64 {
        self.meta.bytes
    }

    /// Returns the number of the first token of document `i`. For `i` equal to the number of documents, returns the number of tokens.
    fn start_of(&self, i: u64) -> Result<u64> {
        self.starts.get(i).map(u64::from_le_bytes)
    }

    /// Returns the number of tokens of document `i`, including the tokens at its edges; at least 1. Errors with [`Error::Data`] if the table can no
    /// longer be read.
    pub fn document_len(&self, i: usize) -> Result<usize> {
        let (start, end) = (self.start_of(i as u64)?, self.start_of(i as u64 + 1)?);
        match end.checked_sub(start) {
            Some(len) if len > 0 => Ok(len as usize),
            _ => Err(Error::Data(format!("{}: it was changed while it is in use", self.starts.path().display()))),
        }
    }

    /// Returns the number of text bytes of document `i`. Has the errors of [`TokenDataset::document_len`].
    pub fn document_bytes(&self, i: usize) -> Result<u32> {
        self.bytes.get(i as u64).map(u32::from_le_bytes)
    }

    /// Returns the ids of document `i`.
    pub fn document(&self, i: usize) -> Result<Vec<u32>> {
        self.ids(i, 0..self.document_len(i)?)
    }

    /// Returns the ids at `range` within document `i`. Errors with [`Error::Data`] if the file can no longer be read.
    pub fn ids(&self, i: usize, range: Range<usize>) -> Result<Vec<u32>> {
        Ok(self.tokens(i, range)?.into_iter().map(|token| self.id(token)).collect())
    }

    /// Returns the id of a stored token.
    pub(super) fn id(&self, token: u32) -> u32 {
        if self.meta.loss_mask { token & !MASKED } else { token }
    }

    /// Returns the id of a stored token if it is a target, else [`IGNORE_INDEX`].
    pub(super) fn target(&self, token: u32) -> i32 {
        if self.meta.loss_mask && token & MASKED != 0 { IGNORE_INDEX } else { token as i32 }
    }

    /// Returns the stored tokens at `range` within document `i`.
    pub(super) fn tokens(&self, i: usize, range: Range<usize>) -> Result<Vec<u32>> {
        assert!(range.end <= self.document_len(i)?, "a range within document {i}");
        let start = self.start_of(i as u64)?;
        let shard = &self.shards[self.shards.partition_point(|shard| shard.start <= start) - 1];
        let (first, size) = ((start - shard.start) as usize, self.meta.dtype.size());
        let mut bytes = vec![0; range.len() * size];
        shard
            .file
            .read_exact_at(&mut bytes, ((first + range.start) * size) as u64)
            .map_err(|e| Error::Data(format!("{}: document {i} cannot be read any more: {e}", shard.path.display())))?;
        let tokens: Vec<u32> = decode(&bytes, size).collect();
        // If the folder was checked before, opening does not read the files, so ids are checked here: an embedding has no row for an id beyond the
        // vocabulary.
        match tokens.iter().find(|&&token| self.id(token) as usize >= self.meta.vocab_size) {
            None => Ok(tokens),
            Some(&token) => Err(Error::Data(format!(
                "{}: document {i} has the id {}, the vocabulary has {}; delete the folder to prepare it again",
                shard.path.display(),
                self.id(token),
                self.meta.vocab_size
            ))),
        }
    }
}

impl Meta {
    fn expect_hash(&self, name: &str, found: &str) -> Result<(), String> {
        match self.sha256.get(name).is_some_and(|expected| expected == found) {
            true => Ok(()),
            false => Err("it is damaged: its SHA-256 is not that of meta.json".into()),
        }
    }
}

/// Decodes `bytes` to ids of `size` bytes each.
fn decode(bytes: &[u8], size: usize) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(size).map(|id| match *id {
        [a, b] => u32::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => unreachable!("a token has two or four bytes"),
    })
}

#[cfg(test)]
#[path = "shards_tests.rs"]
mod tests;
