//! Tokens on disk: a folder that [`prepare`](super::prepare()) wrote, mapped into memory and checked once on opening.
//!
//! | file | content, little endian |
//! |---|---|
//! | `tokens-00000.bin`, ... | the ids of all documents in order, u16 or u32; a document never spans two files |
//! | `documents.bin` | u64 for each document: its first token, counted over all files; then the number of tokens |
//! | `bytes.bin` | u32 for each document: bytes of its text in UTF-8, for bits per byte |
//! | `meta.json` | [`Meta`]; written last |

use std::ops::Range;
use std::path::Path;

use ottava_tensor::mapped::MappedFile;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The version of the folder's layout that this program writes and reads.
pub const FORMAT: u32 = 1;

/// What `meta.json` says about a folder of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// [`FORMAT`] when it was written.
    pub format: u32,
    /// Hash of everything that the tokens depend on: sources, tokenizer and options.
    pub key: String,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens, one end-of-sequence token for each document included.
    pub tokens: u64,
    /// Bytes of all texts in UTF-8, without what separates documents.
    pub bytes: u64,
    /// How a token is stored.
    pub dtype: TokenType,
    /// Ids are below this.
    pub vocab_size: usize,
    /// The id that ends each document.
    pub eos_id: u32,
    /// SHA-256 of the `tokenizer.json` that made the ids.
    pub tokenizer_sha256: String,
    /// Tokens in each `tokens-*.bin`.
    pub shards: Vec<u64>,
    /// The files that the text came from.
    pub sources: Vec<SourceFile>,
}

/// How a token is stored.
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
}

/// The name of the `index`th file of tokens.
pub fn shard_name(index: usize) -> String {
    format!("tokens-{index:05}.bin")
}

/// A folder of tokens, open for reading at random. Every document is known to be non-empty and every id in range.
pub struct TokenDataset {
    meta: Meta,
    shards: Vec<Shard>,
    starts: MappedFile,
    bytes: MappedFile,
}

struct Shard {
    file: MappedFile,
    /// The first token of the file, counted over all files.
    start: u64,
}

impl TokenDataset {
    /// Opens and checks `folder`. Errors with [`Error::Data`] that names the file, and the document where one is wrong.
    pub fn open(folder: &Path) -> Result<TokenDataset> {
        let path = folder.join("meta.json");
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
        let text = std::fs::read(&path).map_err(Error::io(&path))?;
        // The version decides what the other fields mean, so it is read by itself first.
        let value: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        if value["format"] != FORMAT {
            let found = &value["format"];
            return Err(wrong(format!(
                "format {found}, this program reads {FORMAT}; delete the folder to prepare it again"
            )));
        }
        let meta: Meta = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        if meta.documents == 0 || meta.shards.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n)) != Some(meta.tokens)
        {
            return Err(wrong("its counts of documents and tokens do not agree".into()));
        }
        let map = |name: &str, items: u64, size: usize| map_exactly(&folder.join(name), items, size);
        let mut shards = Vec::with_capacity(meta.shards.len());
        let mut start = 0;
        for (index, &tokens) in meta.shards.iter().enumerate() {
            shards.push(Shard { file: map(&shard_name(index), tokens, meta.dtype.size())?, start });
            start += tokens;
        }
        let starts = map("documents.bin", meta.documents.saturating_add(1), 8)?;
        let bytes = map("bytes.bin", meta.documents, 4)?;
        let dataset = TokenDataset { meta, shards, starts, bytes };
        dataset.check(folder)?;
        Ok(dataset)
    }

    /// Checks what the readers below rely on: offsets rise from 0 to the number of tokens, documents stay within one
    /// file, ids are below the vocabulary, bytes add up.
    fn check(&self, folder: &Path) -> Result<()> {
        let wrong = |name: &str, reason: String| Error::Data(format!("{}: {reason}", folder.join(name).display()));
        let mut shard_starts = self.shards.iter().map(|shard| shard.start).peekable();
        for i in 0..self.len() {
            let (start, end) = (self.start(i), self.start(i + 1));
            if (i == 0 && start != 0) || end <= start || end > self.meta.tokens {
                return Err(wrong("documents.bin", format!("document {i} has the token range {start}..{end}")));
            }
            // Every file has to begin where a document does.
            if shard_starts.next_if_eq(&start).is_none() && shard_starts.peek().is_some_and(|&shard| shard < start) {
                return Err(wrong("documents.bin", format!("document {} spans two files of tokens", i - 1)));
            }
        }
        if self.start(self.len()) != self.meta.tokens || shard_starts.next().is_some() {
            return Err(wrong(
                "documents.bin",
                "the last document spans two files of tokens or ends before the last token".into(),
            ));
        }
        let bytes: u64 = (0..self.len()).map(|i| u64::from(self.document_bytes(i))).sum();
        if bytes != self.meta.bytes {
            return Err(wrong("bytes.bin", format!("the sum is {bytes}, meta.json says {}", self.meta.bytes)));
        }
        let bad = (0..self.len()).into_par_iter().with_min_len(1024).find_map_first(|i| {
            let bad = self.ids(i, 0..self.document_len(i)).position(|id| id as usize >= self.meta.vocab_size)?;
            Some((i, bad, self.ids(i, bad..bad + 1).next()?))
        });
        if let Some((i, at, id)) = bad {
            let name = shard_name(self.shard_of(self.start(i)));
            let vocab = self.meta.vocab_size;
            return Err(wrong(
                &name,
                format!("document {i} has the id {id} at token {at}, the vocabulary has {vocab}"),
            ));
        }
        Ok(())
    }

    /// What `meta.json` says.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Number of documents; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a dataset is never empty")]
    pub fn len(&self) -> usize {
        self.meta.documents as usize
    }

    /// Number of tokens, end-of-sequence tokens included.
    pub fn total_tokens(&self) -> u64 {
        self.meta.tokens
    }

    /// Bytes of all texts in UTF-8.
    pub fn total_bytes(&self) -> u64 {
        self.meta.bytes
    }

    /// Tokens of document `i` with its end-of-sequence token; at least 1.
    pub fn document_len(&self, i: usize) -> usize {
        (self.start(i + 1) - self.start(i)) as usize
    }

    /// Bytes of the text of document `i`.
    pub fn document_bytes(&self, i: usize) -> u32 {
        u32::from_le_bytes(array(self.bytes.bytes(), i))
    }

    /// The tokens of document `i`; the last one is the end-of-sequence token.
    pub fn document(&self, i: usize) -> Vec<u32> {
        self.ids(i, 0..self.document_len(i)).collect()
    }

    /// The ids at `range` within document `i`.
    pub fn ids(&self, i: usize, range: Range<usize>) -> impl Iterator<Item = u32> {
        assert!(range.end <= self.document_len(i), "a range within document {i}");
        let start = self.start(i);
        let shard = &self.shards[self.shard_of(start)];
        let (first, size) = ((start - shard.start) as usize, self.meta.dtype.size());
        let bytes = &shard.file.bytes()[(first + range.start) * size..(first + range.end) * size];
        bytes.chunks_exact(size).map(|id| match *id {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("a token has two or four bytes"),
        })
    }

    fn start(&self, i: usize) -> u64 {
        u64::from_le_bytes(array(self.starts.bytes(), i))
    }

    fn shard_of(&self, token: u64) -> usize {
        self.shards.partition_point(|shard| shard.start <= token) - 1
    }
}

/// The `i`th group of `N` bytes.
fn array<const N: usize>(bytes: &[u8], i: usize) -> [u8; N] {
    bytes[i * N..(i + 1) * N].try_into().expect("a slice of N bytes")
}

fn map_exactly(path: &Path, items: u64, size: usize) -> Result<MappedFile> {
    let file = MappedFile::open(path).map_err(Error::io(path))?;
    let (found, expected) = (file.bytes().len() as u64, items.saturating_mul(size as u64));
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
