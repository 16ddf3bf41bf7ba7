use super::*;
use crate::tokenizer;

/// Loads a tokenizer with the words `a`, `b` and `c` and the special token `<eos>` (id 3) from a folder with these `files`.
fn load(files: &[(&str, Value)]) -> Result<tokenizer::Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let file = serde_json::json!({
        "version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [{"id": 3, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "<eos>": 3}, "unk_token": "a"},
    });
    for (name, json) in files.iter().chain([&("tokenizer.json", file)]) {
        std::fs::write(folder.path().join(name), json.to_string()).unwrap();
    }
    tokenizer::Tokenizer::load(folder.path())
}

#[test]
fn tokens_of_other_files_are_added_with_their_ids() {
    use serde_json::json;
    let decoder = json!({"added_tokens_decoder": {
        "5": {"content": "<|b|>", "special": true}, "4": {"content": "<|tool|>", "special": true}, "3": {"content": "<eos>", "special": true}}});
    for (files, expected) in [
        (vec![("tokenizer_config.json", decoder)], vec![0, 4, 1, 5]),
        (
            vec![("tokenizer_config.json", json!({"additional_special_tokens": ["<|tool|>", {"content": "<|b|>"}]}))],
            vec![0, 4, 1, 5],
        ),
        (
            vec![(
                "tokenizer_config.json",
                json!({"extra_special_tokens": {"tool_token": "<|tool|>", "b_token": "<|b|>"}}),
            )],
            vec![0, 4, 1, 5],
        ),
        (vec![("added_tokens.json", json!({"<|tool|>": 4, "<|b|>": 5}))], vec![0, 4, 1, 5]),
        (
            vec![("special_tokens_map.json", json!({"additional_special_tokens": ["<|tool|>", "<|b|>"]}))],
            vec![0, 4, 1, 5],
        ),
        // A missing `pad_token` gets the id before the other added tokens, as in transformers.
        (
            vec![(
                "tokenizer_config.json",
                json!({"pad_token": "<pad>", "additional_special_tokens": ["<|tool|>", "<|b|>"]}),
            )],
            vec![0, 5, 1, 6],
        ),
    ] {
        let tokenizer = load(&files).unwrap();
        assert_eq!(tokenizer.encode("a <|tool|> b <|b|>").unwrap(), expected, "{files:?}");
        assert!(tokenizer.is_special(*expected.last().unwrap()) || files[0].0 == "added_tokens.json");
    }
    let plain = load(&[]).unwrap();
    let padded = load(&[("tokenizer_config.json", json!({"pad_token": "<pad>"}))]).unwrap();
    assert_eq!(
        (plain.vocab_size(), padded.vocab_size(), plain.sha256()),
        (4, 4, padded.sha256()),
        "nothing reads this token"
    );
    let conflict = json!({"added_tokens_decoder": {"9": {"content": "<|tool|>", "special": true}}});
    let error = load(&[("tokenizer_config.json", conflict)]).unwrap_err().to_string();
    assert!(error.contains("\"<|tool|>\" has the id 9, and with tokenizer.json it would have the id 4"), "{error}");
}

#[test]
fn a_special_token_ends_documents_rather_than_a_tag_of_html() {
    use serde_json::json;
    let config = json!({"eos_token": "<end_of_turn>", "added_tokens_decoder": {
        "4": {"content": "</s>", "special": false}, "5": {"content": "<end_of_turn>", "special": true}}});
    let tokenizer = load(&[("tokenizer_config.json", config)]).unwrap();
    assert_eq!((tokenizer.eos_id(), tokenizer.eos_ids()), (Some(3), &[3, 5][..]));
}
