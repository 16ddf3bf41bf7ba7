//! Converts text to token ids and back with a Hugging Face `tokenizer.json`.
//!
//! Maliciously crafted tokenizer files make the tokenizers crate panic. Every call of the crate catches panics and returns them as errors.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::byte_form::ByteForm;
use crate::edges::Edges;
use crate::guard::catch_panics;
use crate::pieces::{can_be_cut, first_bytes, pieces, words};
use crate::words::{Token, tokens_of};
use crate::{added_tokens, tiktoken, tokenizer_parts};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, input};

/// The maximum size of a tokenizer file in bytes. The largest file in common use is about 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The number of text bytes that are tokenized at once, if a text can be divided.
const PIECE_BYTES: usize = 128 << 10;

/// The bytes of memory to tokenize one byte of text. The tokenizers crate takes 124 to 235 bytes, depending on text and tokenizer.
const BYTES_PER_BYTE: u64 = 250;

/// The bytes of memory for the ids of one byte of text, including the ids of a piece and spare capacity.
const IDS_PER_BYTE: u64 = 16;

/// The number of tokenizers that were loaded so far.
static LOADED: AtomicU64 = AtomicU64::new(0);

/// A tokenizer and the ids that end a text.
#[derive(Debug)]
pub struct Tokenizer {
    /// The number of this tokenizer, from 1.
    number: u64,
    inner: tokenizers::Tokenizer,
    /// The encoding of bytes in tokens.
    byte_form: ByteForm,
    path: PathBuf,
    vocab_size: usize,
    longest: usize,
    edges: Edges,
    sha256: String,
    /// The ids of special tokens.
    special: HashSet<u32>,
    /// Whether long texts are divided into pieces.
    cuts: bool,
    /// The possible first bytes of tokens that are found in a text before words are split.
    first_bytes: [bool; 256],
}

/// Adds to the `error` of a tokenizer that is not there what to do.
fn absent(path: &Path, error: Error) -> Error {
    if path.exists() {
        return error;
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let remedy = match folder.join("tokenizer.model").is_file() {
        true => {
            "the folder has only the tokenizer.model of SentencePiece: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers writes a tokenizer.json"
        }
        false => "copy the tokenizer.json of the model to this folder, or name another one in `model.tokenizer`",
    };
    Error::Model(format!("{error}; {remedy}"))
}

impl Tokenizer {
    /// Loads a `tokenizer.json`. `path` is the file or its folder. If there is no such file, a `tiktoken.model` beside it is converted.
    ///
    /// The files beside it add tokens, and determine the tokens that begin and end a document (docs/data.md). Truncation and padding in the file are
    /// ignored, because they would truncate documents silently. Errors with [`Error::Model`].
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let bytes =
            tiktoken::read(&path)?.map_or_else(|| read_capped(&path), Ok).map_err(|error| absent(&path, error))?;
        tokenizer_parts::check(&bytes).map_err(|reason| wrong(format!("not a usable tokenizer: {reason}")))?;
        let mut inner = catch_panics(|| tokenizers::Tokenizer::from_bytes(&bytes))
            .map_err(|reason| wrong(format!("not a usable tokenizer: {reason}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let added = added_tokens::add(folder, &mut inner)?;
        // Ids may have gaps, so the table must reach the highest id, which may exceed the number of entries.
        let vocabulary = inner.get_vocab(true);
        let highest = vocabulary.values().copied().max();
        let longest = vocabulary.keys().map(String::len).max().unwrap_or(1);
        let vocab_size = highest.ok_or_else(|| wrong("the vocabulary is empty".into()))? as usize + 1;
        let (cuts, first_bytes) = (can_be_cut(&inner), first_bytes(&inner));
        let sha256 = match added.is_empty() {
            true => sha256(&bytes),
            false => sha256(format!("{} {}", sha256(&bytes), serde_json::json!(added)).as_bytes()),
        };
        let edges = Edges::read(folder, &inner)?;
        let added = inner.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        let number = LOADED.fetch_add(1, Ordering::Relaxed) + 1;
        let byte_form = ByteForm::of(inner.get_decoder());
        Ok(Tokenizer { number, inner, byte_form, vocab_size, longest, edges, sha256, special, cuts, first_bytes, path })
    }

    /// Returns the ids of a document with the tokens at its edges. A token that the text already has at an edge is not added again.
    ///
    /// The calling thread remembers the ids of words. For a long text, threads of the pool do so too.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.with_start(self.encode_words(text)?);
        ids.extend(self.edges.end.filter(|end| ids.last() != Some(end)));
        Ok(ids)
    }

    /// Returns the ids of the beginning of a document, for a model to complete. If the text is empty and no token begins a document, returns the
    /// token that ends a document, because in training a document follows this token.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_prompt_after(text)?.0)
    }

    /// Returns the ids of [`Tokenizer::encode_prompt`], and the number of ids before the ids of the text.
    pub fn encode_prompt_after(&self, text: &str) -> Result<(Vec<u32>, usize)> {
        let own = self.encode(text)?;
        let count = own.len();
        let mut ids = self.with_start(own);
        ids.extend(self.edges.end.filter(|_| ids.is_empty()));
        let added = ids.len() - count;
        Ok((ids, added))
    }

    /// Returns the ids that transformers makes of a text, or of a pair of texts, with the special tokens of the tokenizer.
    pub fn encode_example(&self, text: &str, pair: Option<&str>) -> Result<Vec<u32>> {
        let Edges { start, between, after, .. } = &self.edges;
        let mut ids = [start.clone(), self.encode(text)?].concat();
        if let Some(pair) = pair {
            ids.extend(between);
            ids.extend(self.encode(pair)?);
        }
        ids.extend(after);
        Ok(ids)
    }

    /// Returns the ids after a text of [`Tokenizer::encode_example`].
    pub fn after_ids(&self) -> &[u32] {
        &self.edges.after
    }

    fn with_start(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if !ids.starts_with(&self.edges.start) {
            ids.splice(0..0, self.edges.start.iter().copied());
        }
        ids
    }

    /// Returns the ids of `text`. No tokens are added; special tokens that are written out in the text are recognized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in self.pieces(text, PIECE_BYTES) {
            ids.extend(self.encode_whole(piece)?.into_iter().map(|token| token.0));
        }
        Ok(ids)
    }

    /// Returns the ids of [`Tokenizer::encode`], and remembers the ids of words, for many texts. Pieces of a long text are encoded on all cores.
    pub(super) fn encode_words(&self, text: &str) -> Result<Vec<u32>> {
        let encode = |piece: &str| {
            let mut ids = Vec::with_capacity(piece.len() / 4);
            for word in self.pieces(piece, 1).flat_map(|piece| self.words(piece)) {
                let take = |tokens: &[Token]| ids.extend(tokens.iter().map(|token| token.0));
                tokens_of(self.number, word, |word| self.encode_whole(word), take)?;
            }
            Ok(ids)
        };
        let pieces: Vec<&str> = self.pieces(text, PIECE_BYTES).collect();
        match pieces.len() {
            0 | 1 => encode(text),
            _ => Ok(pieces.par_iter().map(|piece| encode(piece)).collect::<Result<Vec<_>>>()?.concat()),
        }
    }

    /// Returns the ids of `text`. Each id has a flag that says whether its bytes overlap the ranges `learned`.
    pub(super) fn encode_learned(&self, text: &str, learned: &[Range<usize>]) -> Result<Vec<(u32, bool)>> {
        let (mut tokens, mut start, mut end) = (Vec::new(), 0, 0);
        for word in self.pieces(text, 1).flat_map(|piece| self.words(piece)) {
            let mut take = |(id, first, last): &Token| {
                // A token begins at the end of the previous token, because offsets may exclude white space.
                let begin = end.min(start + *first as usize);
                end = start + *last as usize;
                tokens.push((*id, learned.iter().any(|range| begin < range.end && end > range.start)));
            };
            let encode = |word: &str| self.encode_whole(word);
            tokens_of(self.number, word, encode, |tokens| tokens.iter().for_each(&mut take))?;
            start += word.len();
        }
        Ok(tokens)
    }

    /// Returns the tokens of a text that the tokenizers crate computes.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<Token>> {
        let encoding = catch_panics(|| self.inner.encode(text, false))
            .map_err(|reason| Error::Data(format!("{}: cannot encode a text: {reason}", self.path.display())))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(first, last))| (id, first as u32, last as u32)).collect())
    }

    /// Divides `text` into pieces of at least `bytes` bytes whose ids, joined, are the ids of the whole. If this is not certain, returns one piece.
    pub(super) fn pieces<'a>(&self, text: &'a str, bytes: usize) -> impl Iterator<Item = &'a str> {
        pieces(text, if self.cuts { bytes } else { usize::MAX })
    }

    /// Divides a piece of [`Tokenizer::pieces`] into words whose ids, joined, are the ids of the piece. If this is not certain, returns one word.
    pub(super) fn words<'a>(&self, piece: &'a str) -> impl Iterator<Item = &'a str> {
        const NEVER: [bool; 256] = [true; 256];
        words(piece, if self.cuts { &self.first_bytes } else { &NEVER })
    }

    /// Returns the maximum bytes of memory that [`Tokenizer::encode_document`] takes for `text`.
    pub fn memory_to_encode(&self, text: &str) -> u64 {
        let sizes = self.pieces(text, PIECE_BYTES).map(str::len);
        let (count, longest) = sizes.fold((0, 0), |(count, longest), size| (count + 1, size.max(longest)));
        let at_once = longest * rayon::current_num_threads().min(count);
        at_once as u64 * BYTES_PER_BYTE + text.len() as u64 * IDS_PER_BYTE
    }

    /// Returns the bytes of memory to encode a text of `bytes` bytes in one piece.
    pub(super) fn memory_to_encode_whole(bytes: usize) -> u64 {
        bytes as u64 * (BYTES_PER_BYTE + IDS_PER_BYTE)
    }

    /// Returns the text of `ids`, with special tokens written out. Ids without an entry (in a padded vocabulary) have no text.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        catch_panics(|| self.inner.decode(ids, false)).map_err(|reason| {
            Error::Data(format!("{}: cannot decode {} ids: {reason}", self.path.display(), ids.len()))
        })
    }

    /// Returns the bytes of a token, or `None` if they depend on its neighbours. The bytes are independent if the tokenizer is byte-level, or if the
    /// token is a single byte. Returns empty bytes for an id without an entry.
    pub(super) fn bytes_anywhere(&self, id: u32) -> Result<Option<Vec<u8>>> {
        let failed = |reason| Error::Data(format!("{}: cannot decode token {id}: {reason}", self.path.display()));
        let token = catch_panics(|| Ok::<_, String>(self.inner.id_to_token(id))).map_err(failed)?;
        Ok(token.map_or(Some(Vec::new()), |token| self.byte_form.bytes(&token)))
    }

    /// Returns the bytes of each token, by id, for tokenizers whose decoder is `ByteLevel` or has `ByteFallback`. Special tokens begin with the byte
    /// 0xff, which no text has. Ids without an entry have no bytes.
    ///
    /// Errors with [`Error::Model`] for other tokenizers.
    pub fn token_bytes(&self) -> Result<Vec<Vec<u8>>> {
        let wrong = |reason: String| Error::Model(format!("{}: the bytes of tokens: {reason}", self.path.display()));
        let text = self.inner.to_string(false).map_err(|error| wrong(error.to_string()))?;
        let file = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        catch_panics(|| llguidance::token_bytes_from_tokenizer_json(&file)).map_err(wrong)
    }

    /// Returns the highest id plus 1, which is the smallest number of rows of an embedding for this tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the bytes of the longest entry of the vocabulary. `n` tokens cover at most `n` times as many bytes of a text, unless the tokenizer
    /// removes or joins parts of the text.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// Returns the ids that begin a document, which are usually one id or none.
    pub fn start_ids(&self) -> &[u32] {
        &self.edges.start
    }

    /// Returns the id that ends a document, if the tokenizer has one. This is the end of a text, not the end of a turn of a chat.
    pub fn eos_id(&self) -> Option<u32> {
        self.edges.end
    }

    /// Returns all ids that end a generated text. The first id is [`Tokenizer::eos_id`].
    pub fn eos_ids(&self) -> &[u32] {
        &self.edges.stops
    }

    /// Also ends generated texts at the tokens at which `other` ends them, such as the tokenizer of a base model. Ids that are other tokens here are left
    /// out.
    pub fn with_ends_of(mut self, other: &Tokenizer) -> Tokenizer {
        for &id in other.eos_ids() {
            let is_same = self.inner.id_to_token(id) == other.inner.id_to_token(id);
            if is_same && !self.edges.stops.contains(&id) {
                self.edges.stops.push(id);
            }
        }
        self
    }

    /// Returns the token that pads the rows of a reward model: `pad_token` of `tokenizer_config.json`, else the end of a document, as in TRL.
    pub fn padding_id(&self) -> Option<u32> {
        self.edges.padding.or(self.edges.end)
    }

    /// Returns the token that precedes a text without a prompt when a task computes the likelihood of the text: `bos_token` of `tokenizer_config.json`, else the
    /// first token of a document, else `eos_token`, as in lm-evaluation-harness.
    pub fn prefix_id(&self) -> Option<u32> {
        self.edges.prefix
    }

    /// Returns a sentence that names the tokens that begin and end a document, and the tokens that end a generated text.
    pub fn describe_edges(&self) -> String {
        let name = |&id: &u32| format!("{} ({id})", self.inner.id_to_token(id).unwrap_or_default());
        let names = |ids: &[u32]| ids.iter().map(name).collect::<Vec<_>>().join(", ");
        let start = match self.edges.start.as_slice() {
            [] => "no token of their own".to_string(),
            ids => names(ids),
        };
        let end = self.edges.end.as_ref().map_or("no token, since none is known".to_string(), name);
        format!("documents begin with {start} and end with {end}; generation stops at {}", names(&self.edges.stops))
    }

    /// Errors if an id is not below a model's `vocabulary`.
    pub fn check_fits(&self, vocabulary: usize) -> Result<()> {
        if self.vocab_size() <= vocabulary {
            return Ok(());
        }
        Err(Error::Model(format!(
            "the tokenizer has {} entries, `vocab_size` is {vocabulary}: tokenizer and model do not belong together",
            self.vocab_size()
        )))
    }

    /// Returns the id of the token with this exact name.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// Whether a token is not text, such as an end of text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether both tokenizers have the same tokens with the same ids.
    pub fn has_tokens_of(&self, other: &Tokenizer) -> bool {
        self.inner.get_vocab(true) == other.inner.get_vocab(true)
    }

    /// Returns SHA-256 of `tokenizer.json` and of the tokens that other files add, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Returns the tokenizer of the tokenizers crate, with the tokens that other files add.
    pub(super) fn into_inner(self) -> tokenizers::Tokenizer {
        self.inner
    }

    /// Returns the path of the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn read_capped(path: &Path) -> Result<Vec<u8>> {
    input::read(path, MAX_FILE_BYTES).map_err(|e| {
        let others = ["vocab.json", "tokenizer.model"].map(|name| path.with_file_name(name));
        let remedy = others.iter().find(|other| other.exists() && !path.exists()).map(|other| {
            format!(
                "; {} alone is not read: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes tokenizer.json",
                other.file_name().unwrap_or_default().display()
            )
        });
        Error::Model(format!("{}: {e}{}", path.display(), remedy.unwrap_or_default()))
    })
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
