//! Converts the vocabulary of a folder of Moonlight or Kimi, which has `tiktoken.model` and no `tokenizer.json`, to a `tokenizer.json`.
//!
//! A line of `tiktoken.model` has the bytes of a token in base64, and its rank, which is its id. tiktoken merges the two neighbours in a word whose union
//! has the lowest rank, so each division of a token into two tokens is a merge, in the order of ranks.

use crate::byte_form::alphabet;
use crate::edges::read_json;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_common::{Error, Result, input};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// The name of the file.
const NAME: &str = "tiktoken.model";

/// The maximum size of the file in bytes. Files in common use have 3 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The maximum number of bytes of a token. Tokens in common use have up to 128 bytes.
const MAX_TOKEN_BYTES: usize = 256;

/// The class of tokenizers whose words [`WORDS`] divides.
const CLASS: &str = "TikTokenTokenizer";

/// The words in which a text is divided: the words of GPT-4o, with runs of Han characters as words of their own.
const WORDS: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Returns the `tokenizer.json` that the files beside the missing file `path` make, or `None` if `path` exists or no `tiktoken.model` is beside it.
///
/// Errors with [`Error::Model`], which names the file, if the vocabulary is damaged, or if the words of its class are not known.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let (model, config) = (path.with_file_name(NAME), path.with_file_name("tokenizer_config.json"));
    if path.exists() || !model.exists() {
        return Ok(None);
    }
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", model.display()));
    let settings = read_json(&config)?;
    if settings["tokenizer_class"] != CLASS {
        return Err(wrong(format!(
            "{} names the class {} of the tokenizer; the words of \"{CLASS}\" are known. A tokenizer.json beside it is read",
            config.display(),
            settings["tokenizer_class"]
        )));
    }
    let text = input::read_text(&model, MAX_FILE_BYTES).map_err(|e| wrong(e.to_string()))?;
    let tokens = tokens(&text).map_err(wrong)?;
    let converted = converted(&tokens, &settings["added_tokens_decoder"]).map_err(wrong)?;
    Ok(Some(serde_json::to_vec(&converted).expect("JSON values are written without fail")))
}

/// Returns the bytes of the tokens, in the order of their ranks.
fn tokens(text: &str) -> Result<Vec<Vec<u8>>, String> {
    let mut ranked = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let wrong = |reason: &str| format!("line {}: {reason}", number + 1);
        let (token, rank) =
            line.split_once(' ').ok_or_else(|| wrong("expected a token in base64, a space and its rank"))?;
        let token = STANDARD.decode(token).map_err(|error| wrong(&format!("not base64: {error}")))?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(wrong(&format!("the token has {} bytes; 1 to {MAX_TOKEN_BYTES} are read", token.len())));
        }
        ranked.push((rank.trim().parse::<usize>().map_err(|_| wrong("the rank is not a number"))?, token));
    }
    ranked.sort();
    match ranked.iter().enumerate().find(|(id, (rank, _))| id != rank) {
        Some((id, _)) => Err(format!("the rank {id} is missing, or a rank appears twice")),
        None => Ok(ranked.into_iter().map(|(_, token)| token).collect()),
    }
}

/// Returns a `tokenizer.json` with these tokens. `named` are special tokens by their ids; ids between them are reserved.
fn converted(tokens: &[Vec<u8>], named: &Value) -> Result<Value, String> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_slice(), id)).collect();
    if ranks.len() < tokens.len() {
        return Err("a token appears twice".into());
    }
    if let Some(byte) = (0..=u8::MAX).find(|byte| !ranks.contains_key(&[*byte][..])) {
        return Err(format!("no token is the byte 0x{byte:02x}; every byte is a token"));
    }
    let alphabet = alphabet();
    let written = |token: &[u8]| token.iter().map(|byte| alphabet[usize::from(*byte)]).collect::<String>();
    let mut merges = Vec::new();
    for token in tokens {
        let divisions = (1..token.len()).map(|at| token.split_at(at));
        let mut pairs: Vec<_> = divisions.filter_map(|(a, b)| Some((*ranks.get(a)?, *ranks.get(b)?))).collect();
        pairs.sort();
        merges.extend(pairs.into_iter().map(|(a, b)| json!([written(&tokens[a]), written(&tokens[b])])));
    }
    let vocabulary: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| (written(token), json!(id))).collect();
    Ok(json!({
        "version": "1.0",
        "added_tokens": specials(tokens.len(), named)?,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": true, "vocab": vocabulary, "merges": merges,
        },
    }))
}

/// Returns the special tokens from the id `first` to the highest named id. A file names some of them.
fn specials(first: usize, named: &Value) -> Result<Vec<Value>, String> {
    const MOST: usize = 1 << 16;
    let mut names = HashMap::new();
    for (id, token) in named.as_object().into_iter().flatten() {
        let id: usize = id.parse().map_err(|_| format!("`added_tokens_decoder` has the id {id:?}"))?;
        let content = token["content"].as_str().ok_or_else(|| format!("`added_tokens_decoder` names no token {id}"))?;
        if id < first || id >= first + MOST {
            return Err(format!(
                "`added_tokens_decoder` has the id {id}; the ids of special tokens follow {first} others"
            ));
        }
        names.insert(id, content);
    }
    let end = names.keys().max().map_or(first, |highest| highest + 1);
    let token = |id: usize| {
        let content = names.get(&id).map_or_else(|| format!("<|reserved_token_{id}|>"), |name| name.to_string());
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    };
    Ok((first..end).map(token).collect())
}

#[cfg(test)]
mod tests {
    use crate::Tokenizer;
    use serde_json::{Value, json};
    use std::path::Path;

    fn recorded() -> Value {
        serde_json::from_str(include_str!("../tests/data/tiktoken.json")).unwrap()
    }

    fn write(folder: &Path, model: &str, config: &Value) {
        std::fs::write(folder.join("tiktoken.model"), model).unwrap();
        std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    }

    #[test]
    fn texts_have_the_ids_of_tiktoken() {
        let (recorded, folder) = (recorded(), tempfile::tempdir().unwrap());
        write(folder.path(), recorded["model"].as_str().unwrap(), &recorded["config"]);
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (608, Some(601)));
        assert!(tokenizer.is_special(602) && tokenizer.token_id("<|im_end|>") == Some(603));
        for (text, ids) in recorded["texts"].as_array().unwrap().iter().zip(recorded["ids"].as_array().unwrap()) {
            let (text, ids): (&str, Vec<u32>) = (text.as_str().unwrap(), serde_json::from_value(ids.clone()).unwrap());
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
            let decoded = tokenizer.decode(&ids).unwrap();
            assert!(
                decoded == text || ids.iter().any(|id| tokenizer.is_special(*id)),
                "{text:?} comes back as {decoded:?}"
            );
        }
    }

    #[test]
    fn damaged_vocabularies_are_errors() {
        let (recorded, folder) = (recorded(), tempfile::tempdir().unwrap());
        let (model, config) = (recorded["model"].as_str().unwrap(), &recorded["config"]);
        let error = |model: &str, config: &Value| {
            write(folder.path(), model, config);
            let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
            assert!(error.contains("tiktoken.model: "), "{error}");
            error
        };
        let lines: Vec<&str> = model.lines().collect();
        let with = |line: &str| format!("{}\n{line}\n", lines.join("\n"));
        assert!(error(&with("!! 600"), config).contains("line 601: not base64"));
        assert!(error(&with("YWJj"), config).contains("line 601: expected a token in base64"));
        assert!(error(&with("YWJj x"), config).contains("line 601: the rank is not a number"));
        assert!(error(&with("YWJj 602"), config).contains("the rank 600 is missing"));
        assert!(error(&with("YQ== 600"), config).contains("a token appears twice"));
        assert!(error("YQ== 0", config).contains("no token is the byte 0x00"));
        assert!(error(&with(&format!("{} 600", "YWJj".repeat(1000))), config).contains("the token has 3000 bytes"));
        let mut other = config.clone();
        other["tokenizer_class"] = json!("QWenTokenizer");
        assert!(error(model, &other).contains("the class \"QWenTokenizer\""));
        let mut low = config.clone();
        low["added_tokens_decoder"]["3"] = json!({"content": "<low>"});
        assert!(error(model, &low).contains("has the id 3;"));
        low["added_tokens_decoder"] = json!({"99999999": {"content": "<high>"}});
        assert!(error(model, &low).contains("has the id 99999999"));
    }
}
