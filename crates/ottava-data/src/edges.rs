//! The tokens at the edges of a document: the tokens that begin a document, the token that ends a document, and all tokens that end a generated text.

use serde_json::Value;
use std::path::Path;
use tokenizers::Tokenizer;

use crate::guard::catch_panics;
use ottava_common::{Error, Result, input, python_json};

/// The names of tokens that end a text. They are tried in this order if no file beside the tokenizer names such a token.
const TEXT_ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "[SEP]"];

/// The names of tokens that end a turn of a chat. Files often name such a token as `eos_token`.
const TURN_ENDS: [&str; 8] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
];

/// The maximum size of a configuration file in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The tokens at the edges of a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Edges {
    /// The tokens before a document: the beginning of text, or no token.
    pub(super) start: Vec<u32>,
    /// The tokens between the texts of a pair.
    pub(super) between: Vec<u32>,
    /// The tokens after a text that is not predicted, such as the text of a classifier.
    pub(super) after: Vec<u32>,
    /// The token that ends a document.
    pub(super) end: Option<u32>,
    /// All tokens that end a generated text. The first one is `end`.
    pub(super) stops: Vec<u32>,
    /// The token that pads rows, if a file names one.
    pub(super) padding: Option<u32>,
    /// The token that precedes a text without a prompt when a task computes the likelihood of the text.
    pub(super) prefix: Option<u32>,
}

impl Edges {
    /// Reads the edges from the files of `folder`.
    ///
    /// A document begins with `bos_token` of `tokenizer_config.json` if `add_bos_token` is true, and without a token if it is false. If
    /// `add_bos_token` is missing, a document begins with the tokens that the post-processor of `tokenizer.json` adds.
    ///
    /// A generated text ends at every token that is named by `eos_token_id` (a number or a list) of `generation_config.json` or `config.json`, or by
    /// `eos_token` of `tokenizer_config.json`. An id in `config.json` that no token has is ignored with a warning, as in transformers. A document ends with the first of these tokens that is known to end a text. If there is no such token,
    /// it ends with the first token that is not known to end a turn. If there is none either, it ends with the first common name in the vocabulary
    /// (`<|endoftext|>`, `<eos>`, ...); special tokens precede other tokens.
    pub(super) fn read(folder: &Path, tokenizer: &Tokenizer) -> Result<Edges> {
        let mut stops: Vec<u32> = Vec::new();
        for (file, key) in [
            ("generation_config.json", "eos_token_id"),
            ("config.json", "eos_token_id"),
            ("tokenizer_config.json", "eos_token"),
        ] {
            let path = folder.join(file);
            let config = read_json(&path)?;
            // The text model of a vision-language model may name the tokens.
            let stated = |config: &Value| config.get(key).filter(|value| !value.is_null()).cloned();
            let values = match stated(&config).or_else(|| stated(&config["text_config"])) {
                None => continue,
                Some(Value::Array(list)) => list,
                Some(value) => vec![value],
            };
            for value in values {
                match special_id(&value, tokenizer) {
                    Ok(id) => stops.push(id),
                    Err(reason) if file == "config.json" && value.is_u64() => {
                        tracing::warn!("{}: `{key}` {reason}; the id is ignored", path.display());
                    }
                    Err(reason) => return Err(Error::Model(format!("{}: `{key}` {reason}", path.display()))),
                }
            }
        }
        let among = |names: &[&str], id: u32| tokenizer.id_to_token(id).is_some_and(|name| names.contains(&&*name));
        let named = |test: &dyn Fn(u32) -> bool| stops.iter().copied().find(|&id| test(id));
        // Gemma's vocabulary has `</s>` as an HTML tag, so special tokens are preferred.
        let added = tokenizer.get_added_tokens_decoder();
        let is_special = |id: &u32| added.get(id).is_some_and(|token| token.special);
        let common = |names: &[&str]| {
            let ids = || names.iter().filter_map(|name| tokenizer.token_to_id(name));
            ids().find(is_special).or_else(|| ids().next())
        };
        let end = named(&|id| among(&TEXT_ENDS, id))
            .or_else(|| named(&|id| !among(&TURN_ENDS, id)))
            .or_else(|| common(&TEXT_ENDS))
            .or_else(|| stops.first().copied())
            .or_else(|| common(&TURN_ENDS));
        stops.splice(0..0, end);
        let mut seen = Vec::new();
        stops.retain(|id| {
            !seen.contains(id) && {
                seen.push(*id);
                true
            }
        });
        let (start, after) = (start(folder, tokenizer)?, after(folder, tokenizer)?);
        let between = added_between(tokenizer, start.is_empty());
        let named = |key| named_token(folder, tokenizer, key);
        let prefix = named("bos_token")?.or_else(|| start.first().copied());
        let prefix = match prefix {
            None => named("eos_token")?.or(end),
            prefix => prefix,
        };
        Ok(Edges { start, between, after, end, stops, padding: named("pad_token")?, prefix })
    }
}

/// Returns the token that `key` of `tokenizer_config.json` names.
fn named_token(folder: &Path, tokenizer: &Tokenizer, key: &str) -> Result<Option<u32>> {
    let path = folder.join("tokenizer_config.json");
    match read_json(&path)?.get(key) {
        None | Some(Value::Null) => Ok(None),
        // Such a token may be missing in the tokenizer's file, unlike tokens at edges, because few commands read it.
        Some(value) => Ok(special_id(value, tokenizer).ok()),
    }
}

/// Returns the tokens before a document.
fn start(folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let path = folder.join("tokenizer_config.json");
    let config = read_json(&path)?;
    match config.get("add_bos_token") {
        Some(Value::Bool(false)) => Ok(Vec::new()),
        Some(Value::Bool(true)) => match config.get("bos_token") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(value) => special_id(value, tokenizer)
                .map(|id| vec![id])
                .map_err(|reason| Error::Model(format!("{}: `bos_token` {reason}", path.display()))),
        },
        _ => Ok(added_before(tokenizer)),
    }
}

/// Returns the tokens after a text that is not predicted: `eos_token` if `add_eos_token` of `tokenizer_config.json` is true, none if it is false, and
/// else the tokens that the post-processor adds.
fn after(folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let stated = read_json(&folder.join("tokenizer_config.json"))?.get("add_eos_token").and_then(Value::as_bool);
    Ok(match stated {
        Some(false) => Vec::new(),
        Some(true) => named_token(folder, tokenizer, "eos_token")?.into_iter().collect(),
        None => added(tokenizer).1,
    })
}

/// Returns the tokens that the post-processor adds before a text.
fn added_before(tokenizer: &Tokenizer) -> Vec<u32> {
    added(tokenizer).0
}

/// Returns the tokens that the post-processor adds before and after a text.
fn added(tokenizer: &Tokenizer) -> (Vec<u32>, Vec<u32>) {
    let ids = |special| catch_panics(|| tokenizer.encode_fast("a", special));
    let (Ok(plain), Ok(whole)) = (ids(false), ids(true)) else { return Default::default() };
    let (plain, whole) = (plain.get_ids(), whole.get_ids());
    match whole.windows(plain.len().max(1)).position(|window| window == plain) {
        Some(at) => (whole[..at].to_vec(), whole[at + plain.len()..].to_vec()),
        None => Default::default(),
    }
}

/// Returns the tokens that the post-processor adds between the texts of a pair. If `starts_plain`, no token begins a text, whatever the
/// post-processor adds before it, and none of the tokens before a text is between texts either.
fn added_between(tokenizer: &Tokenizer, starts_plain: bool) -> Vec<u32> {
    let (before, after) = added(tokenizer);
    let ids = |special| catch_panics(|| tokenizer.encode_fast(("a", "a"), special));
    let (Ok(plain), Ok(whole)) = (ids(false), ids(true)) else { return Vec::new() };
    let (text, whole) = (&plain.get_ids()[..plain.get_ids().len() / 2], whole.get_ids());
    let count = whole.len().checked_sub(before.len() + after.len() + 2 * text.len());
    let start = before.len() + text.len();
    let between = count.map_or(&[][..], |count| &whole[start..start + count]);
    match starts_plain {
        true => between.iter().copied().filter(|id| !before.contains(id)).collect(),
        false => between.to_vec(),
    }
}

/// Reads the object in a JSON file. A file that does not exist is an empty object.
pub fn read_json(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
    let bytes = input::read(path, MAX_FILE_BYTES).map_err(|e| wrong(e.to_string()))?;
    let text = str::from_utf8(&bytes).map_err(|e| wrong(format!("not valid UTF-8: {e}")))?;
    python_json::parse(text).map_err(|e| wrong(format!("not valid JSON: {e}")))
}

/// Reads one id from a configuration value: a number, a token's name, or an object with the name in `content`.
fn special_id(value: &Value, tokenizer: &Tokenizer) -> Result<u32, String> {
    let name = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
    if let Some(name) = name {
        return tokenizer.token_to_id(name).ok_or_else(|| format!("is {name:?}, which is not in tokenizer.json"));
    }
    let number = value.as_u64().ok_or_else(|| format!("is {value}; expected a token"))?;
    // A model's embedding may have more rows than the tokenizer has tokens, but a special id must be a token.
    u32::try_from(number).ok().filter(|&id| tokenizer.id_to_token(id).is_some()).ok_or_else(|| {
        let highest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        format!("is {number}, but tokenizer.json has no such id (its highest is {highest})")
    })
}
