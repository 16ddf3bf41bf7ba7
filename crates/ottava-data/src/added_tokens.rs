//! Tokens that the files beside a `tokenizer.json` add to it. They are added like in transformers.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use crate::edges::read_json;
use crate::guard::catch_panics;
use ottava_common::{Error, Result};

/// The special tokens that have their own keys, in the order in which transformers adds missing ones.
pub(super) const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A token that a file names.
struct Named {
    token: AddedToken,
    /// The id of the token in the file.
    id: Option<u32>,
}

/// Adds the tokens of `tokenizer_config.json` (`added_tokens_decoder`, `extra_special_tokens`, `additional_special_tokens`) that `tokenizer` lacks.
/// Without `added_tokens_decoder`, also adds the tokens of `added_tokens.json` and `special_tokens_map.json`.
///
/// Returns the added tokens. Errors with [`Error::Model`] if an added token gets another id than its file says.
pub(super) fn add(folder: &Path, tokenizer: &mut Tokenizer) -> Result<Vec<AddedToken>> {
    let path = folder.join("tokenizer_config.json");
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
    let mut config = read_json(&path)?.as_object().cloned().unwrap_or_default();
    let decoder = config.get("added_tokens_decoder").and_then(Value::as_object).cloned();
    let mut tokens = match &decoder {
        Some(decoder) => of_decoder(decoder).map_err(wrong)?,
        None => {
            if let Value::Object(map) = read_json(&folder.join("special_tokens_map.json"))? {
                map.into_iter().for_each(|(key, value)| {
                    config.entry(key).or_insert(value);
                });
            }
            of_file(&read_json(&folder.join("added_tokens.json"))?, &config)
        }
    };
    let known = tokenizer.get_added_tokens_decoder();
    let is_known = |token: &AddedToken| known.values().any(|known| known == token);
    tokens.retain(|named| !is_known(&named.token));
    let extra: Vec<AddedToken> = extra(&config).into_iter().filter(|token| is_missing(tokenizer, token)).collect();
    if !extra.is_empty() {
        // Missing tokens with their own keys get the ids before the missing tokens of lists.
        let own =
            NAMED.iter().filter_map(|key| special(config.get(*key)?)).filter(|token| is_missing(tokenizer, token));
        for token in own.chain(extra) {
            if tokens.iter().all(|named| named.token.content != token.content) {
                tokens.push(Named { token, id: None });
            }
        }
    }
    let added: Vec<AddedToken> = tokens.iter().map(|named| named.token.clone()).collect();
    catch_panics(|| tokenizer.add_tokens(added.clone())).map_err(wrong)?;
    for Named { token, id } in &tokens {
        let found = tokenizer.token_to_id(&token.content);
        if let (Some(id), Some(found)) = (id, found)
            && *id != found
        {
            return Err(wrong(format!(
                "the token {:?} has the id {id}, and with tokenizer.json it would have the id {found}; correct the id, or add the token to \
                 tokenizer.json",
                token.content
            )));
        }
    }
    Ok(added)
}

fn is_missing(tokenizer: &Tokenizer, token: &AddedToken) -> bool {
    !token.content.is_empty() && tokenizer.token_to_id(&token.content).is_none()
}

/// Returns the tokens of `added_tokens_decoder`, in the order of their ids.
fn of_decoder(decoder: &Map<String, Value>) -> Result<Vec<Named>, String> {
    let mut tokens = Vec::new();
    for (id, token) in decoder {
        let id: u32 =
            id.parse().map_err(|_| format!("`added_tokens_decoder` has the id {id:?}, which is no number"))?;
        let content = token.get("content").and_then(Value::as_str);
        let content = content.ok_or_else(|| format!("`added_tokens_decoder`: token {id} has no `content`"))?;
        tokens.push(Named { token: with_flags(content, token, false), id: Some(id) });
    }
    tokens.sort_by_key(|named| named.id);
    Ok(tokens)
}

/// Creates a token with the flags of an object.
fn with_flags(content: &str, flags: &Value, special: bool) -> AddedToken {
    let flag = |key: &str, default: bool| flags.get(key).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", special);
    AddedToken::from(content, special)
        .single_word(flag("single_word", false))
        .lstrip(flag("lstrip", false))
        .rstrip(flag("rstrip", false))
        .normalized(flag("normalized", !special))
}

/// Returns the tokens of `added_tokens.json`, in the order of their ids.
fn of_file(file: &Value, config: &Map<String, Value>) -> Vec<Named> {
    let named = NAMED.iter().filter_map(|key| special(config.get(*key)?));
    let specials: Vec<String> = named.chain(extra(config)).map(|token| token.content).collect();
    let entries = file.as_object().into_iter().flatten();
    let mut tokens: Vec<Named> = entries
        .filter_map(|(content, id)| {
            let id = u32::try_from(id.as_u64()?).ok()?;
            Some(Named { token: AddedToken::from(content.as_str(), specials.contains(content)), id: Some(id) })
        })
        .collect();
    tokens.sort_by_key(|named| named.id);
    tokens
}

/// Reads a special token: a text, or an object whose `content` is a text.
fn special(value: &Value) -> Option<AddedToken> {
    let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
    Some(with_flags(content, value, true))
}

/// Returns the tokens of `extra_special_tokens`, or else of `additional_special_tokens`. The value is a list, or an object whose keys are names.
fn extra(config: &Map<String, Value>) -> Vec<AddedToken> {
    let has = |value: &&Value| value.as_array().is_some_and(|list| !list.is_empty()) || value.is_object();
    let keys = ["extra_special_tokens", "additional_special_tokens"];
    match keys.iter().filter_map(|key| config.get(*key)).find(has) {
        Some(Value::Array(list)) => list.iter().filter_map(special).collect(),
        Some(Value::Object(named)) => named.values().filter_map(special).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
#[path = "added_tokens_tests.rs"]
mod tests;
