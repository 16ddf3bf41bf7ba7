//! Text to token ids and back, as a Hugging Face `tokenizer.json` describes it.
//!
//! Crafted tokenizer files make the tokenizers crate panic; every call into it catches panics and returns them as errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;

use serde_json::Value;

use super::pieces::{cuts_at_spaces, pieces};
use crate::hash::sha256;
use crate::{Error, Result, input};

/// Larger tokenizer files are refused; the largest in common use is about 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Bytes of text that are tokenized at once, where a text can be cut.
const PIECE_BYTES: usize = 128 << 10;

/// Bytes of memory to tokenize a byte of text at once. The tokenizers crate takes 124 to 235, depending on text and tokenizer.
const BYTES_PER_BYTE: u64 = 250;

/// Bytes of memory for the ids of a byte of text, with those of a piece and room to grow.
const IDS_PER_BYTE: u64 = 16;

/// Common names of end-of-text tokens, tried in this order if no file next to the tokenizer names one.
const COMMON_EOS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// A tokenizer and the ids that end a text.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    vocab_size: usize,
    eos_ids: Vec<u32>,
    sha256: String,
    /// Whether long texts are cut.
    cuts: bool,
}

impl Tokenizer {
    /// Reads `path`: a `tokenizer.json`, or a folder that holds one.
    ///
    /// The end-of-sequence ids come from the first of these beside it that names one: `eos_token_id` of
    /// `generation_config.json` (a number or a list), of `config.json`, `eos_token` of `tokenizer_config.json`; else
    /// from the first common name in the vocabulary (`<|endoftext|>`, `</s>`, ...).
    /// Truncation and padding that the file may ask for are switched off: they would cut documents silently.
    /// Errors with [`Error::Model`].
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let bytes = read_capped(&path)?;
        let mut inner = catch_panics(|| tokenizers::Tokenizer::from_bytes(&bytes))
            .map_err(|reason| wrong(format!("not a usable tokenizer: {reason}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        // Ids may have gaps, so the table has to reach the highest id and not just the number of entries.
        let highest = inner.get_vocab(true).into_values().max();
        let vocab_size = highest.ok_or_else(|| wrong("the vocabulary is empty".into()))? as usize + 1;
        let (sha256, cuts) = (sha256(&bytes), cuts_at_spaces(&inner));
        let mut tokenizer = Tokenizer { inner, vocab_size, eos_ids: Vec::new(), sha256, cuts, path };
        tokenizer.eos_ids = tokenizer.named_eos_ids()?;
        if tokenizer.eos_ids.is_empty() {
            tokenizer.eos_ids = COMMON_EOS.iter().find_map(|name| tokenizer.token_id(name)).into_iter().collect();
        }
        Ok(tokenizer)
    }

    /// The ids of `text`. Nothing is added around it; special tokens written out in the text are recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_in_pieces(text, PIECE_BYTES)
    }

    /// The ids of `text`, of which about `bytes` are tokenized at once.
    pub(super) fn encode_in_pieces(&self, text: &str, bytes: usize) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in self.pieces(text, bytes) {
            let encoding = catch_panics(|| self.inner.encode_fast(piece, false))
                .map_err(|reason| Error::Data(format!("{}: cannot encode a text: {reason}", self.path.display())))?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(ids)
    }

    /// `text` in pieces of at least `bytes` that have the ids of the whole; one piece, where that is not certain.
    pub(super) fn pieces<'a>(&self, text: &'a str, bytes: usize) -> impl Iterator<Item = &'a str> {
        pieces(text, if self.cuts { bytes } else { usize::MAX })
    }

    /// Bytes of memory that [`Tokenizer::encode`] takes for `text` at most.
    pub fn memory_to_encode(&self, text: &str) -> u64 {
        let longest = self.pieces(text, PIECE_BYTES).map(str::len).max().unwrap_or(0);
        longest as u64 * BYTES_PER_BYTE + text.len() as u64 * IDS_PER_BYTE
    }

    /// The text of `ids`, special tokens written out. Ids without an entry (a padded vocabulary) give nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        catch_panics(|| self.inner.decode(ids, false)).map_err(|reason| {
            Error::Data(format!("{}: cannot decode {} ids: {reason}", self.path.display(), ids.len()))
        })
    }

    /// One more than the highest id: the smallest embedding table that serves this tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id that ends a document, if the tokenizer has one; see [`Tokenizer::load`] for where it comes from.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_ids.first().copied()
    }

    /// Every id that ends a generated text; the first is [`Tokenizer::eos_id`].
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
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

    /// SHA-256 of `tokenizer.json`, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The file this was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The ids that end a text by the files next to the tokenizer; empty if none names any.
    fn named_eos_ids(&self) -> Result<Vec<u32>> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        for (file, key) in [
            ("generation_config.json", "eos_token_id"),
            ("config.json", "eos_token_id"),
            ("tokenizer_config.json", "eos_token"),
        ] {
            let path = folder.join(file);
            if !path.exists() {
                continue;
            }
            let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
            let config: Value =
                serde_json::from_slice(&read_capped(&path)?).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
            let ids = match config.get(key) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(list)) => list.iter().map(|value| self.special_id(value)).collect(),
                Some(value) => self.special_id(value).map(|id| vec![id]),
            };
            let ids: Vec<u32> = ids.map_err(|reason| wrong(format!("`{key}` {reason}")))?;
            if !ids.is_empty() {
                return Ok(ids);
            }
        }
        Ok(Vec::new())
    }

    /// One id from a configuration value: a number, a token's name, or an object with the name in `content`.
    fn special_id(&self, value: &Value) -> Result<u32, String> {
        let name = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        if let Some(name) = name {
            return self.token_id(name).ok_or_else(|| format!("is {name:?}, which is not in tokenizer.json"));
        }
        let number = value.as_u64().ok_or_else(|| format!("is {value}; expected a token"))?;
        // A model's table may be padded beyond the tokenizer, but a special id must mean something.
        u32::try_from(number).ok().filter(|&id| self.inner.id_to_token(id).is_some()).ok_or_else(|| {
            format!("is {number}, but tokenizer.json has no such id (its highest is {})", self.vocab_size - 1)
        })
    }
}

thread_local! {
    /// True while panics of this thread are caught and not printed.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a call into the tokenizers crate, and returns its errors and panics as text.
fn catch_panics<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                print(panic)
            }
        }));
    });
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    match result {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("the parser gave up ({text})"))
        }
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
