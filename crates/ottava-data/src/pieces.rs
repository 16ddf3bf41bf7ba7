//! Divides a text into pieces whose ids, joined, are the ids of the whole text. Short pieces are words, whose ids can be remembered. Pieces also save
//! memory: tokenizing takes hundreds of bytes of memory for each byte that is tokenized at once.

use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// The regular expressions of the words of Llama 3, and of Qwen 2 and later models, whose numbers have one digit.
const WORDS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether the ids of the [`pieces`] of a text, and of their [`words`], are the ids of the whole text. True only for known tokenizers. The patterns
/// of these tokenizers have three properties. No alternative continues with a space after anything but white space, with a non-letter after a letter,
/// or with a non-digit after a digit. No alternative looks behind. Only alternatives for white space look ahead.
pub(super) fn can_be_cut(tokenizer: &Tokenizer) -> bool {
    let normalizer = tokenizer.get_normalizer().map_or(Ok(Value::Null), serde_json::to_value);
    let local = normalizer.is_ok_and(|normalizer| normalizer.is_null() || normalizer == json!({"type": "NFC"}));
    // Other added tokens include white space, take the white space after them, or depend on their neighbours.
    let apart = |token: &tokenizers::AddedToken| {
        !token.content.contains(char::is_whitespace) && !token.rstrip && !token.single_word
    };
    local && splits_before_spaces(tokenizer) && tokenizer.get_added_tokens_decoder().values().all(apart)
}

fn splits_before_spaces(tokenizer: &Tokenizer) -> bool {
    let Some(Ok(mut steps)) = tokenizer.get_pre_tokenizer().map(serde_json::to_value) else { return false };
    let steps = match steps.get_mut("pretokenizers") {
        Some(Value::Array(steps)) => std::mem::take(steps),
        _ => vec![steps],
    };
    let bytes = |step: &Value, words: bool| {
        step["type"] == "ByteLevel" && step["add_prefix_space"] == false && step["use_regex"] == words
    };
    let known = |step: &Value| {
        let words = step["pattern"]["Regex"].as_str().is_some_and(|pattern| WORDS.contains(&pattern));
        step["type"] == "Split" && step["behavior"] == "Isolated" && step["invert"] == false && words
    };
    match &steps[..] {
        // GPT-2's words, optionally after splitting single digits.
        [last] => bytes(last, true),
        [first, last] if first["type"] == "Digits" => bytes(last, true),
        [first, last] => known(first) && bytes(last, false),
        _ => false,
    }
}

/// Divides `text` into pieces of at least `bytes` bytes. Each piece but the last ends before a space that follows anything but white space.
pub(super) fn pieces(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let is_cut = |at: usize| match text.as_bytes()[at - 1..=at] {
            [last, b' '] if last.is_ascii_graphic() => true,
            [_, b' '] => text[..at].chars().next_back().is_some_and(|last| !last.is_whitespace()),
            _ => false,
        };
        let cut = (bytes.max(1)..text.len()).find(|&at| is_cut(at));
        let (piece, others) = text.split_at(cut.unwrap_or(text.len()));
        rest = (!others.is_empty()).then_some(others);
        Some(piece)
    })
}

/// Returns the first bytes of the tokens that `tokenizer` finds in a text before it splits words.
pub(super) fn first_bytes(tokenizer: &Tokenizer) -> [bool; 256] {
    let mut first = [false; 256];
    for token in tokenizer.get_added_tokens_decoder().values() {
        token.content.bytes().take(1).for_each(|byte| first[usize::from(byte)] = true);
    }
    first
}

/// Divides a piece of [`pieces`] into words whose ids, joined, are the ids of the piece. A cut is after ASCII letters or digits and before any other
/// character. A piece with a byte of `first` stays whole. A piece that is not ASCII stays whole too, because a normalizer may join its characters.
pub(super) fn words<'a>(piece: &'a str, first: &[bool; 256]) -> impl Iterator<Item = &'a str> {
    let is_whole = piece.bytes().any(|byte| first[usize::from(byte)] || !byte.is_ascii());
    let mut rest = Some(piece);
    std::iter::from_fn(move || {
        let piece = rest.take()?;
        let class = |byte: u8| (byte.is_ascii_alphabetic(), byte.is_ascii_digit());
        let is_cut = |pair: &[u8]| pair[0].is_ascii_alphanumeric() && class(pair[0]) != class(pair[1]);
        let cut = if is_whole { None } else { piece.as_bytes().windows(2).position(is_cut) };
        let (word, others) = piece.split_at(cut.map_or(piece.len(), |cut| cut + 1));
        rest = (!others.is_empty()).then_some(others);
        Some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use proptest::prelude::*;
    use std::path::Path;

    /// Loads the bundled tokenizer with changed values of some keys.
    fn tokenizer(changes: &[(&str, Value)]) -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
        let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for (key, change) in changes {
            value[*key] = change.clone();
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), value.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    fn byte_level(words: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words})
    }

    fn sequence(first: Value, words: bool) -> Value {
        json!({"type": "Sequence", "pretokenizers": [first, byte_level(words)]})
    }

    fn split(pattern: &str) -> Value {
        sequence(
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}),
            false,
        )
    }

    fn added(content: &str, key: &str) -> (&'static str, Value) {
        let mut token = json!({"id": 0, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        token[key] = true.into();
        ("added_tokens", json!([token]))
    }

    /// Text fragments that patterns treat differently, or that might be joined.
    const FRAGMENTS: &[&str] = &[
        "word",
        ",",
        "-x",
        "I",
        "'s",
        "'LL",
        "'",
        "ſ",
        "7",
        "1234",
        "٣",
        " ",
        " ",
        " ",
        "  ",
        "\t",
        "\u{b}",
        "\n",
        "\r\n",
        "\n\n",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        "\u{200b}",
        ".",
        "...",
        "。",
        "(",
        "e\u{301}",
        "\u{301}",
        "नि",
        "日本",
        "Å",
        "½",
        "Ⅷ",
        "🎼",
        "<|endoftext|>",
        "<|end",
        "\u{0}",
        "_",
    ];

    #[test]
    fn pieces_have_the_ids_of_the_whole() {
        let nfc = ("normalizer", json!({"type": "NFC"}));
        let pre = |value: Value| ("pre_tokenizer", value);
        let digits = sequence(json!({"type": "Digits", "individual_digits": true}), true);
        let tokenizers = [
            tokenizer(&[]),
            tokenizer(&[nfc.clone(), pre(byte_level(true)), added("<|endoftext|>", "lstrip")]),
            tokenizer(&[pre(digits)]),
            tokenizer(&[pre(split(WORDS[0]))]),
            tokenizer(&[nfc, pre(split(WORDS[1]))]),
        ];
        let text = prop::collection::vec(0..FRAGMENTS.len(), 0..60)
            .prop_map(|text| text.into_iter().map(|i| FRAGMENTS[i]).collect::<String>());
        proptest!(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }, |(text in text, bytes in 0..40_usize)| {
            prop_assert_eq!(pieces(&text, bytes).collect::<String>(), text.as_str());
            for (i, tokenizer) in tokenizers.iter().enumerate() {
                let whole = tokenizer.encode_whole(&text).unwrap();
                let (mut cut, mut start) = (Vec::new(), 0);
                for piece in tokenizer.pieces(&text, bytes).flat_map(|piece| tokenizer.words(piece)) {
                    let tokens = tokenizer.encode_whole(piece).unwrap();
                    cut.extend(tokens.into_iter().map(|(id, first, last)| (id, start + first, start + last)));
                    start += piece.len() as u32;
                }
                prop_assert_eq!(cut, whole.clone(), "tokenizer {}: {:?}", i, text);
                let ids: Vec<u32> = whole.into_iter().map(|token| token.0).collect();
                prop_assert_eq!(tokenizer.encode_words(&text).unwrap(), ids, "tokenizer {}: {:?}", i, text);
            }
        });
        let long = FRAGMENTS.concat().repeat(2000);
        for tokenizer in &tokenizers {
            assert_eq!(tokenizer.encode_words(&long).unwrap(), tokenizer.encode(&long).unwrap(), "on all cores");
        }
        let text = "one two, three 4  5\nsix.\n\u{a0} é 7\u{3000} 8\u{b} \t9\tten";
        let pieces = ["one", " two,", " three", " 4", "  5\nsix.\n\u{a0} é", " 7\u{3000} 8\u{b} \t9\tten"];
        for tokenizer in &tokenizers {
            assert_eq!(tokenizer.pieces(text, 1).collect::<Vec<_>>(), pieces);
        }
        for (piece, words) in [
            (" (don't)", vec![" (don", "'t", ")"]),
            ("  5\nsix.\n7th", vec!["  5", "\nsix", ".\n7", "th"]),
            (" é,a,", vec![" é,a,"]),
            (" a<b,", vec![" a<b,"]),
        ] {
            assert_eq!(tokenizers[1].words(piece).collect::<Vec<_>>(), words);
        }
    }

    #[test]
    fn texts_are_whole_where_their_pieces_might_have_other_ids() {
        let pre = |value: Value| ("pre_tokenizer", value);
        let with_prefix =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        for change in [
            pre(Value::Null),
            pre(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true})),
            pre(with_prefix),
            pre(byte_level(false)),
            pre(split(r"\w+ ?|\W")),
            ("normalizer", json!({"type": "Prepend", "prepend": "▁"})),
            ("normalizer", json!({"type": "Strip", "strip_left": true, "strip_right": true})),
            added("<|endoftext|>", "rstrip"),
            added("<|endoftext|>", "single_word"),
            added("end of text", "special"),
            added("end\tof", "special"),
        ] {
            let text = "one two three";
            assert_eq!(
                tokenizer(std::slice::from_ref(&change)).pieces(text, 1).collect::<Vec<_>>(),
                [text],
                "{change:?}"
            );
        }
    }
}
