//! Text to token ids and back, as a Hugging Face `tokenizer.json` describes it.
//!
//! Crafted tokenizer files make the tokenizers crate panic; every call into it catches panics and returns them as errors.

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
use crate::{added_tokens, tokenizer_parts};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, input};

/// Larger tokenizer files are refused; the largest in common use is about 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Bytes of text that are tokenized at once, where a text can be cut.
const PIECE_BYTES: usize = 128 << 10;

/// Bytes of memory to tokenize a byte of text at once. The tokenizers crate takes 124 to 235, depending on text and tokenizer.
const BYTES_PER_BYTE: u64 = 250;

/// Bytes of memory for the ids of a byte of text, with the ids of a piece and room to grow.
const IDS_PER_BYTE: u64 = 16;

/// The number of tokenizers that were loaded.
static LOADED: AtomicU64 = AtomicU64::new(0);

/// A tokenizer and the ids that end a text.
#[derive(Debug)]
pub struct Tokenizer {
    /// Its number, from 1.
    number: u64,
    inner: tokenizers::Tokenizer,
    /// How tokens stand for bytes.
    byte_form: ByteForm,
    path: PathBuf,
    vocab_size: usize,
    longest: usize,
    edges: Edges,
    sha256: String,
    /// Ids of special tokens.
    special: HashSet<u32>,
    /// Whether texts are cut.
    cuts: bool,
    /// First bytes of tokens that may be written out in a text.
    first_bytes: [bool; 256],
}

impl Tokenizer {
    /// Reads `path`: a `tokenizer.json`, or a folder that holds one.
    ///
    /// The files beside it add tokens, and decide which tokens begin and end a document (docs/data.md).
    /// Truncation and padding that the file may ask for are switched off: they would cut documents silently.
    /// Errors with [`Error::Model`].
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let bytes = read_capped(&path)?;
        tokenizer_parts::check(&bytes).map_err(|reason| wrong(format!("not a usable tokenizer: {reason}")))?;
        let mut inner = catch_panics(|| tokenizers::Tokenizer::from_bytes(&bytes))
            .map_err(|reason| wrong(format!("not a usable tokenizer: {reason}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let added = added_tokens::add(folder, &mut inner)?;
        // Ids may have gaps, so the table has to reach the highest id and not just the number of entries.
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

    /// The ids of a document with the tokens at its edges. None of them is added where the text has it already.
    ///
    /// The thread, and threads of the pool for a long text, remember the ids of words.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.with_start(self.encode_words(text)?);
        ids.extend(self.edges.end.filter(|end| ids.last() != Some(end)));
        Ok(ids)
    }

    /// The ids of the beginning of a document, for a model to complete. An empty one has the token that ends a document if nothing begins
    /// one, since a document follows that in training.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_prompt_after(text)?.0)
    }

    /// [`Tokenizer::encode_prompt`], and how many ids come before the ids of the text.
    pub fn encode_prompt_after(&self, text: &str) -> Result<(Vec<u32>, usize)> {
        let own = self.encode(text)?;
        let count = own.len();
        let mut ids = self.with_start(own);
        ids.extend(self.edges.end.filter(|_| ids.is_empty()));
        let added = ids.len() - count;
        Ok((ids, added))
    }

    fn with_start(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if !ids.starts_with(&self.edges.start) {
            ids.splice(0..0, self.edges.start.iter().copied());
        }
        ids
    }

    /// The ids of `text`. Nothing is added around it; special tokens written out in the text are recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in self.pieces(text, PIECE_BYTES) {
            ids.extend(self.encode_whole(piece)?.into_iter().map(|token| token.0));
        }
        Ok(ids)
    }

    /// [`Tokenizer::encode`] by words that are remembered, for many texts. Pieces of a long text are encoded on all cores.
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

    /// The ids of `text`, each with whether it has a byte of the ranges `learned`.
    pub(super) fn encode_learned(&self, text: &str, learned: &[Range<usize>]) -> Result<Vec<(u32, bool)>> {
        let (mut tokens, mut start, mut end) = (Vec::new(), 0, 0);
        for word in self.pieces(text, 1).flat_map(|piece| self.words(piece)) {
            let mut take = |(id, first, last): &Token| {
                // A token begins where the one before it ends: offsets may leave out white space.
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

    /// The tokens of a text, by the tokenizers crate.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<Token>> {
        let encoding = catch_panics(|| self.inner.encode(text, false))
            .map_err(|reason| Error::Data(format!("{}: cannot encode a text: {reason}", self.path.display())))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(first, last))| (id, first as u32, last as u32)).collect())
    }

    /// `text` in pieces of at least `bytes` that have the ids of the whole; one piece, where that is not certain.
    pub(super) fn pieces<'a>(&self, text: &'a str, bytes: usize) -> impl Iterator<Item = &'a str> {
        pieces(text, if self.cuts { bytes } else { usize::MAX })
    }

    /// A piece of [`Tokenizer::pieces`] in words that have its ids; one word, where that is not certain.
    pub(super) fn words<'a>(&self, piece: &'a str) -> impl Iterator<Item = &'a str> {
        const NEVER: [bool; 256] = [true; 256];
        words(piece, if self.cuts { &self.first_bytes } else { &NEVER })
    }

    /// Bytes of memory that [`Tokenizer::encode_document`] takes for `text` at most.
    pub fn memory_to_encode(&self, text: &str) -> u64 {
        let sizes = self.pieces(text, PIECE_BYTES).map(str::len);
        let (count, longest) = sizes.fold((0, 0), |(count, longest), size| (count + 1, size.max(longest)));
        let at_once = longest * rayon::current_num_threads().min(count);
        at_once as u64 * BYTES_PER_BYTE + text.len() as u64 * IDS_PER_BYTE
    }

    /// Bytes of memory to encode a text of `bytes` in one piece.
    pub(super) fn memory_to_encode_whole(bytes: usize) -> u64 {
        bytes as u64 * (BYTES_PER_BYTE + IDS_PER_BYTE)
    }

    /// The text of `ids`, special tokens written out. Ids without an entry (a padded vocabulary) give nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        catch_panics(|| self.inner.decode(ids, false)).map_err(|reason| {
            Error::Data(format!("{}: cannot decode {} ids: {reason}", self.path.display(), ids.len()))
        })
    }

    /// The bytes of a token where they do not depend on its neighbours: of a tokenizer of bytes, and single bytes of others. None for an id
    /// without an entry.
    pub(super) fn bytes_anywhere(&self, id: u32) -> Result<Option<Vec<u8>>> {
        let failed = |reason| Error::Data(format!("{}: cannot decode token {id}: {reason}", self.path.display()));
        let token = catch_panics(|| Ok::<_, String>(self.inner.id_to_token(id))).map_err(failed)?;
        Ok(token.map_or(Some(Vec::new()), |token| self.byte_form.bytes(&token)))
    }

    /// The bytes of each token, by id, for tokenizers whose decoder is `ByteLevel` or has `ByteFallback`. Special tokens begin with a byte
    /// 0xff, which no text has; ids without an entry have none.
    ///
    /// Errors with [`Error::Model`] for others.
    pub fn token_bytes(&self) -> Result<Vec<Vec<u8>>> {
        let wrong = |reason: String| Error::Model(format!("{}: the bytes of tokens: {reason}", self.path.display()));
        let text = self.inner.to_string(false).map_err(|error| wrong(error.to_string()))?;
        let file = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        catch_panics(|| llguidance::token_bytes_from_tokenizer_json(&file)).map_err(wrong)
    }

    /// One more than the highest id: the smallest embedding table that serves this tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Bytes of the longest entry of the vocabulary: `n` tokens cover at most `n` times as many bytes of a text, unless the tokenizer drops
    /// or joins parts of it.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// The ids that begin a document: usually one or none.
    pub fn start_ids(&self) -> &[u32] {
        &self.edges.start
    }

    /// The id that ends a document, if the tokenizer has one: the end of text, not the end of a turn of a chat.
    pub fn eos_id(&self) -> Option<u32> {
        self.edges.end
    }

    /// Every id that ends a generated text; the first is [`Tokenizer::eos_id`].
    pub fn eos_ids(&self) -> &[u32] {
        &self.edges.stops
    }

    /// The token that fills the rows of a reward model: `pad_token` of `tokenizer_config.json`, else the end of a document, as in TRL.
    pub fn padding_id(&self) -> Option<u32> {
        self.edges.padding.or(self.edges.end)
    }

    /// A sentence that names the tokens that begin and end a document and a generated text.
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

    /// Errors when ids reach beyond a model's `vocabulary`.
    pub fn check_fits(&self, vocabulary: usize) -> Result<()> {
        if self.vocab_size() <= vocabulary {
            return Ok(());
        }
        Err(Error::Model(format!(
            "the tokenizer has {} entries, `vocab_size` is {vocabulary}: tokenizer and model do not belong together",
            self.vocab_size()
        )))
    }

    /// The id of a token given by its exact name.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// Whether a token stands for no text, such as an end of text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether the ids of both stand for the same tokens.
    pub fn has_tokens_of(&self, other: &Tokenizer) -> bool {
        self.inner.get_vocab(true) == other.inner.get_vocab(true)
    }

    /// SHA-256 of `tokenizer.json`, and of the tokens that other files add, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The file this was read from.
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
