//! Tokens on disk: a folder that [`prepare`](super::prepare()) wrote, checked once on opening and read as needed.
//!
//! | file | content, little endian |
//! |---|---|
//! | `tokens-00000.bin`, ... | the ids of all documents in order, u16 or u32; a document never spans two files |
//! | `documents.bin` | u64 for each document: its first token, counted over all files; then the number of tokens |
//! | `bytes.bin` | u32 for each document: bytes of its text in UTF-8, for bits per byte |
//! | `labels.bin` | u8 for each document, of completions with labels: 1 for a desirable one, else 0 |
//! | `meta.json` | [`Meta`] with a checksum of itself; written last |
//!
//! With a loss mask, ids are u32 and the highest bit of a token says that it is not a target.
//!
//! Tokens are read with positioned reads, so a file that is truncated meanwhile is an error and not SIGBUS. The two tables are
//! held in memory, 12 bytes per document.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ottava_tensor::ops::IGNORE_INDEX;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hash::{hex, sha256, unseal};
use crate::{Error, Result, input, interrupt};

/// The version of the folder's layout that this program writes and reads.
pub const FORMAT: u32 = 4;

/// Set in a stored token that the loss leaves out as a target, where [`Meta::loss_mask`] is.
pub const MASKED: u32 = 1 << 31;

/// The content of `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// [`FORMAT`] when it was written.
    pub format: u32,
    /// Hash of everything that the tokens depend on: sources, tokenizer and options.
    pub key: String,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens, with those at the edges of documents.
    pub tokens: u64,
    /// Tokens that contribute to the loss.
    pub target_tokens: u64,
    /// Whether some tokens are no targets.
    pub loss_mask: bool,
    /// The kind of preferences that documents have; `None` for documents of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceKind>,
    /// Bytes in UTF-8 of all texts that contribute to the loss, without the tokens that separate documents.
    pub bytes: u64,
    /// The storage type of a token.
    pub dtype: TokenType,
    /// Ids are below this.
    pub vocab_size: usize,
    /// The id that ends a text.
    pub eos_id: u32,
    /// SHA-256 of the `tokenizer.json` that made the ids.
    pub tokenizer_sha256: String,
    /// Tokens in each `tokens-*.bin`.
    pub shards: Vec<u64>,
    /// SHA-256 of each file of the folder but `meta.json`, by name.
    pub sha256: BTreeMap<String, String>,
    /// The files that the text came from.
    pub sources: Vec<SourceFile>,
}

/// The names of the tables.
pub(super) const DOCUMENTS: &str = "documents.bin";
pub(super) const BYTES: &str = "bytes.bin";
pub(super) const LABELS: &str = "labels.bin";

/// The largest `meta.json`: it has a line for each source.
const MAX_META_BYTES: u64 = 256 << 20;

/// Bytes of tokens that are checked at a time.
const CHECK_BYTES: usize = 1 << 20;

/// What is preferred among documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceKind {
    /// Documents `2i` and `2i + 1` are the chosen and the rejected completion of one prompt.
    Pairs,
    /// Each document has a label.
    Labels,
}

impl PreferenceKind {
    /// The documents of a record.
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
    /// The smallest type that holds every id below `vocab_size`.
    pub fn for_vocab(vocab_size: usize) -> TokenType {
        if vocab_size <= 1 << 16 { TokenType::U16 } else { TokenType::U32 }
    }

    /// Bytes of one token.
    pub fn size(self) -> usize {
        match self {
            TokenType::U16 => 2,
            TokenType::U32 => 4,
        }
    }
}

/// One file that text was read from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Its path as it was given.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// SHA-256 of its content.
    pub sha256: String,
    /// Number of its documents.
    pub documents: u64,
}

/// The name of the `index`th file of tokens.
pub fn shard_name(index: usize) -> String {
    format!("tokens-{index:05}.bin")
}

/// A folder of tokens, open for reading at random. Every document is known to be non-empty, every id in range, and every
/// file the one that was written.
pub struct TokenDataset {
    meta: Meta,
    shards: Vec<Shard>,
    /// The first token of each document, then the number of tokens.
    starts: Vec<u64>,
    /// Bytes of the text of each document.
    bytes: Vec<u32>,
    /// With a loss mask: the first target of each document behind its first token, counted in tokens; `u32::MAX` if there is none.
    first_targets: Vec<u32>,
    /// Of documents with labels: whether each is desirable.
    labels: Vec<bool>,
}

struct Shard {
    file: File,
    path: PathBuf,
    /// The first token of the file, counted over all files.
    start: u64,
}

impl TokenDataset {
    /// Opens and checks `folder`. Errors with [`Error::Data`] that names the file, and the document where one is wrong.
    pub fn open(folder: &Path) -> Result<TokenDataset> {
        let path = folder.join("meta.json");
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
        let text = input::read(&path, MAX_META_BYTES).map_err(Error::io(&path))?;
        // The version decides the meaning of the other fields, so it is checked first.
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        if value["format"] != FORMAT {
            let found = &value["format"];
            return Err(wrong(format!(
                "format {found}, this program reads {FORMAT}; delete the folder to prepare it again"
            )));
        }
        let meta: Meta = serde_json::from_value(unseal(&text).map_err(wrong)?).map_err(|e| wrong(e.to_string()))?;
        if meta.documents == 0 || meta.shards.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n)) != Some(meta.tokens)
        {
            return Err(wrong("its counts of documents and tokens do not agree".into()));
        }
        if meta.loss_mask && (meta.dtype != TokenType::U32 || meta.vocab_size > MASKED as usize) {
            return Err(wrong("its tokens have no room for a loss mask".into()));
        }
        let mut shards = Vec::with_capacity(meta.shards.len());
        let mut start = 0;
        for (index, &tokens) in meta.shards.iter().enumerate() {
            let path = folder.join(shard_name(index));
            let file = open_exactly(&path, tokens, meta.dtype.size())?;
            shards.push(Shard { file, path, start });
            start += tokens;
        }
        let starts = meta.table::<8>(folder, DOCUMENTS, meta.documents.saturating_add(1))?;
        let bytes = meta.table::<4>(folder, BYTES, meta.documents)?;
        let starts = starts.into_iter().map(u64::from_le_bytes).collect();
        let bytes = bytes.into_iter().map(u32::from_le_bytes).collect();
        let labels = match meta.preference {
            Some(PreferenceKind::Labels) => meta.table::<1>(folder, LABELS, meta.documents)?,
            Some(PreferenceKind::Pairs) if !meta.documents.is_multiple_of(2) => {
                return Err(wrong(format!("{} documents are no pairs", meta.documents)));
            }
            _ => Vec::new(),
        };
        let labels = labels.into_iter().map(|[label]| label != 0).collect();
        let mut dataset = TokenDataset { meta, shards, starts, bytes, first_targets: Vec::new(), labels };
        dataset.first_targets = dataset.check(folder)?;
        Ok(dataset)
    }

    /// Checks the invariants of the readers below: offsets rise from 0 to the number of tokens, documents stay within one
    /// file, ids are below the vocabulary, bytes add up, and files of tokens are those that were written. Returns the first targets.
    fn check(&self, folder: &Path) -> Result<Vec<u32>> {
        let wrong = |name: &str, reason: String| Error::Data(format!("{}: {reason}", folder.join(name).display()));
        let mut shard_starts = self.shards.iter().map(|shard| shard.start).peekable();
        for (i, range) in self.starts.windows(2).enumerate() {
            let (start, end) = (range[0], range[1]);
            if (i == 0 && start != 0) || end <= start || end > self.meta.tokens {
                return Err(wrong(DOCUMENTS, format!("document {i} has the token range {start}..{end}")));
            }
            // Every file has to begin where a document does.
            if shard_starts.next_if_eq(&start).is_none() && shard_starts.peek().is_some_and(|&shard| shard < start) {
                return Err(wrong(DOCUMENTS, format!("document {} spans two files of tokens", i - 1)));
            }
        }
        if self.starts.last() != Some(&self.meta.tokens) || shard_starts.next().is_some() {
            return Err(wrong(
                DOCUMENTS,
                "the last document spans two files of tokens or ends before the last token".into(),
            ));
        }
        let bytes: u64 = self.bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        if bytes != self.meta.bytes {
            return Err(wrong(BYTES, format!("the sum is {bytes}, meta.json says {}", self.meta.bytes)));
        }
        let shards = self.shards.par_iter().zip(&self.meta.shards);
        let first_targets = shards.map(|(shard, &tokens)| self.check_shard(shard, tokens));
        Ok(first_targets.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Reads a file of tokens once, for its ids, its hash and the first targets of its documents.
    fn check_shard(&self, shard: &Shard, tokens: u64) -> Result<Vec<u32>> {
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", shard.path.display()));
        let (size, vocab) = (self.meta.dtype.size(), self.meta.vocab_size);
        let (mut hasher, mut buffer, mut at) = (Sha256::new(), Vec::new(), 0);
        let mut first_targets = Vec::new();
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
                let document = self.starts.partition_point(|&start| start <= token) - 1;
                let id = self.id(decode(&buffer[bad * size..], size).next().unwrap_or_default());
                let at = token - self.starts[document];
                return Err(wrong(format!(
                    "document {document} has the id {id} at token {at}, the vocabulary has {vocab}"
                )));
            }
            if self.meta.loss_mask {
                self.find_first_targets(shard.start + at, decode(&buffer, size), &mut first_targets);
            }
            at += count;
        }
        let name = shard.path.file_name().unwrap_or_default().to_string_lossy();
        self.meta.expect_hash(&name, &hex(&hasher.finalize())).map_err(wrong)?;
        Ok(first_targets)
    }

    /// Adds documents that begin among `tokens`, of which the first is number `token` of all, and their first targets. The last one found so
    /// far goes on there.
    fn find_first_targets(&self, token: u64, tokens: impl Iterator<Item = u32>, found: &mut Vec<u32>) {
        let mut document = self.starts.partition_point(|&start| start < token);
        let mut begin = document.checked_sub(1).map_or(0, |before| self.starts[before]);
        for (id, token) in tokens.zip(token..) {
            if self.starts[document] == token {
                (document, begin) = (document + 1, token);
                found.push(u32::MAX);
            } else if let Some(first @ &mut u32::MAX) = found.last_mut()
                && id & MASKED == 0
            {
                *first = u32::try_from(token - begin).unwrap_or(u32::MAX);
            }
        }
    }

    /// Whether one of the first `inputs` tokens of document `i` has a target after it.
    pub fn has_target(&self, i: usize, inputs: usize) -> bool {
        inputs > 0 && (!self.meta.loss_mask || self.first_targets[i] as usize <= inputs)
    }

    /// The first target of document `i` of a dataset with a loss mask, behind its first token; its length if there is none.
    pub(super) fn first_target(&self, i: usize) -> usize {
        (self.first_targets[i] as usize).min(self.document_len(i))
    }

    /// The records of preferences, or all documents if there are none.
    pub fn records(&self) -> usize {
        self.len() / self.meta.preference.map_or(1, PreferenceKind::documents)
    }

    /// Whether document `i` of preferences is chosen, or desirable.
    pub fn is_chosen(&self, i: usize) -> bool {
        self.labels.get(i).copied().unwrap_or(i.is_multiple_of(2))
    }

    /// The content of `meta.json`.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Number of documents; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a dataset is never empty")]
    pub fn len(&self) -> usize {
        self.meta.documents as usize
    }

    /// Number of tokens, with those at the edges of documents.
    pub fn total_tokens(&self) -> u64 {
        self.meta.tokens
    }

    /// Bytes of all texts in UTF-8.
    pub fn total_bytes(&self) -> u64 {
        self.meta.bytes
    }

    /// Tokens of document `i` with those at its edges; at least 1.
    pub fn document_len(&self, i: usize) -> usize {
        (self.starts[i + 1] - self.starts[i]) as usize
    }

    /// Bytes of the text of document `i`.
    pub fn document_bytes(&self, i: usize) -> u32 {
        self.bytes[i]
    }

    /// The tokens of document `i`.
    pub fn document(&self, i: usize) -> Result<Vec<u32>> {
        self.ids(i, 0..self.document_len(i))
    }

    /// The ids at `range` within document `i`. Errors with [`Error::Data`] when the file can no longer be read.
    pub fn ids(&self, i: usize, range: Range<usize>) -> Result<Vec<u32>> {
        Ok(self.tokens(i, range)?.into_iter().map(|token| self.id(token)).collect())
    }

    /// The id of a stored token.
    pub(super) fn id(&self, token: u32) -> u32 {
        if self.meta.loss_mask { token & !MASKED } else { token }
    }

    /// The id of a stored token as a target, or [`IGNORE_INDEX`].
    pub(super) fn target(&self, token: u32) -> i32 {
        if self.meta.loss_mask && token & MASKED != 0 { IGNORE_INDEX } else { token as i32 }
    }

    /// The stored tokens at `range` within document `i`.
    pub(super) fn tokens(&self, i: usize, range: Range<usize>) -> Result<Vec<u32>> {
        assert!(range.end <= self.document_len(i), "a range within document {i}");
        let start = self.starts[i];
        let shard = &self.shards[self.shards.partition_point(|shard| shard.start <= start) - 1];
        let (first, size) = ((start - shard.start) as usize, self.meta.dtype.size());
        let mut bytes = vec![0; range.len() * size];
        shard
            .file
            .read_exact_at(&mut bytes, ((first + range.start) * size) as u64)
            .map_err(|e| Error::Data(format!("{}: document {i} cannot be read any more: {e}", shard.path.display())))?;
        Ok(decode(&bytes, size).collect())
    }
}

impl Meta {
    /// The `items` of `N` bytes of a table, checked against its hash.
    fn table<const N: usize>(&self, folder: &Path, name: &str, items: u64) -> Result<Vec<[u8; N]>> {
        let path = folder.join(name);
        open_exactly(&path, items, N)?;
        let bytes = input::read(&path, items.saturating_mul(N as u64)).map_err(Error::io(&path))?;
        self.expect_hash(name, &sha256(&bytes)).map_err(|e| Error::Data(format!("{}: {e}", path.display())))?;
        Ok(bytes.chunks_exact(N).map(|item| item.try_into().expect("a chunk of N bytes")).collect())
    }

    fn expect_hash(&self, name: &str, found: &str) -> Result<(), String> {
        match self.sha256.get(name).is_some_and(|expected| expected == found) {
            true => Ok(()),
            false => Err("it is damaged: its SHA-256 is not that of meta.json".into()),
        }
    }
}

/// The ids that `bytes` hold, of `size` bytes each.
fn decode(bytes: &[u8], size: usize) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(size).map(|id| match *id {
        [a, b] => u32::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => unreachable!("a token has two or four bytes"),
    })
}

/// Opens a file that holds `items` of `size` bytes.
fn open_exactly(path: &Path, items: u64, size: usize) -> Result<File> {
    let (file, found) = input::open(path).map_err(Error::io(path))?;
    let expected = items.saturating_mul(size as u64);
    if found != expected {
        return Err(Error::Data(format!(
            "{}: {found} bytes, meta.json promises {expected}; delete the folder to prepare it again",
            path.display()
        )));
    }
    Ok(file)
}

#[cfg(test)]
#[path = "shards_tests.rs"]
mod tests;
