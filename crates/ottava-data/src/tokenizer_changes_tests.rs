use std::path::Path;

use serde_json::Value;

use super::{BuiltInTemplate, ChangedTokenizer, TokenizerChanges};
use crate::chat::ChatTemplate;
use crate::tokenizer::Tokenizer;
use ottava_jinja::Clock;

/// Creates a folder with the bundled tokenizer, which has 4,096 tokens, and the given files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    std::fs::copy(bundled, folder.path().join("tokenizer.json")).unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

const NONE: TokenizerChanges<'static> =
    TokenizerChanges { added_tokens: &[], added_special_tokens: &[], special_tokens: &[], chat_template: None };

fn read(changed: &ChangedTokenizer, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(changed.folder.join(name)).unwrap()).unwrap()
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| word.to_string()).collect()
}

#[test]
fn added_tokens_get_the_ids_after_the_vocabulary() {
    let (source, below) =
        (folder(&[("tokenizer_config.json", r#"{"model_max_length": 7}"#)]), tempfile::tempdir().unwrap());
    let (plain, special) = (strings(&["<tool>", "and"]), strings(&["<|im_start|>", "<|im_end|>"]));
    let changes = TokenizerChanges { added_tokens: &plain, added_special_tokens: &special, ..NONE };
    let changed = changes.write(source.path(), below.path()).unwrap();
    let tokenizer = Tokenizer::load(&changed.folder).unwrap();
    // " and" has an entry in the vocabulary, "and" does not.
    let ids = ["<tool>", "and", "<|im_start|>", "<|im_end|>"].map(|token| tokenizer.token_id(token).unwrap());
    let first = if Tokenizer::load(source.path()).unwrap().token_id("and").is_some() { 4097 } else { 4098 };
    assert_eq!((ids[0], ids[2], ids[3]), (4096, first, first + 1));
    assert_eq!((changed.vocabulary, tokenizer.vocab_size()), (ids[3] as usize + 1, ids[3] as usize + 1));
    assert_eq!([0, 2, 3].map(|at| tokenizer.is_special(ids[at])), [false, true, true]);
    assert_eq!(tokenizer.encode("<|im_start|>x<tool>").unwrap().iter().filter(|id| **id >= 4096).count(), 2);
    // transformers reads the tokens from either file.
    let config = read(&changed, "tokenizer_config.json");
    assert_eq!(config["model_max_length"], 7);
    assert_eq!(config["added_tokens_decoder"][ids[3].to_string()]["content"], "<|im_end|>");
    assert_eq!(config["added_tokens_decoder"][ids[3].to_string()]["special"], true);
    assert!(changed.ids.is_empty());
    let new: Vec<&str> = changed.new_tokens.iter().map(String::as_str).filter(|token| *token != "and").collect();
    assert_eq!((new, changed.new_tokens.len() as u32), (vec!["<tool>", "<|im_start|>", "<|im_end|>"], ids[3] - 4095));
    // The same changes are the same folder; changes of a changed tokenizer change nothing.
    assert_eq!(changes.write(source.path(), below.path()).unwrap(), changed);
    assert_eq!(changes.write(&changed.folder, below.path()).unwrap().vocabulary, changed.vocabulary);
    assert_eq!(std::fs::read_dir(below.path()).unwrap().count(), 1, "no partial folder is left");
}

#[test]
fn special_tokens_end_texts_and_are_in_all_files() {
    let map = ("special_tokens_map.json", r#"{"eos_token": "<|endoftext|>"}"#);
    let (source, below) = (folder(&[("config.json", r#"{"eos_token_id": 0}"#), map]), tempfile::tempdir().unwrap());
    let names = [("eos_token".to_string(), "<|im_end|>".to_string()), ("pad_token".into(), "<|pad|>".into())];
    let changed = TokenizerChanges { special_tokens: &names, ..NONE }.write(source.path(), below.path()).unwrap();
    assert_eq!(changed.ids, [("eos_token_id", 4096), ("pad_token_id", 4097)]);
    let tokenizer = Tokenizer::load(&changed.folder).unwrap();
    assert_eq!(
        (tokenizer.eos_ids(), tokenizer.eos_id(), tokenizer.padding_id()),
        (&[0, 4096][..], Some(0), Some(4097))
    );
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        assert_eq!(read(&changed, file)["eos_token"], "<|im_end|>", "{file}");
    }
}

#[test]
fn a_chat_template_brings_its_end_of_turn() {
    let (own, below) = (r#"{"chat_template": "old", "bos_token": "<|endoftext|>"}"#, tempfile::tempdir().unwrap());
    let source = folder(&[("tokenizer_config.json", own), ("chat_template.json", r#"{"chat_template": "older"}"#)]);
    let special = strings(&["<|im_start|>", "<|im_end|>"]);
    let chatml = TokenizerChanges { chat_template: BuiltInTemplate::find("chatml"), ..NONE };
    let error = chatml.write(source.path(), below.path()).unwrap_err().to_string();
    assert!(error.contains("`added_special_tokens = [\"<|im_start|>\", \"<|im_end|>\"]` under [tokenizer]"), "{error}");
    let changed =
        TokenizerChanges { added_special_tokens: &special, ..chatml }.write(source.path(), below.path()).unwrap();
    let template = ChatTemplate::load(&changed.folder, None, Clock::Fixed).unwrap().unwrap();
    assert!(template.source().contains("<|im_start|>") && !changed.folder.join("chat_template.json").exists());
    let config = read(&changed, "tokenizer_config.json");
    assert_eq!((&config["eos_token"], config.get("chat_template")), (&Value::from("<|im_end|>"), None));
    assert_eq!(changed.ids, [("eos_token_id", 4097)]);
}

#[test]
fn further_chat_templates_are_copied_unless_a_built_in_template_replaces_all() {
    let (source, below) = (folder(&[("chat_template.jinja", "default")]), tempfile::tempdir().unwrap());
    let more = source.path().join("additional_chat_templates");
    std::fs::create_dir(&more).unwrap();
    std::fs::write(more.join("rag.jinja"), "with documents").unwrap();
    let tokens = strings(&["<|im_start|>", "<|im_end|>"]);
    let changes = TokenizerChanges { added_special_tokens: &tokens, ..NONE };
    let rag = |changes: TokenizerChanges| {
        let folder = changes.write(source.path(), below.path()).unwrap().folder;
        std::fs::read_to_string(folder.join("additional_chat_templates/rag.jinja")).ok()
    };
    assert_eq!(rag(changes).as_deref(), Some("with documents"));
    assert_eq!(rag(TokenizerChanges { chat_template: BuiltInTemplate::find("chatml"), ..changes }), None);
}

#[test]
fn a_beginning_that_the_post_processor_writes_stays_as_it_is() {
    let bos = |token: &str| [("bos_token".to_string(), token.to_string())];
    let (source, below) = (folder(&[]), tempfile::tempdir().unwrap());
    let write = |token: &str| {
        let names = bos(token);
        TokenizerChanges { special_tokens: &names, ..NONE }.write(source.path(), below.path()).map(drop)
    };
    write("<|begin|>").unwrap();
    let path = source.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    });
    std::fs::write(&path, file.to_string()).unwrap();
    write("<|endoftext|>").unwrap();
    let error = write("<|begin|>").unwrap_err().to_string();
    assert!(error.contains("the bos_token \"<|begin|>\"") && error.contains("(ids [0])"), "{error}");
    // This key replaces the beginning that the post-processor writes.
    std::fs::write(source.path().join("tokenizer_config.json"), r#"{"add_bos_token": true}"#).unwrap();
    write("<|begin|>").unwrap();
}

#[test]
fn changes_that_make_no_sense_are_errors() {
    let (source, below) = (folder(&[]), tempfile::tempdir().unwrap());
    let error = |changes: TokenizerChanges| changes.write(source.path(), below.path()).unwrap_err().to_string();
    let (empty, odd) = (strings(&[""]), [("end".to_string(), "x".to_string())]);
    let text = error(TokenizerChanges { added_tokens: &empty, ..NONE });
    assert!(text.contains("adds an empty token"), "{text}");
    let text = error(TokenizerChanges { special_tokens: &odd, ..NONE });
    assert!(text.contains("has the name `end`; names are bos_token, eos_token"), "{text}");
    let text = error(TokenizerChanges { chat_template: BuiltInTemplate::find("alpaca"), ..NONE });
    assert!(text.contains("no file beside") && text.contains("eos_token"), "{text}");
    assert_eq!(std::fs::read_dir(below.path()).unwrap().count(), 0, "nothing is written");
}
