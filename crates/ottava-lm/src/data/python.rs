//! Values of chat templates as Python writes them: `str`, `repr` and `json.dumps`.

use minijinja::Value;
use minijinja::value::ValueKind;

/// The result of Python's `str(value)`, or `None` for a value that is written unchanged.
pub(super) fn text(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Seq | ValueKind::Map => Some(repr(value)),
        ValueKind::Number if !value.is_integer() => Some(repr(value)),
        _ => None,
    }
}

fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => format!("[{}]", items(value).iter().map(repr).collect::<Vec<_>>().join(", ")),
        ValueKind::Map => {
            let entry = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            format!("{{{}}}", items(value).into_iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// The items of a sequence or the keys of a map.
fn items(value: &Value) -> Vec<Value> {
    value.try_iter().map(Iterator::collect).unwrap_or_default()
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => self::float(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that read back as `x`, with an exponent below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = x.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Options of Python's `json.dumps`.
pub(super) struct Json {
    /// Spaces for each level; `None` writes one line.
    pub(super) indent: Option<usize>,
    /// Whether characters beyond ASCII are escaped.
    pub(super) ensure_ascii: bool,
    /// Separators between items, and between key and value.
    pub(super) separators: [String; 2],
}

impl Json {
    /// `value` as JSON.
    pub(super) fn write(&self, value: &Value) -> String {
        let mut out = String::new();
        self.value(value, 0, &mut out);
        out
    }

    fn value(&self, value: &Value, level: usize, out: &mut String) {
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&match number(value).as_str() {
                "nan" => "NaN".to_string(),
                "inf" => "Infinity".to_string(),
                "-inf" => "-Infinity".to_string(),
                finite => finite.to_string(),
            }),
            ValueKind::Map => {
                let entry = |key: &Value, out: &mut String| {
                    self.string(key.as_str().unwrap_or(&key.to_string()), out);
                    out.push_str(&self.separators[1]);
                    self.value(&value.get_item(key).unwrap_or_default(), level + 1, out);
                };
                self.list(['{', '}'], &items(value), level, out, entry);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let item = |item: &Value, out: &mut String| self.value(item, level + 1, out);
                self.list(['[', ']'], &items(value), level, out, item);
            }
            _ => self.string(value.as_str().unwrap_or(&value.to_string()), out),
        }
    }

    fn list(
        &self,
        [open, close]: [char; 2],
        items: &[Value],
        level: usize,
        out: &mut String,
        write: impl Fn(&Value, &mut String),
    ) {
        let line = |level: usize, out: &mut String| {
            if let (Some(indent), false) = (self.indent, items.is_empty()) {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * level));
            }
        };
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.separators[0]);
            }
            line(level + 1, out);
            write(item, out);
        }
        line(level, out);
        out.push(close);
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_strings_are_those_of_python() {
        for (x, expected) in [
            (0.0, "0.0"),
            (-1.5, "-1.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e-5, "1.25e-05"),
            (0.0001, "0.0001"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(float(x), expected);
        }
        let value = Value::from_serialize(serde_json::json!({"a'b": [true, null, 1, 2.0, "x\n\"é"]}));
        assert_eq!(repr(&value), r#"{"a'b": [True, None, 1, 2.0, 'x\n"é']}"#);
        let json = Json { indent: None, ensure_ascii: true, separators: [",".into(), ":".into()] };
        assert_eq!(json.write(&value), r#"{"a'b":[true,null,1,2.0,"x\n\"\u00e9"]}"#);
    }
}
