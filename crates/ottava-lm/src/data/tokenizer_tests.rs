use std::path::{Path, PathBuf};

use super::Tokenizer;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")
}

/// A folder with the bundled `tokenizer.json` and the given files beside it.
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
    // The ids that Python's tokenizers 0.23.3 gives.
    assert_eq!(tokenizer.encode("canary (noun): any").unwrap(), [2032, 478, 262, 271, 264, 541]);
    assert_eq!(tokenizer.encode("a<|endoftext|>").unwrap().last(), Some(&0));
    assert_eq!(tokenizer.decode(&[4_000_000_000]).unwrap(), "", "an id without an entry");
}

#[test]
fn ids_that_end_a_text_come_from_the_first_file_that_names_them() {
    let eos_of = |files: &[(&str, &str)]| Tokenizer::load(folder_with(files).path()).unwrap().eos_ids().to_vec();
    let by_name = ("tokenizer_config.json", r#"{"eos_token": {"content": "!"}}"#);
    let by_id = ("config.json", r#"{"eos_token_id": 7}"#);
    let by_list = ("generation_config.json", r#"{"eos_token_id": [9, 7]}"#);
    assert_eq!(eos_of(&[]), [0], "the common name");
    assert_eq!(eos_of(&[by_name]), [1]);
    assert_eq!(eos_of(&[by_name, by_id]), [7]);
    assert_eq!(eos_of(&[by_name, by_id, by_list]), [9, 7]);
    assert_eq!(eos_of(&[by_name, ("generation_config.json", r#"{"eos_token_id": null}"#)]), [1]);
}

#[test]
fn wrong_special_tokens_are_named() {
    for (file, text, expected) in [
        (
            "config.json",
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
