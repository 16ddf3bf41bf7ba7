use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Tokenizer;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")
}

/// Creates a folder with the bundled `tokenizer.json` and the given `files`.
fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(bundled().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn error(path: &Path) -> String {
    Tokenizer::load(path).unwrap_err().to_string()
}

#[test]
fn the_bundled_tokenizer_loads_from_folder_and_file() {
    for path in [bundled(), bundled().join("tokenizer.json")] {
        let tokenizer = Tokenizer::load(&path).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (4096, Some(0)));
    }
}

#[test]
fn any_text_comes_back_unchanged() {
    let tokenizer = Tokenizer::load(&bundled()).unwrap();
    for text in ["canary (noun): any finch", " leading", "", "two\n\nlines\r\n", "héllo 日本 🎼\u{0}", "<|endoftext|>"]
    {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    }
    // These ids come from Python's tokenizers 0.23.3.
    assert_eq!(tokenizer.encode("canary (noun): any").unwrap(), [2032, 478, 262, 271, 264, 541]);
    assert_eq!(tokenizer.encode("a<|endoftext|>").unwrap().last(), Some(&0));
    assert_eq!(tokenizer.decode(&[4_000_000_000]).unwrap(), "", "an id without an entry");
}

#[test]
fn generation_ends_at_every_token_that_a_file_names() {
    let eos_of = |files: &[(&str, &str)]| Tokenizer::load(folder_with(files).path()).unwrap().eos_ids().to_vec();
    let by_name = ("tokenizer_config.json", r#"{"eos_token": {"content": "!"}}"#);
    let by_id = ("config.json", r#"{"eos_token_id": 7}"#);
    let by_list = ("generation_config.json", r#"{"eos_token_id": [9, 7]}"#);
    assert_eq!(eos_of(&[]), [0], "the common name");
    assert_eq!(eos_of(&[by_name]), [1]);
    assert_eq!(eos_of(&[by_name, by_id]), [7, 1]);
    assert_eq!(eos_of(&[by_name, by_id, by_list]), [9, 7, 1]);
    assert_eq!(eos_of(&[by_name, ("generation_config.json", r#"{"eos_token_id": null}"#)]), [1]);
    assert_eq!(eos_of(&[("config.json", r#"{"eos_token_id": [4096, 7], "x": Infinity}"#)]), [7], "no token has the id");
    assert_eq!(eos_of(&[("config.json", r#"{"eos_token_id": null, "text_config": {"eos_token_id": 7}}"#)]), [7]);
}

/// Returns the bundled tokenizer with more tokens, from id 4096 on. Its post-processor puts `start` before a text.
fn chat_tokenizer(tokens: &[&str], start: Option<&str>, files: &[(&str, &str)]) -> Tokenizer {
    let folder = folder_with(files);
    let path = folder.path().join("tokenizer.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        value["added_tokens"].as_array_mut().unwrap().push(json!({"id": 4096 + i, "content": token,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
    }
    if let Some(start) = start {
        let id = 4096 + tokens.iter().position(|token| *token == start).unwrap();
        let (text, special) =
            (json!({"Sequence": {"id": "A", "type_id": 0}}), json!({"SpecialToken": {"id": start, "type_id": 0}}));
        value["post_processor"] = json!({"type": "TemplateProcessing", "single": [special, text], "pair": [text],
            "special_tokens": {start: {"id": start, "ids": [id], "tokens": [start]}}});
    }
    std::fs::write(path, value.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

#[test]
fn documents_end_with_the_end_of_text_and_not_with_that_of_a_turn() {
    for (tokens, files, end, stops) in [
        // SmolLM2-Instruct: the files name only the end of a turn.
        (
            &["<|im_start|>", "<|im_end|>"][..],
            &[
                ("generation_config.json", r#"{"eos_token_id": 4097}"#),
                ("tokenizer_config.json", r#"{"eos_token": "<|im_end|>"}"#),
            ][..],
            0,
            &[0, 4097][..],
        ),
        // Qwen2.5-Instruct: the list names the end of a turn first.
        (&["<|im_end|>"], &[("generation_config.json", r#"{"eos_token_id": [4096, 0]}"#)], 0, &[0, 4096]),
        // Llama-3-Instruct.
        (
            &["<|end_of_text|>", "<|eot_id|>"],
            &[
                ("config.json", r#"{"eos_token_id": [4096, 4097]}"#),
                ("tokenizer_config.json", r#"{"eos_token": "<|eot_id|>"}"#),
            ],
            4096,
            &[4096, 4097],
        ),
    ] {
        let tokenizer = chat_tokenizer(tokens, None, files);
        assert_eq!((tokenizer.eos_id(), tokenizer.eos_ids()), (Some(end), stops));
        assert_eq!(tokenizer.encode_document("!").unwrap(), [1, end]);
    }
}

#[test]
fn a_document_begins_once_with_the_beginning_of_text() {
    let bos = "<|begin_of_text|>";
    let config = |add: &str| format!(r#"{{"bos_token": "{bos}"{add}}}"#);
    for (start, add, begins) in [
        (Some(bos), "", true),
        (None, "", false),
        // The configuration overrides the post-processor.
        (None, r#", "add_bos_token": true"#, true),
        (Some(bos), r#", "add_bos_token": false"#, false),
        (None, r#", "add_bos_token": null"#, false),
    ] {
        let tokenizer = chat_tokenizer(&[bos], start, &[("tokenizer_config.json", &config(add))]);
        let expected: &[u32] = if begins { &[4096, 1, 0] } else { &[1, 0] };
        assert_eq!(tokenizer.encode_document("!").unwrap(), expected);
        assert_eq!(tokenizer.encode_prompt("!").unwrap(), expected[..expected.len() - 1]);
        assert_eq!(tokenizer.encode("!").unwrap(), [1]);
        assert_eq!(tokenizer.encode_prompt(&format!("{bos}!")).unwrap(), [4096, 1], "never two");
        assert_eq!(tokenizer.encode_prompt("").unwrap(), [if begins { 4096 } else { 0 }]);
        let says = if begins {
            "begin with <|begin_of_text|> (4096) and end with <|endoftext|> (0)"
        } else {
            "begin with no token of their own"
        };
        assert!(tokenizer.describe_edges().contains(says), "{}", tokenizer.describe_edges());
    }
    let unknown = folder_with(&[("tokenizer_config.json", r#"{"bos_token": "<bos>", "add_bos_token": true}"#)]);
    assert!(error(unknown.path()).contains("`bos_token` is \"<bos>\", which is not in tokenizer.json"));
}

#[test]
fn wrong_special_tokens_are_named() {
    for (file, text, expected) in [
        (
            "generation_config.json",
            r#"{"eos_token_id": 4096}"#,
            "config.json: `eos_token_id` is 4096, but tokenizer.json has no such id",
        ),
        ("config.json", r#"{"eos_token_id": -1}"#, "`eos_token_id` is -1; expected a token"),
        ("generation_config.json", r#"{"eos_token_id": [1, "x y"]}"#, r#"is "x y", which is not in tokenizer.json"#),
        ("tokenizer_config.json", r#"{"eos_token": "<none>"}"#, r#"`eos_token` is "<none>", which is not"#),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
    ] {
        let message = error(folder_with(&[(file, text)]).path());
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn damaged_tokenizers_are_errors() {
    let whole = std::fs::read_to_string(bundled().join("tokenizer.json")).unwrap();
    let model = r#"{"version":"1.0","model":{"type":"BPE","vocab":VOCAB,"merges":MERGES}}"#;
    let model = |vocab: &str, merges: &str| model.replace("VOCAB", vocab).replace("MERGES", merges);
    for text in [
        String::new(),
        "null".into(),
        "[]".into(),
        "[".repeat(100_000),
        whole[..whole.len() / 2].to_string(),
        model("{}", "[]"),
        model(r#"{"a":0}"#, r#"["a b"]"#),
        model(r#"{"a":-1}"#, "[]"),
        r#"{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"(("},"behavior":"Isolated","invert":false},"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#.into(),
    ] {
        let folder = folder_with(&[("tokenizer.json", &text)]);
        let message = error(folder.path());
        assert!(message.contains("tokenizer.json: "), "{message}");
    }
    assert!(error(Path::new("/nowhere/tokenizer.json")).contains("/nowhere/tokenizer.json"));
}

#[test]
fn truncation_asked_for_by_the_file_is_switched_off() {
    let whole = std::fs::read_to_string(bundled().join("tokenizer.json")).unwrap();
    let limited = r#""truncation": {"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}"#;
    assert!(whole.contains(r#""truncation": null"#));
    let folder = folder_with(&[("tokenizer.json", &whole.replace(r#""truncation": null"#, limited))]);
    let ids = Tokenizer::load(folder.path()).unwrap().encode("canary (noun): any").unwrap();
    assert_eq!(ids.len(), 6);
}
