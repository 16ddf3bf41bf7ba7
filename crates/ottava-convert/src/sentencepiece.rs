//! Tokenizers of SentencePiece in llama.cpp: BPE of characters. Characters that are not tokens are encoded as bytes.
//!
//! A file of llama.cpp has a score for each token: of all neighbours that form a token, the ones with the highest score are merged first. A
//! `tokenizer.json` lists merges by rank. Both are equivalent if the list has all pairs that form a token, and has them consecutively.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use crate::token_kinds;

/// The character that represents a space in tokens.
const SPACE: &str = "\u{2581}";

/// The score of tokens that no merge forms. llama.cpp's converter writes this score for added tokens.
const ADDED: f32 = -1000.0;

/// A tokenizer of SentencePiece.
pub struct SentencePiece {
    /// Whether texts begin with a space.
    pub adds_space: bool,
}

impl SentencePiece {
    /// Whether a `tokenizer.json` has a tokenizer of SentencePiece.
    pub fn is_in(file: &Value) -> bool {
        file["model"]["byte_fallback"] == true
    }

    /// Reads the tokenizer of a `tokenizer.json` for which [`SentencePiece::is_in`] is true.
    ///
    /// Errors with the reason if it changes or splits texts differently than llama.cpp.
    pub fn of(file: &Value) -> Result<SentencePiece, String> {
        let steps = |step: &Value, list: &str| match step {
            Value::Null => Vec::new(),
            Value::Object(object) if step["type"] == "Sequence" => object[list].as_array().cloned().unwrap_or_default(),
            step => vec![step.clone()],
        };
        let (normalizers, cuts) =
            (steps(&file["normalizer"], "normalizers"), steps(&file["pre_tokenizer"], "pretokenizers"));
        let is_replace =
            |step: &Value| step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == SPACE;
        let is_prepend = |step: &Value| step["type"] == "Prepend" && step["prepend"] == SPACE;
        // After spaces are replaced, a text has no spaces at which it could be split.
        let is_no_cut = |step: &Value| step["type"] == "Split" && step["pattern"]["String"] == " ";
        let adds_space = match (&normalizers[..], &cuts[..]) {
            ([prepend, replace], []) if is_prepend(prepend) && is_replace(replace) => Some(true),
            ([replace], []) if is_replace(replace) => Some(false),
            ([replace], [cut]) if is_replace(replace) && is_no_cut(cut) => Some(false),
            ([], [meta]) if meta["type"] == "Metaspace" && meta["replacement"] == SPACE && meta["split"] == false => {
                match meta["prepend_scheme"].as_str() {
                    Some("first" | "always") => Some(true),
                    Some("never") => Some(false),
                    _ => None,
                }
            }
            _ => None,
        };
        let model = &file["model"];
        let is_empty = |key: &str| model[key].as_str().unwrap_or_default().is_empty();
        let plain = model["type"] == "BPE"
            && is_empty("continuing_subword_prefix")
            && is_empty("end_of_word_suffix")
            && model["ignore_merges"] != true;
        match adds_space.filter(|_| plain) {
            Some(adds_space) => Ok(SentencePiece { adds_space }),
            None => Err("the tokenizer uses `byte_fallback`, but cannot be exported to GGUF: its model is not SentencePiece BPE, or its normalizer \
                         or pre-tokenizer does more than replace spaces by ▁ and prepend one"
                .into()),
        }
    }

    /// Returns the scores of `tokens` of a `tokenizer.json` with these `merges`. Sets the kinds of the `unknown` token and of byte tokens, and writes
    /// added tokens with spaces, as in texts.
    ///
    /// Errors with the reason if no scores reproduce the merges.
    pub fn scores(
        tokens: &mut [String],
        types: &mut [i32],
        merges: &[String],
        unknown: Option<&str>,
    ) -> Result<Vec<f32>, String> {
        let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let bytes: Vec<usize> = (0..=u8::MAX).filter_map(|byte| ids.get(&*byte_token(byte)).copied()).collect();
        if bytes.len() != 256 {
            return Err(format!(
                "the vocabulary lacks {} of the 256 byte tokens `<0x00>` to `<0xFF>`",
                256 - bytes.len()
            ));
        }
        for id in bytes {
            types[id] = token_kinds::BYTE as i32;
        }
        if let Some(id) = unknown.and_then(|unknown| ids.get(unknown)) {
            types[*id] = token_kinds::UNKNOWN as i32;
        }
        let is_normal = |id: usize| types[id] == token_kinds::NORMAL as i32;
        // For each formed token: its rank among formed tokens, and the number of pairs that form it.
        let (mut made, mut last) = (HashMap::new(), None);
        for merge in merges {
            let whole = merge.replacen(' ', "", 1);
            let id = *ids
                .get(whole.as_str())
                .ok_or_else(|| format!("merge {merge:?} gives a token that is not in the vocabulary"))?;
            if !is_normal(id) {
                continue;
            }
            let rank = made.len();
            let (_, pairs) = made.entry(id).or_insert((rank, 0));
            if *pairs > 0 && last != Some(id) {
                return Err(not_by_scores(&whole, "the merge list is not contiguous for"));
            }
            (*pairs, last) = (*pairs + 1, Some(id));
        }
        for (id, token) in tokens.iter().enumerate().filter(|(id, _)| is_normal(*id)) {
            let all = pairs_of(token, |part| ids.contains_key(part)).count();
            if made.get(&id).map_or(0, |(_, pairs)| *pairs) != all {
                return Err(not_by_scores(token, "the merge list lacks some pairs that form"));
            }
        }
        let mut next = made.len();
        let mut score = |id: usize| match made.get(&id) {
            Some((rank, _)) => -(*rank as f32),
            None if is_normal(id) => {
                next += 1;
                1.0 - next as f32
            }
            None if types[id] == token_kinds::BYTE as i32 || types[id] == token_kinds::UNKNOWN as i32 => 0.0,
            None => ADDED,
        };
        let scores = (0..tokens.len()).map(&mut score).collect();
        for (token, _) in tokens.iter_mut().zip(types).filter(|(_, kind)| **kind == token_kinds::USER_DEFINED as i32) {
            *token = token.replace(SPACE, " ");
        }
        Ok(scores)
    }

    /// Returns the merges of `tokens` with these kinds and `scores`, by rank.
    ///
    /// Errors with the reason if the numbers of scores and tokens differ, or if all scores are equal.
    pub fn merges(tokens: &[String], types: &[i64], scores: &[f32]) -> Result<Vec<String>, String> {
        if scores.len() != tokens.len() {
            return Err(format!("there are {} tokens and {} scores", tokens.len(), scores.len()));
        }
        let mut normal: Vec<usize> = (0..tokens.len()).filter(|&id| types[id] == token_kinds::NORMAL).collect();
        if normal.len() > 1 && normal.iter().all(|&id| scores[id] == scores[normal[0]]) {
            return Err("all tokens have the same score, so the merge order is unknown".into());
        }
        normal.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
        let pairs = |id: usize| pairs_of(&tokens[id], |part| known.contains(part)).map(|(a, b)| format!("{a} {b}"));
        Ok(normal.into_iter().flat_map(|id| pairs(id).collect::<Vec<_>>()).collect())
    }

    /// Returns the `normalizer` of a `tokenizer.json`.
    pub fn normalizer(&self) -> Value {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        match self.adds_space {
            true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}),
            false => replace,
        }
    }

    /// Returns the `decoder` of a `tokenizer.json`.
    pub fn decoder(&self) -> Value {
        let strip = self.adds_space.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        let steps = [
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        json!({"type": "Sequence", "decoders": steps.into_iter().chain(strip).collect::<Vec<_>>()})
    }
}

/// Returns the token of a byte.
fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// Returns the pairs of tokens that form `token`, in the order of decreasing length of the first part.
fn pairs_of(token: &str, is_token: impl Fn(&str) -> bool) -> impl Iterator<Item = (&str, &str)> {
    let cuts = token.char_indices().rev().map(|(at, _)| at).filter(|at| *at > 0);
    cuts.map(|at| token.split_at(at)).filter(move |(a, b)| is_token(a) && is_token(b))
}

fn not_by_scores(token: &str, why: &str) -> String {
    format!("the tokenizer's merges cannot be written as SentencePiece scores: {why} token {token:?}")
}
