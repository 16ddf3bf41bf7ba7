//! JSON as Python writes it: with `Infinity`, `-Infinity` and `NaN`, which standard JSON does not have. A number is written in the spelling in which it was
//! read: as such a name, as transformers 5 does (`{"__float__": "Infinity"}`), or as a text.

use serde_json::{Value, json};

/// The key under which transformers 5 writes such a number as a string.
const FLOAT: &str = "__float__";
/// The key of a number that a file has as a bare name. No file has this key.
const BARE: &str = "__bare_float__";
/// The number names, longest first.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
/// The maximum number of characters of a value in a message.
const MOST_CHARACTERS: usize = 120;

/// Parses `text`. A number that standard JSON does not have becomes an object, which [`write()`] writes as it was read.
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

/// Returns the text of `value` with two spaces of indentation and a line break at its end, as Hugging Face writes it.
pub fn write(value: &Value) -> String {
    let text = serde_json::to_string_pretty(value).expect("JSON values are written without fail") + "\n";
    // Within texts, quotes are escaped, so only keys match.
    let key = format!("\"{BARE}\": \"");
    let (mut output, mut rest) = (String::with_capacity(text.len()), text.as_str());
    while let Some(at) = rest.find(&key) {
        let (before, after) = (&rest[..at], &rest[at + key.len()..]);
        output += &before[..before.rfind('{').expect("a key is in an object")];
        output += after.split('"').next().unwrap_or_default();
        rest = &after[after.find('}').expect("an object ends") + 1..];
    }
    output + rest
}

/// Returns the number that `value` encodes, if standard JSON does not have it.
pub fn special(value: &Value) -> Option<&str> {
    let name = value.get(FLOAT).or_else(|| value.get(BARE)).unwrap_or(value).as_str()?;
    NUMBERS.contains(&name).then_some(name)
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
                output += &json!({ BARE: number }).to_string();
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
        let number = |name: &str| json!({ BARE: name });
        let expected = json!({"a": number("Infinity"), "b": [number("-Infinity"), number("NaN")],
            "c": "NaN \" Infinity", "é": 1.5});
        assert_eq!(value, expected);
        assert_eq!(special(&value["b"][0]), Some("-Infinity"));
        assert_eq!([special(&json!(1.5)), special(&json!("x")), special(&json!({FLOAT: "x"}))], [None; 3]);
        assert!(parse("{\"a\": Infinit}").unwrap_err().to_string().contains("line 1 column 7"));
    }

    #[test]
    fn every_spelling_of_a_number_is_read_and_written_alike() {
        let texts = ["Infinity", "-Infinity", "NaN", "{\n    \"__float__\": \"Infinity\"\n  }", "\"Infinity\""];
        for number in texts {
            let text = format!("{{\n  \"a\": {number},\n  \"b\": \"\\\"__bare_float__\\\": \\\"NaN\"\n}}\n");
            let value = parse(&text).unwrap();
            assert!(special(&value["a"]).is_some_and(|name| number.contains(name)));
            assert_eq!(write(&value), text);
        }
        let list = "{\n  \"limits\": [\n    0.0,\n    Infinity\n  ]\n}\n";
        assert_eq!(write(&parse(list).unwrap()), list);
    }

    #[test]
    fn long_values_are_cut_in_messages() {
        assert_eq!(excerpt(&json!([1, 2])), "[1,2]");
        assert_eq!(excerpt(&json!(vec![7; 1_000_000])).chars().count(), 121);
    }
}
