//! Reads and writes JSON like Python: integers of any size, `NaN`, `Infinity`, and floats beyond `f64`.
//!
//! Such numbers, and texts with half of a character, become the special objects of `number.rs`. So a record cannot use them by accident as a text, a
//! number or a list, and templates write them like Python.

use std::borrow::Cow;

use serde_json::{Map, Number, Value};

use crate::number::{as_json, text_of_json};

/// The maximum depth of nested lists and objects, as in `serde_json`.
const MAX_DEPTH: usize = 127;

/// The description of a text with half of a character. Its escape sequence follows in parentheses.
const LONE_SURROGATE: &str = "a text with a lone surrogate";

/// Parses one value. Errors with the reason and the column.
pub fn parse(text: &str) -> Result<Value, String> {
    let mut parser = Parser { text, at: 0 };
    let parsed = parser.value(0).and_then(|value| {
        parser.space();
        if parser.at == text.len() { Ok(value) } else { Err(parser.wrong("trailing characters")) }
    });
    // Uses the message of `serde_json`, so that all JSON files have the same messages.
    parsed.map_err(|reason| match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Err(error) if !reason.contains("zero byte") => error.to_string().replace(" at line 1 column ", " at column "),
        _ => reason,
    })
}

/// Describes a value that JSON's types cannot represent, such as "NaN" or "a text with a lone surrogate (\ud83d)"; `None` for other values.
pub fn unusual(value: &Value) -> Option<&str> {
    text_of_json(value)
}

/// Formats `value` as JSON, with numbers in Python's form. [`parse`] reads the same value back.
pub fn write(value: &Value) -> String {
    let mut out = String::new();
    append(&mut out, value);
    out
}

fn append(out: &mut String, value: &Value) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                append(out, item);
            }
            out.push(']');
        }
        // A file may have an object that only looks like a special number.
        Value::Object(fields) => match unusual(value).filter(|text| parse(text).as_ref() == Ok(value)) {
            Some(number) => out.push_str(number),
            None => {
                out.push('{');
                for (i, (name, field)) in fields.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    out.push_str(&Value::from(name.as_str()).to_string());
                    out.push(':');
                    append(out, field);
                }
                out.push('}');
            }
        },
        other => out.push_str(&other.to_string()),
    }
}

/// Replaces integers beyond 64 bits in JSON text by their special objects, so that `serde_json` does not round them to floats.
pub fn keep_integers(json: &[u8]) -> Cow<'_, [u8]> {
    /// The minimum number of characters of an integer that may not fit into 64 bits.
    const DIGITS: usize = 19;
    let (mut out, mut copied) = (Vec::new(), 0);
    let (mut at, mut quoted) = (0, false);
    while at < json.len() {
        match json[at] {
            b'\\' if quoted => at += 1,
            b'"' => quoted = !quoted,
            b'-' | b'0'..=b'9' if !quoted => {
                let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                let end = at + json[at..].iter().take_while(|byte| is_part(byte)).count();
                let number = std::str::from_utf8(&json[at..end]).unwrap_or_default();
                let is_whole = number.trim_start_matches('-').bytes().all(|byte| byte.is_ascii_digit());
                let is_big = number.len() >= DIGITS && number.parse::<i64>().is_err() && number.parse::<u64>().is_err();
                if is_whole
                    && is_big
                    && let Ok(value) = parse(number)
                {
                    out.extend_from_slice(&json[copied..at]);
                    out.extend_from_slice(value.to_string().as_bytes());
                    copied = end;
                }
                at = end - 1;
            }
            _ => {}
        }
        at += 1;
    }
    match copied {
        0 => Cow::Borrowed(json),
        _ => {
            out.extend_from_slice(&json[copied..]);
            Cow::Owned(out)
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn wrong(&self, reason: &str) -> String {
        let lines = self.text[..self.at].matches('\n').count();
        let column = self.text[..self.at].rsplit('\n').next().unwrap_or_default().len() + 1;
        match lines {
            0 => format!("{reason} at column {column}"),
            lines => format!("{reason} at line {} column {column}", lines + 1),
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn skip(&mut self, word: &str) -> bool {
        let found = self.text[self.at..].starts_with(word);
        self.at += if found { word.len() } else { 0 };
        found
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("too many lists and objects within each other"));
        }
        self.space();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => {
                self.at += 1;
                let mut items = Vec::new();
                self.space();
                if self.skip("]") {
                    return Ok(Value::Array(items));
                }
                loop {
                    items.push(self.value(depth + 1)?);
                    self.space();
                    if self.skip("]") {
                        return Ok(Value::Array(items));
                    }
                    if !self.skip(",") {
                        return Err(self.wrong("expected `,` or `]`"));
                    }
                }
            }
            Some(b'"') => self.string(),
            Some(b'-' | b'0'..=b'9' | b'N' | b'I') => self.number(),
            _ if self.skip("true") => Ok(Value::Bool(true)),
            _ if self.skip("false") => Ok(Value::Bool(false)),
            _ if self.skip("null") => Ok(Value::Null),
            _ => Err(self.wrong("expected a value")),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, String> {
        self.at += 1;
        let mut fields = Map::new();
        self.space();
        if self.skip("}") {
            return Ok(Value::Object(fields));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.wrong("expected the name of a field"));
            }
            let Value::String(name) = self.string()? else {
                return Err(self.wrong("the name of a field has a lone surrogate"));
            };
            self.space();
            if !self.skip(":") {
                return Err(self.wrong("expected `:`"));
            }
            let value = self.value(depth + 1)?;
            fields.insert(name, value);
            self.space();
            if self.skip("}") {
                return Ok(Value::Object(fields));
            }
            if !self.skip(",") {
                return Err(self.wrong("expected `,` or `}`"));
            }
        }
    }

    fn number(&mut self) -> Result<Value, String> {
        if let Some(word) = ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| self.skip(word)) {
            return Ok(as_json(word));
        }
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let (number, plain) = (&rest[..end], rest[..end].trim_start_matches('-'));
        let has_zero = plain.len() > 1 && plain.starts_with('0') && plain.as_bytes()[1].is_ascii_digit();
        let is_whole = plain.bytes().all(|byte| byte.is_ascii_digit()) && number.len() - plain.len() < 2;
        let ends_well =
            plain.starts_with(|c: char| c.is_ascii_digit()) && number.ends_with(|c: char| c.is_ascii_digit());
        let has_fraction = !number.contains('.')
            || number.split('.').nth(1).is_some_and(|f| f.starts_with(|c: char| c.is_ascii_digit()));
        let float = number.parse::<f64>().ok().filter(|_| ends_well && !has_zero && has_fraction);
        let Some(float) = float else { return Err(self.wrong("invalid number")) };
        let value = match (number.parse::<i64>(), number.parse::<u64>()) {
            _ if !is_whole => Number::from_f64(float).map(Value::Number),
            (Ok(whole), _) => Some(whole.into()),
            (_, Ok(whole)) => Some(whole.into()),
            _ => None,
        };
        self.at += end;
        Ok(value.unwrap_or_else(|| as_json(number)))
    }

    /// Parses a text in quotes.
    fn string(&mut self) -> Result<Value, String> {
        self.at += 1;
        let (mut out, mut lone) = (String::new(), None);
        loop {
            let rest = &self.text[self.at..];
            let Some(end) = rest.find(|c: char| matches!(c, '"' | '\\') || c < ' ') else {
                return Err(self.wrong("a text without an end"));
            };
            out.push_str(&rest[..end]);
            self.at += end + 1;
            match rest.as_bytes()[end] {
                b'"' => break,
                b'\\' => self.escape(&mut out, &mut lone)?,
                _ => return Err(self.wrong("a control character in a text")),
            }
        }
        match lone {
            None => Ok(Value::String(out)),
            Some(code) => Ok(as_json(&format!("{LONE_SURROGATE} (\\u{code:04x}), which is half of a character"))),
        }
    }

    /// Parses the character of an escape after its backslash. `lone` is the first half of a character whose second half may follow.
    fn escape(&mut self, out: &mut String, lone: &mut Option<u32>) -> Result<(), String> {
        let Some(kind) = self.peek() else { return Err(self.wrong("a text without an end")) };
        self.at += 1;
        out.push(match kind {
            b'"' | b'\\' | b'/' => char::from(kind),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let mut code = self.hexadecimal()?;
                if (0xd800..0xdc00).contains(&code) && self.text[self.at..].starts_with("\\u") {
                    let back = self.at;
                    self.at += 2;
                    match self.hexadecimal()? {
                        low @ 0xdc00..0xe000 => code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00),
                        _ => self.at = back,
                    }
                }
                char::from_u32(code).unwrap_or_else(|| {
                    lone.get_or_insert(code);
                    char::REPLACEMENT_CHARACTER
                })
            }
            _ => {
                self.at -= 1;
                return Err(self.wrong("invalid escape"));
            }
        });
        Ok(())
    }

    fn hexadecimal(&mut self) -> Result<u32, String> {
        let digits = self.text.get(self.at..self.at + 4).filter(|digits| digits.bytes().all(|c| c.is_ascii_hexdigit()));
        let Some(digits) = digits else { return Err(self.wrong("`\\u` without four hexadecimal digits")) };
        self.at += 4;
        u32::from_str_radix(digits, 16).map_err(|_| self.wrong("`\\u` without four hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_and_texts_of_python_are_read() {
        for text in [
            r#"{"a": [1, -2.5, 1e3, true, false, null], "b": {"c": "é\u00e9\ud83d\ude00\n\"\\\/"}, "d": {}, "e": []}"#,
            " [ 18446744073709551615 , -9223372036854775808 ,0,-0.0, 0.1, 1E-7 ] ",
            "\"x\"",
        ] {
            assert_eq!(parse(text).unwrap(), serde_json::from_str::<Value>(text).unwrap(), "{text}");
        }
        for (text, shown) in [
            ("NaN", "NaN"),
            ("-Infinity", "-Infinity"),
            ("1e400", "1e400"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("-9223372036854775809", "-9223372036854775809"),
            (r#""a\ud83d b""#, r"a text with a lone surrogate (\ud83d), which is half of a character"),
            (r#""\udc00\ud83d\ude00""#, r"a text with a lone surrogate (\udc00), which is half of a character"),
        ] {
            assert_eq!(unusual(&parse(text).unwrap()), Some(shown), "{text}");
        }
        assert_eq!(unusual(&json!({"a": "NaN"})), None);
    }

    #[test]
    fn big_integers_survive_other_parsers() {
        let keeps = |text: &str| serde_json::from_slice::<Value>(&keep_integers(text.as_bytes())).unwrap();
        let big = "123456789012345678901234567890";
        for text in [
            format!(
                r#"{{"a": [{big}, -{big}], "b": "{big} \" {big}", "c": 18446744073709551615, "d": 1.2345678901234567890, "e": 1e-7}}"#
            ),
            r#"{"a": -9223372036854775808, "b": 1}"#.to_string(),
            big.to_string(),
        ] {
            assert_eq!(keeps(&text), parse(&text).unwrap(), "{text}");
        }
        assert!(matches!(keep_integers(br#"{"a": "1"}"#), Cow::Borrowed(_)));
    }

    #[test]
    fn written_values_are_read_again() {
        for text in [
            r#"{"b":[1,-2.5,1000.0,true,null,-0.0,0.1],"a":{"c":"é😀\n\"\u0000"},"d":{},"e":[]}"#,
            r#"[123456789012345678901234567890,-9223372036854775809,18446744073709551615,NaN,-Infinity,1e400]"#,
            // The objects only look like special numbers.
            "[{\"\u{fdd2}\":\"1\"},{\"\u{fdd2}\":\"],{\"},{\"\u{fdd2}\":\" 1e400\"},{\"\u{fdd2}\":1}]",
        ] {
            let value = parse(text).unwrap();
            assert_eq!((write(&value).as_str(), parse(&write(&value))), (text, Ok(value.clone())));
        }
    }

    #[test]
    fn malformed_json_is_refused_as_elsewhere() {
        for text in [
            "",
            "{",
            "[1,]",
            "[1 2]",
            "{\"a\" 1}",
            "{\"a\": 1,}",
            "{a: 1}",
            "01",
            "1.",
            ".5",
            "-",
            "+1",
            "1e",
            "--1",
            "nan",
            "\"a",
            "\"\n\"",
            "\"\\x\"",
            "\"\\u12\"",
            "true false",
            "'a'",
            "[1] x",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse("[1 2]").unwrap_err(), "expected `,` or `]` at column 4");
        assert!(parse(&"[".repeat(100_000)).is_err());
    }
}
