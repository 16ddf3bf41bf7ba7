//! Finds parts of a `tokenizer.json` that would end the process, before the tokenizers crate reads them.
//!
//! Panics of the crate are caught, but a table that claims gigabytes ends the process.

use serde::Deserialize;
use serde_json::Value;

/// The maximum factor by which the parts of a tokenizer may lengthen a text. Tokenizers in common use lengthen it three to twelve times.
const MAX_GROWTH: f64 = 1000.0;

/// The parts of the file that have patterns and tables. The vocabulary is skipped.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
}

/// Errors with the reason if a part of the file cannot be used.
pub(super) fn check(file: &[u8]) -> Result<(), String> {
    let Parts { normalizer, pre_tokenizer, decoder } = serde_json::from_slice(file).map_err(|e| e.to_string())?;
    let mut lengthening = 1.0;
    for (name, part) in [("normalizer", &normalizer), ("pre_tokenizer", &pre_tokenizer), ("decoder", &decoder)] {
        check_part(part).map_err(|reason| format!("`{name}`: {reason}"))?;
        // Decoders read the tokens of a text, not the output of the other parts, so their factor is separate.
        lengthening = if name == "decoder" { growth(part) } else { lengthening * growth(part) };
        if lengthening > MAX_GROWTH {
            return Err(format!(
                "`{name}`: it can make a text more than {MAX_GROWTH} times as long; remove replacements"
            ));
        }
    }
    Ok(())
}

/// Returns the maximum factor by which a part and its inner parts can lengthen a text.
fn growth(part: &Value) -> f64 {
    let inner: f64 = match part {
        Value::Array(parts) => parts.iter().map(growth).product(),
        Value::Object(fields) => fields.values().map(growth).product(),
        _ => return 1.0,
    };
    let content = part["content"].as_str().map_or(0, str::len) as f64;
    let own = match part["type"].as_str().unwrap_or_default() {
        "Replace" => match part["pattern"]["String"].as_str() {
            Some(pattern) => content / pattern.len().max(1) as f64,
            // A regular expression may match the empty text between any two bytes.
            None => content + 1.0,
        },
        // A prefix is added once per text, so it counts as a text of 64 bytes.
        "Prepend" => 1.0 + part["prepend"].as_str().map_or(0, str::len) as f64 / 64.0,
        "ByteLevel" => 2.0,
        "Metaspace" => 3.0,
        "Precompiled" => 4.0,
        _ => 1.0,
    };
    inner * own.max(1.0)
}

/// Checks a part and its inner parts.
fn check_part(part: &Value) -> Result<(), String> {
    match part {
        Value::Array(parts) => parts.iter().try_for_each(check_part),
        Value::Object(fields) => {
            let kind = part["type"].as_str().unwrap_or_default();
            let is_empty = |kind: &str| part["pattern"][kind].as_str().is_some_and(str::is_empty);
            if is_empty("String") || is_empty("Regex") {
                return Err(format!("the pattern of a `{kind}` is empty"));
            }
            if let Some(table) = part["precompiled_charsmap"].as_str() {
                check_table(table).map_err(|reason| format!("`precompiled_charsmap` of a `{kind}`: {reason}"))?;
            }
            fields.values().try_for_each(check_part)
        }
        _ => Ok(()),
    }
}

/// Checks a table in base64: four bytes with the size of a trie (little-endian), the trie, and text.
fn check_table(table: &str) -> Result<(), String> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let start: Option<Vec<u8>> = table.bytes().take(6).map(digit).collect();
    let bits = match start {
        Some(digits) if digits.len() == 6 => digits.iter().fold(0_u64, |bits, &digit| bits << 6 | u64::from(digit)),
        _ => return Err("it has no four bytes of base64".into()),
    };
    let size = (bits >> 4) as u32;
    let size = u64::from(size.swap_bytes());
    let bytes = table.trim_end_matches('=').len() as u64 * 3 / 4;
    match size {
        0 => Err("its trie is empty".into()),
        size if size > bytes - 4 => Err(format!("it says that its trie has {size} bytes, and {} follow", bytes - 4)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_claim_more_than_they_have_are_refused() {
        for (table, expected) in [
            ("/////w==", Err("it says that its trie has 4294967295 bytes, and 0 follow")),
            ("AAAAAA==", Err("its trie is empty")),
            ("AA==", Err("it has no four bytes of base64")),
            ("", Err("it has no four bytes of base64")),
            ("BAAAAAEAAAA=", Ok(())),
        ] {
            assert_eq!(check_table(table), expected.map_err(String::from), "{table}");
        }
    }

    #[test]
    fn parts_that_multiply_a_text_are_refused() {
        let check = |part: &str, kinds: Vec<Value>| {
            let key = if part == "normalizer" { "normalizers" } else { "pretokenizers" };
            check(serde_json::json!({"model": {}, part: {"type": "Sequence", key: kinds}}).to_string().as_bytes())
        };
        let replace = |pattern: Value, content: &str| serde_json::json!({"type": "Replace", "pattern": pattern, "content": content});
        let string = |text: &str| serde_json::json!({"String": text});
        let ten = replace(string("a"), &"a".repeat(10));
        let zero_width = replace(serde_json::json!({"Regex": "(?=a)"}), "a");
        let byte_level = serde_json::json!({"type": "ByteLevel"});
        for (part, kinds) in [
            ("normalizer", vec![ten.clone(); 20]),
            ("normalizer", vec![zero_width; 20]),
            ("normalizer", vec![byte_level.clone(); 20]),
            ("pre_tokenizer", vec![byte_level.clone(); 20]),
            ("decoder", vec![ten.clone(); 20]),
            ("normalizer", vec![serde_json::json!({"type": "Prepend", "prepend": "a".repeat(100_000)})]),
        ] {
            let reason = check(part, kinds).unwrap_err();
            assert!(reason.contains(part) && reason.contains("more than 1000 times as long"), "{reason}");
        }
        let spaces =
            [replace(string(" "), "▁"), serde_json::json!({"type": "Prepend", "prepend": "▁"}), ten, byte_level];
        assert_eq!(check("normalizer", spaces.to_vec()), Ok(()));
    }

    #[test]
    fn empty_patterns_are_refused_in_every_part() {
        let replace = r#"{"type": "Replace", "pattern": {"String": ""}, "content": "x"}"#;
        for part in ["normalizer", "pre_tokenizer", "decoder"] {
            let file =
                format!(r#"{{"model": {{"vocab": {{}}}}, "{part}": {{"type": "Sequence", "all": [{replace}]}}}}"#);
            assert_eq!(check(file.as_bytes()), Err(format!("`{part}`: the pattern of a `Replace` is empty")));
            assert_eq!(check(file.replace("\"\"", "\"y\"").as_bytes()), Ok(()));
        }
        assert_eq!(check(b"{}"), Ok(()));
        assert!(check(b"{").is_err());
    }
}
