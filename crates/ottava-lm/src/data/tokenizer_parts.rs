//! Parts of a `tokenizer.json` that the tokenizers crate does not survive, found before it reads them.
//!
//! Its panics are caught, but a table that claims gigabytes ends the process.

use serde::Deserialize;
use serde_json::Value;

/// The parts of the file that hold patterns and tables; the vocabulary is skipped.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
}

/// Errors with the reason when a part of the file cannot be used.
pub(super) fn check(file: &[u8]) -> Result<(), String> {
    let Parts { normalizer, pre_tokenizer, decoder } = serde_json::from_slice(file).map_err(|e| e.to_string())?;
    for (name, part) in [("normalizer", &normalizer), ("pre_tokenizer", &pre_tokenizer), ("decoder", &decoder)] {
        check_part(part).map_err(|reason| format!("`{name}`: {reason}"))?;
    }
    Ok(())
}

/// Checks a part and those within it.
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

/// Checks a table in base64: four bytes with the size of a trie, little-endian, then that, then text.
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
