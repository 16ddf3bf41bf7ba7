//! Cuts a long text into pieces that together have the ids of the whole: tokenizing takes hundreds of bytes of memory for each byte
//! that is tokenized at once.

use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// The words of Llama 3, and those of Qwen 2 and later, whose numbers have one digit.
const WORDS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether `tokenizer` gives a text cut between a letter or digit and a space the ids of the whole. True only for forms known to: no
/// alternative of their patterns takes a space after a letter, digit or mark, none looks behind, and only white space looks ahead.
pub(super) fn cuts_at_spaces(tokenizer: &Tokenizer) -> bool {
    let normalizer = tokenizer.get_normalizer().map_or(Ok(Value::Null), serde_json::to_value);
    let local = normalizer.is_ok_and(|normalizer| normalizer.is_null() || normalizer == json!({"type": "NFC"}));
    // Such tokens reach over a space, take the one after them, or look at their neighbours.
    let apart = |token: &tokenizers::AddedToken| !token.content.contains(' ') && !token.rstrip && !token.single_word;
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
        // GPT-2's words, alone or after single digits.
        [last] => bytes(last, true),
        [first, last] if first["type"] == "Digits" => bytes(last, true),
        [first, last] => known(first) && bytes(last, false),
        _ => false,
    }
}

/// `text` in pieces of at least `bytes`, each but the last ending in a letter or digit with a space after it.
pub(super) fn pieces(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let spaces = (bytes.max(1)..text.len()).filter(|&at| text.as_bytes()[at] == b' ');
        let mut cuts = spaces.filter(|&at| text[..at].chars().next_back().is_some_and(char::is_alphanumeric));
        let (piece, others) = text.split_at(cuts.next().unwrap_or(text.len()));
        rest = (!others.is_empty()).then_some(others);
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Tokenizer;
    use proptest::prelude::*;
    use std::path::Path;

    /// The bundled tokenizer with other values of some keys.
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

    /// Fragments that patterns treat differently, or might join.
    const FRAGMENTS: &[&str] = &[
        "word",
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
                let whole = tokenizer.encode_in_pieces(&text, usize::MAX).unwrap();
                prop_assert_eq!(tokenizer.encode_in_pieces(&text, bytes).unwrap(), whole, "tokenizer {}: {:?}", i, text);
            }
        });
        let text = "one two, three 4 5\nsix";
        for tokenizer in tokenizers {
            assert_eq!(tokenizer.pieces(text, 1).collect::<Vec<_>>(), ["one", " two, three", " 4", " 5\nsix"]);
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
