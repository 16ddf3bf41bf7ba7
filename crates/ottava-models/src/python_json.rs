//! JSON as Python writes it: with `Infinity`, `-Infinity` and `NaN`, which standard JSON does not have.

use serde_json::{Value, json};

/// The key under which transformers 5 writes such a number as a string.
const FLOAT: &str = "__float__";
/// The number names, longest first.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
/// The maximum number of characters of a value in a message.
const MOST_CHARACTERS: usize = 120;

/// Parses `text`. A number that standard JSON does not have becomes `{"__float__": "Infinity"}`, as transformers 5 writes it.
///
/// # Errors
/// Errors if `text` is not JSON for another reason.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    let error = match serde_json::from_str(text) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    // The error keeps the line and column of `text`, because they may differ in the rewritten text.
    serde_json::from_str(&rewritten(text)).map_err(|_| error)
}

/// Returns the number that `value` encodes, if standard JSON does not have it.
pub fn special(value: &Value) -> Option<&str> {
    value.get(FLOAT)?.as_str()
}

/// Returns the beginning of `value`, for a message.
pub fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MOST_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn rewritten(text: &str) -> String {
    let (mut output, mut rest, mut is_text) = (String::with_capacity(text.len()), text, false);
    while let Some(first) = rest.chars().next() {
        let number = NUMBERS.into_iter().find(|number| !is_text && rest.starts_with(number));
        let taken = match (number, first) {
            (Some(number), _) => {
                output += &json!({ FLOAT: number }).to_string();
                rest = &rest[number.len()..];
                continue;
            }
            // A quote after a backslash does not end a string.
            (None, '\\') if is_text => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, _) => first.len_utf8(),
        };
        is_text ^= first == '"';
        output += &rest[..taken];
        rest = &rest[taken..];
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_are_read_outside_texts_only() {
        let value = parse(r#"{"a": Infinity, "b": [-Infinity, NaN], "c": "NaN \" Infinity", "é": 1.5}"#).unwrap();
        let number = |name: &str| json!({ "__float__": name });
        let expected = json!({"a": number("Infinity"), "b": [number("-Infinity"), number("NaN")],
            "c": "NaN \" Infinity", "é": 1.5});
        assert_eq!(value, expected);
        assert_eq!(special(&value["b"][0]), Some("-Infinity"));
        assert_eq!(special(&json!(1.5)), None);
        assert!(parse("{\"a\": Infinit}").unwrap_err().to_string().contains("line 1 column 7"));
    }

    #[test]
    fn long_values_are_cut_in_messages() {
        assert_eq!(excerpt(&json!([1, 2])), "[1,2]");
        assert_eq!(excerpt(&json!(vec![7; 1_000_000])).chars().count(), 121);
    }
}
