//! Writes the tokenizer of a folder as metadata of a GGUF file.

use super::header::{Entry, Header};
use crate::export::source::Source;
use crate::sentencepiece::SentencePiece;
use crate::token_kinds;
use crate::tokenizer::PreTokenizer;
use ottava_common::error::{Error, Result};
use ottava_data::{ChatTemplate, Clock, Tokenizer, read_json};

use serde_json::Value;

/// Writes the tokenizer of `source`.
///
/// Errors with [`Error::Model`] if the tokenizer is neither byte-level BPE nor the BPE of SentencePiece, or if it splits text in a way that no known
/// pre-tokenizer of llama.cpp does.
pub fn write(header: &mut Header, source: &Source) -> Result<()> {
    let folder = &source.path;
    let tokenizer = Tokenizer::load(folder)?;
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", tokenizer.path().display()));
    let file = read_json(tokenizer.path())?;
    let pieces = SentencePiece::is_in(&file).then(|| SentencePiece::of(&file)).transpose().map_err(wrong)?;
    let pre = if pieces.is_none() { Some(PreTokenizer::of(&file).map_err(wrong)?) } else { None };
    let mut vocabulary = Vocabulary::read(&file, source.sizes.vocabulary).map_err(wrong)?;
    let config = read_json(&folder.join("tokenizer_config.json"))?;
    let named = |key: &str| {
        let value = &config[key];
        value.as_str().or_else(|| value["content"].as_str()).and_then(|name| tokenizer.token_id(name))
    };

    header.entry("tokenizer.ggml.model", Entry::Text(if pieces.is_some() { "llama" } else { "gpt2" }));
    header.entry("tokenizer.ggml.pre", Entry::Text(pre.map_or("default", |pre| pre.name)));
    match pieces {
        Some(SentencePiece { adds_space }) => {
            let Vocabulary { tokens, kinds, merges } = &mut vocabulary;
            let unknown = file["model"]["unk_token"].as_str();
            let scores = SentencePiece::scores(tokens, kinds, merges, unknown).map_err(wrong)?;
            header.entry("tokenizer.ggml.scores", Entry::Floats(&scores));
            header.entry("tokenizer.ggml.add_space_prefix", Entry::Bool(adds_space));
        }
        None => header.entry("tokenizer.ggml.merges", Entry::Texts(&vocabulary.merges)),
    }
    header.entry("tokenizer.ggml.tokens", Entry::Texts(&vocabulary.tokens));
    header.entry("tokenizer.ggml.token_type", Entry::Integers(&vocabulary.kinds));
    let start = match tokenizer.start_ids() {
        [] => None,
        [id] => Some(*id),
        ids => return Err(wrong(format!("texts begin with {} tokens; GGUF files have one or none", ids.len()))),
    };
    for (key, id) in [
        ("bos", start.or_else(|| named("bos_token"))),
        ("eos", named("eos_token").or(tokenizer.eos_id())),
        ("unknown", named("unk_token")),
        ("padding", named("pad_token")),
    ] {
        if let Some(id) = id {
            header.entry(&format!("tokenizer.ggml.{key}_token_id"), Entry::U32(id));
        }
    }
    header.entry("tokenizer.ggml.add_bos_token", Entry::Bool(start.is_some()));
    if let Some(template) = ChatTemplate::load(folder, None, Clock::Fixed)? {
        header.entry("tokenizer.chat_template", Entry::Text(template.source()));
    }
    Ok(())
}

/// The tokens of a `tokenizer.json`, by id.
struct Vocabulary {
    tokens: Vec<String>,
    /// The kinds of the tokens, as numbers of `tokenizer.ggml.token_type`.
    kinds: Vec<i32>,
    /// The merges: pairs of tokens, separated by a space.
    merges: Vec<String>,
}

impl Vocabulary {
    /// Reads `file` for a model whose embedding has `rows` rows. Rows without a token get names that no text contains.
    fn read(file: &Value, rows: usize) -> Result<Vocabulary, String> {
        let mut tokens: Vec<_> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![token_kinds::UNUSED as i32; rows];
        let mut set = |id: Option<u64>, token: &str, kind: i64| {
            let id = id.ok_or_else(|| format!("token {token:?} has no id"))? as usize;
            if id >= rows {
                return Err(format!("token {token:?} has the id {id}, and the model {rows} embeddings"));
            }
            (tokens[id], types[id]) = (token.into(), kind as i32);
            Ok(())
        };
        for (token, id) in file["model"]["vocab"].as_object().into_iter().flatten() {
            set(id.as_u64(), token, token_kinds::NORMAL)?;
        }
        for added in file["added_tokens"].as_array().into_iter().flatten() {
            let kind = if added["special"] == true { token_kinds::CONTROL } else { token_kinds::USER_DEFINED };
            set(added["id"].as_u64(), added["content"].as_str().unwrap_or_default(), kind)?;
        }
        // Old files have a text for each merge, newer files a list of two texts.
        let merge = |merge: &Value| match merge {
            Value::String(pair) => Some(pair.clone()),
            pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
        };
        let merges = file["model"]["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
        let merges = merges.iter().map(merge).collect::<Option<_>>().ok_or("a merge is not two tokens")?;
        Ok(Vocabulary { tokens, kinds: types, merges })
    }
}
