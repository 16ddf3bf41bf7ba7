//! Python's `json.dumps`.

use crate::error::{Result, fail};
use crate::limits::Writer;
use crate::text;
use crate::value::Value;

/// The options of `json.dumps`.
pub(crate) struct Options {
    /// The text by which each level is indented; `None` to write one line.
    pub(crate) indent: Option<String>,
    /// Whether characters beyond ASCII are escaped.
    pub(crate) ensure_ascii: bool,
    pub(crate) sort_keys: bool,
    /// The separator between items, and the separator between key and value.
    pub(crate) separators: [String; 2],
}

impl Options {
    /// Appends `value` as JSON.
    pub(crate) fn write(&self, value: &Value, level: usize, out: &mut Writer) -> Result<()> {
        out.limits().steps(1)?;
        match value {
            Value::None => out.push("null"),
            Value::Bool(value) => out.push(if *value { "true" } else { "false" }),
            Value::Int(_) | Value::Big(_) => text::represent(value, out),
            Value::Float(value) => out.push(&match text::float(*value).as_str() {
                "nan" => "NaN".to_string(),
                "inf" => "Infinity".to_string(),
                "-inf" => "-Infinity".to_string(),
                finite => finite.to_string(),
            }),
            Value::Str(text) => self.string(text, out),
            Value::List(seq) | Value::Tuple(seq) => {
                let items: Vec<&Value> = seq.items.iter().collect();
                self.list(["[", "]"], &items, level, out, |item, out| self.write(item, level + 1, out))
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| key.as_str().unwrap_or_default().to_string());
                }
                self.list(["{", "}"], &entries, level, out, |(key, value), out| {
                    self.key(key, out)?;
                    out.push(&self.separators[1])?;
                    self.write(value, level + 1, out)
                })
            }
            Value::Undefined(_) | Value::View(_) | Value::Method(_) | Value::Function(_) | Value::Object(_) => {
                fail(format!("tojson: {} cannot be written as JSON", value.class()))
            }
        }
    }

    fn key(&self, key: &Value, out: &mut Writer) -> Result<()> {
        match key {
            Value::Str(text) => self.string(text, out),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_) => {
                out.push("\"")?;
                self.write(key, 0, out)?;
                out.push("\"")
            }
            _ => fail(format!("tojson: {} cannot be a key of JSON", key.class())),
        }
    }

    fn list<T>(
        &self,
        [open, close]: [&str; 2],
        items: &[T],
        level: usize,
        out: &mut Writer,
        write: impl Fn(&T, &mut Writer) -> Result<()>,
    ) -> Result<()> {
        let line = |level: usize, out: &mut Writer| match &self.indent {
            Some(indent) if !items.is_empty() => {
                out.push("\n")?;
                out.repeat(indent, level)
            }
            _ => Ok(()),
        };
        out.push(open)?;
        for (i, item) in items.iter().enumerate() {
            out.push(if i > 0 { &self.separators[0] } else { "" })?;
            line(level + 1, out)?;
            write(item, out)?;
        }
        line(level, out)?;
        out.push(close)
    }

    fn string(&self, text: &str, out: &mut Writer) -> Result<()> {
        out.push("\"")?;
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            let escaped = match c {
                '"' => "\\\"".to_string(),
                '\\' => "\\\\".into(),
                '\n' => "\\n".into(),
                '\r' => "\\r".into(),
                '\t' => "\\t".into(),
                '\u{8}' => "\\b".into(),
                '\u{c}' => "\\f".into(),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !('\u{20}'..='\u{7e}').contains(&c)) => {
                    c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
                }
                _ => continue,
            };
            out.push(&text[plain..at])?;
            out.push(&escaped)?;
            plain = at + c.len_utf8();
        }
        out.push(&text[plain..])?;
        out.push("\"")
    }
}
