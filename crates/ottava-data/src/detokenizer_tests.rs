use super::*;
use serde_json::{Value, json};
use std::path::Path;

fn byte_level() -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap()
}

/// Returns a tokenizer with these tokens and this decoder.
fn tokenizer(tokens: &[&str], decoder: Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.to_string(), id.into())).collect();
    let special = json!({"id": 0, "content": tokens[0], "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let file = json!({"version": "1.0", "added_tokens": [special], "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": tokens[0]}});
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

/// Returns a tokenizer with Llama 2's decoder.
fn sentencepiece() -> Tokenizer {
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let steps = json!([replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]);
    let tokens = ["<s>", "▁the", "▁otter", "▁sw", "im", "▁", "▁▁", "/", "<0xE6>", "<0x97>", "<0xA5>", "<0xC1>"];
    tokenizer(&tokens, json!({"type": "Sequence", "decoders": steps}))
}

/// Returns the pieces of text of `tokens` after `prompt`, with the text of an incomplete character at the end.
fn pieces(tokenizer: &Tokenizer, prompt: &[&str], tokens: &[&str]) -> Vec<String> {
    let id = |name: &&str| tokenizer.token_id(name).unwrap();
    let prompt: Vec<u32> = prompt.iter().map(id).collect();
    let mut all = Detokenizer::after(tokenizer, &prompt).unwrap();
    let mut pieces: Vec<String> = tokens.iter().map(|name| all.push(tokenizer, id(name)).unwrap().text).collect();
    pieces.extend(Some(all.finish().to_string()).filter(|rest| !rest.is_empty()));
    pieces
}

#[test]
fn continuations_keep_their_first_space() {
    let tokenizer = sentencepiece();
    assert_eq!(pieces(&tokenizer, &["<s>", "▁the", "▁otter"], &["▁sw", "▁sw", "im"]), [" sw", " sw", "im"]);
    assert_eq!(
        pieces(&tokenizer, &[], &["▁the", "▁sw", "im"]),
        ["the", " sw", "im"],
        "the first space of a text is none"
    );
    assert_eq!(pieces(&tokenizer, &["<s>"], &["▁the", "▁▁", "▁", "▁sw"]), ["the", "  ", " ", " sw"]);
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let metaspace = self::tokenizer(&["<s>", "▁the", "▁sw"], metaspace);
    assert_eq!(pieces(&metaspace, &[], &["▁the", "▁sw"]), ["the", " sw"]);
    assert_eq!(pieces(&metaspace, &["▁the"], &["▁sw", "▁sw"]), [" sw", " sw"]);
    let words = self::tokenizer(
        &["[CLS]", "the", "##re", "sw"],
        json!({"type": "WordPiece", "prefix": "##", "cleanup": false}),
    );
    assert_eq!(pieces(&words, &["the"], &["##re", "sw"]), ["re", " sw"]);
    // If a token ends a word, the space after the word comes with the next token.
    let suffixes = self::tokenizer(&["<s>", "the</w>", "s", "w</w>"], json!({"type": "BPEDecoder", "suffix": "</w>"}));
    assert_eq!(pieces(&suffixes, &["the</w>"], &["s", "w</w>", "the</w>"]), [" s", "w", " the"]);
}

#[test]
fn bytes_are_those_of_the_token() {
    let tokenizer = sentencepiece();
    let bytes = |before: &[&str], token: &str| {
        let ids: Vec<u32> = before.iter().map(|name| tokenizer.token_id(name).unwrap()).collect();
        let all = Detokenizer::after(&tokenizer, &ids).unwrap();
        all.bytes(&tokenizer, tokenizer.token_id(token).unwrap()).unwrap()
    };
    assert_eq!(
        [bytes(&["▁the"], "<0xC1>"), bytes(&["▁the"], "▁sw"), bytes(&[], "▁sw")],
        [vec![0xc1], b" sw".into(), b"sw".into()]
    );
    let level = byte_level();
    let ids = level.encode("a 🎼 日!").unwrap();
    let all: Vec<u8> = ids.iter().flat_map(|&id| Detokenizer::default().bytes(&level, id).unwrap()).collect();
    assert_eq!(all, "a 🎼 日!".as_bytes());
    assert!(Detokenizer::default().bytes(&level, 4_000_000_000).unwrap().is_empty(), "an id without an entry");
}

#[test]
fn broken_characters_become_one_replacement_and_the_text_goes_on() {
    let tokenizer = sentencepiece();
    assert_eq!(pieces(&tokenizer, &["▁the"], &["<0xE6>", "<0x97>", "<0xA5>", "/"]), ["", "", "日", "/"]);
    assert_eq!(pieces(&tokenizer, &["▁the"], &["<0xC1>", "/"]), ["\u{fffd}", "/"]);
    assert_eq!(pieces(&tokenizer, &["▁the"], &["<0xE6>", "<0x97>", "/", "▁sw"]), ["", "", "\u{fffd}/", " sw"]);
    // A valid character before a broken character is kept.
    let bytes = ["<0xE6>", "<0x97>", "<0xA5>", "<0xE6>", "/", "<0xE6>"];
    assert_eq!(pieces(&tokenizer, &["▁the"], &bytes), ["", "", "日", "", "\u{fffd}/", "", "\u{fffd}"]);
    assert_eq!(pieces(&tokenizer, &["▁the", "<0xE6>", "<0x97>"], &["<0xA5>"]), ["日"], "begun by the prompt");
    let id = |name: &str| tokenizer.token_id(name).unwrap();
    let mut all = Detokenizer::default();
    let breaks = |decoded: Decoded| decoded.breaks;
    let found = ["▁the", "<0xE6>", "/", "<0xC1>", "<0xE6>", "<0x97>", "<0xC1>"]
        .map(|name| breaks(all.push(&tokenizer, id(name)).unwrap()));
    assert_eq!(found, [false, false, true, false, false, false, true]);
}
