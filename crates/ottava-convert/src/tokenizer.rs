//! Converts the tokenizer of a GGUF file to the files that Hugging Face's libraries read.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use crate::gguf::Gguf;
use crate::sentencepiece::SentencePiece;
use crate::source::Files;
use crate::token_kinds;
use ottava_checkpoint::model::as_json;
use ottava_common::Result;

/// Splits text into pieces before pieces are merged into tokens.
pub struct PreTokenizer {
    /// The name in `tokenizer.ggml.pre`.
    pub name: &'static str,
    /// Whether texts are first normalized to Unicode's NFC. llama.cpp skips this step.
    composes: bool,
    /// Whether each digit is a piece.
    digits: bool,
    /// The pattern of a piece; `None` for GPT-2's pattern.
    pattern: Option<&'static str>,
    /// Whether a piece that is in the vocabulary becomes a token without merges.
    pub(super) ignore_merges: bool,
    /// Whether texts begin with BOS if a file does not say so.
    bos: bool,
}

pub(super) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer { name: "gpt-2", composes: false, digits: false, pattern: None, ignore_merges: false, bos: false },
    PreTokenizer { name: "smollm", composes: false, digits: true, pattern: None, ignore_merges: false, bos: false },
    PreTokenizer {
        name: "llama-bpe",
        composes: false,
        digits: false,
        pattern: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: true,
        bos: true,
    },
    PreTokenizer {
        name: "qwen2",
        composes: true,
        digits: false,
        pattern: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignore_merges: false,
        bos: false,
    },
];

impl PreTokenizer {
    /// Returns the pre-tokenizer of a `tokenizer.json`.
    ///
    /// Errors with the reason if the file is not a byte-level BPE, or has an unknown pre-tokenizer.
    pub fn of(file: &Value) -> Result<&'static PreTokenizer, String> {
        let steps = match &file["pre_tokenizer"] {
            Value::Object(step) if step.get("type") == Some(&json!("Sequence")) => step["pretokenizers"].clone(),
            Value::Null => json!([]),
            step => json!([step]),
        };
        let byte_level = |step: &Value| step["type"] == "ByteLevel" && step["add_prefix_space"] != true;
        let bytes = steps.as_array().and_then(|steps| steps.last()).is_some_and(byte_level);
        if file["model"]["type"] != "BPE" || !bytes || file["model"]["byte_fallback"] == true {
            return Err(
                "the tokenizer cannot be exported to GGUF: only byte-level BPE and SentencePiece BPE are supported"
                    .into(),
            );
        }
        let ignores = file["model"]["ignore_merges"] == true;
        let known = PRE_TOKENIZERS.iter().find(|known| {
            // The settings that trim offsets of tokens are ignored, because offsets are not read.
            let plain = |steps: &[Value]| {
                let mut steps = steps.to_vec();
                steps.iter_mut().filter_map(Value::as_object_mut).for_each(|step| drop(step.remove("trim_offsets")));
                steps
            };
            known.ignore_merges == ignores
                && known.normalizer() == file["normalizer"]
                && plain(&known.steps()) == plain(steps.as_array().expect("steps are a list"))
        });
        known.ok_or_else(|| {
            let names: Vec<_> = PRE_TOKENIZERS.iter().map(|known| known.name).collect();
            format!("the pre-tokenizer cannot be exported to GGUF; supported are: {}", names.join(", "))
        })
    }

    /// Returns the `normalizer` of a `tokenizer.json`.
    pub(super) fn normalizer(&self) -> Value {
        if self.composes { json!({"type": "NFC"}) } else { Value::Null }
    }

    /// Returns the `pretokenizers` of a `tokenizer.json`.
    pub(super) fn steps(&self) -> Vec<Value> {
        let digits = self.digits.then(|| json!({"type": "Digits", "individual_digits": true}));
        let split = self.pattern.map(
            |pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}),
        );
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": split.is_none()});
        digits.into_iter().chain(split).chain([bytes]).collect()
    }
}

/// The kind of a tokenizer.
enum Kind {
    /// Byte-level BPE.
    Bytes(&'static PreTokenizer),
    /// BPE of characters.
    Pieces(SentencePiece),
}

impl Kind {
    fn of(gguf: &Gguf) -> Result<Kind> {
        match gguf.text("tokenizer.ggml.model")?.unwrap_or("none") {
            "gpt2" => {}
            "llama" => {
                let adds_space = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                return Ok(Kind::Pieces(SentencePiece { adds_space }));
            }
            other => {
                return Err(gguf.error(&format!(
                    "`tokenizer.ggml.model` is `{other}`; supported are `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE)"
                )));
            }
        }
        let pre = gguf.text("tokenizer.ggml.pre")?.unwrap_or("none");
        PRE_TOKENIZERS.iter().find(|known| known.name == pre).map(Kind::Bytes).ok_or_else(|| {
            let known: Vec<_> = PRE_TOKENIZERS.iter().map(|known| known.name).collect();
            gguf.error(&format!("`tokenizer.ggml.pre` is `{pre}`; supported pre-tokenizers are {}", known.join(", ")))
        })
    }

    /// Whether texts begin with BOS if a file does not say so.
    fn begins(&self) -> bool {
        match self {
            Kind::Bytes(pre) => pre.bos,
            Kind::Pieces(_) => true,
        }
    }

    /// Returns the merges of `tokens`, by rank.
    fn merges(&self, gguf: &Gguf, tokens: &[String], types: &[i64]) -> Result<Vec<String>> {
        let key = if matches!(self, Kind::Bytes(_)) { "tokenizer.ggml.merges" } else { "tokenizer.ggml.scores" };
        let missing = || gguf.error(&format!("the key `{key}` is missing"));
        if let Kind::Pieces(_) = self {
            let scores = gguf.floats(key)?.ok_or_else(missing)?;
            return SentencePiece::merges(tokens, types, scores).map_err(|reason| gguf.error(&reason));
        }
        let merges = gguf.texts(key)?.ok_or_else(missing)?;
        let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
        for merge in merges {
            let Some((first, second)) = merge
                .split_once(' ')
                .filter(|(first, second)| !first.is_empty() && !second.is_empty() && !second.contains(' '))
            else {
                return Err(gguf.error(&format!("`{key}` has {merge:?}, which is not two tokens")));
            };
            let joined = format!("{first}{second}");
            if let Some(unknown) = [first, second, joined.as_str()].into_iter().find(|token| !known.contains(token)) {
                return Err(gguf.error(&format!("`{key}` has {merge:?}, and {unknown:?} is no token")));
            }
        }
        Ok(merges.to_vec())
    }
}

/// Returns the tokenizer files for `gguf`, by name, for a model with `positions` positions. The generation config has the ids of tokens that begin
/// and end texts.
pub fn files(gguf: &Gguf, positions: usize) -> Result<Files> {
    let kind = Kind::of(gguf)?;
    let tokens = Tokens::read(gguf, &kind)?;
    let special = |name: &str| tokens.special(gguf, name);
    let (bos, eos, unknown, padding) = (special("bos")?, special("eos")?, special("unknown")?, special("padding")?);
    let add_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(kind.begins());
    let begin = bos.filter(|_| add_bos);
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": begin.is_some(),
        "add_eos_token": false,
        "add_prefix_space": false,
        "bos_token": bos.map(|token| token.1),
        "eos_token": eos.map(|token| token.1),
        "unk_token": unknown.map(|token| token.1),
        "pad_token": padding.map(|token| token.1),
        "clean_up_tokenization_spaces": false,
        "model_max_length": positions,
    });
    END_IDS.iter().try_for_each(|name| special(name).map(drop))?;
    let ids = [("bos", bos), ("pad", padding)];
    let ids = ids.into_iter().filter_map(|(name, token)| Some((format!("{name}_token_id"), json!(token?.0))));
    let mut generation: Map<String, Value> = ids.collect();
    if let ends @ (Value::Number(_) | Value::Array(_)) = ends(gguf)? {
        generation.insert("eos_token_id".into(), ends);
    }
    let mut files: Files = vec![
        ("tokenizer.json".into(), as_json(tokens.tokenizer(&kind, begin, unknown))),
        ("tokenizer_config.json".into(), as_json(config)),
        ("generation_config.json".into(), as_json(generation.into())),
    ];
    if let Some(template) = gguf.text(TEMPLATE)? {
        files.push(("chat_template.jinja".into(), template.as_bytes().into()));
    }
    files.extend(further_templates(gguf)?);
    Ok(files)
}

/// The names of the tokens that end a generation: end of text, end of turn, and end of message.
const END_IDS: [&str; 3] = ["eos", "eot", "eom"];

/// The key of the chat template. The keys of further templates append their names.
const TEMPLATE: &str = "tokenizer.chat_template";

/// Returns `eos_token_id`: the tokens at which llama.cpp ends a generation.
pub(super) fn ends(gguf: &Gguf) -> Result<Value> {
    let mut ids = Vec::new();
    for name in END_IDS {
        ids.extend(gguf.count(&format!("tokenizer.ggml.{name}_token_id"))?.filter(|id| !ids.contains(id)));
    }
    Ok(match ids.as_slice() {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    })
}

/// Returns the named chat templates, such as the template for tools, as the files that transformers saves.
fn further_templates(gguf: &Gguf) -> Result<Files> {
    let mut files = Files::new();
    for key in gguf.metadata().keys() {
        let Some(name) = key.strip_prefix(TEMPLATE).and_then(|rest| rest.strip_prefix('.')) else { continue };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(gguf.error(&format!("`{key}` is a chat template whose name is no name of a file")));
        }
        let template = gguf.text(key)?.unwrap_or_default();
        files.push((format!("additional_chat_templates/{name}.jinja").into(), template.as_bytes().into()));
    }
    Ok(files)
}

/// The vocabulary of a file.
struct Tokens<'a> {
    tokens: &'a [String],
    kinds: &'a [i64],
    merges: Vec<String>,
}

impl<'a> Tokens<'a> {
    fn read(gguf: &'a Gguf, kind: &Kind) -> Result<Tokens<'a>> {
        let missing = |key: &str| gguf.error(&format!("the key `{key}` is missing"));
        let [names, kinds] = ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"];
        let tokens = gguf.texts(names)?.ok_or_else(|| missing(names))?;
        let kinds = gguf.integers(kinds)?.ok_or_else(|| missing(kinds))?;
        if kinds.len() != tokens.len() {
            return Err(gguf.error(&format!("there are {} tokens and {} types of them", tokens.len(), kinds.len())));
        }
        Ok(Tokens { tokens, kinds, merges: kind.merges(gguf, tokens, kinds)? })
    }

    /// Returns the id and the name of a special token.
    fn special(&self, gguf: &Gguf, name: &str) -> Result<Option<(usize, &'a str)>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = gguf.count(&key)? else { return Ok(None) };
        match self.tokens.get(id) {
            Some(token) => Ok(Some((id, token))),
            None => Err(gguf.error(&format!("`{key}` is {id}, and there are {} tokens", self.tokens.len()))),
        }
    }

    /// Returns the `tokenizer.json`. If `begin` is given, texts begin with this token.
    fn tokenizer(&self, kind: &Kind, begin: Option<(usize, &str)>, unknown: Option<(usize, &str)>) -> Value {
        let all = || self.tokens.iter().zip(self.kinds).enumerate();
        let used = all().filter(|(_, (_, kind))| **kind != token_kinds::UNUSED);
        let vocabulary: Map<String, Value> = used.map(|(id, (token, _))| (token.clone(), json!(id))).collect();
        let added = all().filter(|(_, (_, kind))| {
            [token_kinds::UNKNOWN, token_kinds::CONTROL, token_kinds::USER_DEFINED].contains(kind)
        });
        let added: Vec<_> = added
            .map(|(id, (token, kind))| {
                json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind != token_kinds::USER_DEFINED})
            })
            .collect();
        let template = begin.map(|(id, token)| {
            let (bos, text) = (json!({"SpecialToken": {"id": token, "type_id": 0}}), |name: &str, kind: u32| {
                json!({"Sequence": {"id": name, "type_id": kind}})
            });
            let second = json!({"SpecialToken": {"id": token, "type_id": 1}});
            json!({"type": "TemplateProcessing", "single": [bos, text("A", 0)], "pair": [bos, text("A", 0), second, text("B", 1)],
                "special_tokens": BTreeMap::from([(token, json!({"id": token, "ids": [id], "tokens": [token]}))])})
        });
        let (normalizer, cuts, decoder) = match kind {
            Kind::Bytes(pre) => (
                pre.normalizer(),
                json!({"type": "Sequence", "pretokenizers": pre.steps()}),
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            ),
            Kind::Pieces(pieces) => (pieces.normalizer(), Value::Null, pieces.decoder()),
        };
        let is_pieces = matches!(kind, Kind::Pieces(_));
        let ignores = matches!(kind, Kind::Bytes(pre) if pre.ignore_merges);
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": cuts,
            "post_processor": template,
            "decoder": decoder,
            "model": {"type": "BPE", "dropout": null, "unk_token": unknown.filter(|_| is_pieces).map(|token| token.1),
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": is_pieces, "byte_fallback": is_pieces,
                "ignore_merges": ignores, "vocab": vocabulary, "merges": self.merges},
        })
    }
}
