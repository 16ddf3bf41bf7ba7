//! Python's `str` and `repr` of values, and Python's white space.

use crate::error::Result;
use crate::limits::{Limits, Writer};
use crate::value::{Value, ViewKind};

/// Whether a character is white space in Python: white space of Unicode, or one of four ASCII separators.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Removes white space at the start, like Python's `str.lstrip`.
pub(crate) fn trim_start(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

/// Removes white space at the end, like Python's `str.rstrip`.
pub(crate) fn trim_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// Returns Python's `str(value)` as a text within the limits.
pub(crate) fn string(value: &Value, limits: &Limits) -> Result<std::sync::Arc<str>> {
    if let Value::Str(text) = value {
        return Ok(text.clone());
    }
    let mut out = Writer::new(limits);
    write(value, &mut out)?;
    Ok(out.finish().into())
}

/// Appends Python's `str(value)`. Errors for an undefined value if the rendering is strict.
pub(crate) fn write(value: &Value, out: &mut Writer) -> Result<()> {
    match value {
        Value::Str(text) => out.push(text),
        Value::Undefined(_) => out.limits().expect_defined(value),
        _ => represent(value, out),
    }
}

/// Appends Python's `repr(value)`.
pub(crate) fn represent(value: &Value, out: &mut Writer) -> Result<()> {
    out.limits().steps(1)?;
    match value {
        Value::Undefined(_) => out.push("Undefined"),
        Value::None => out.push("None"),
        Value::Bool(value) => out.push(if *value { "True" } else { "False" }),
        Value::Int(value) => out.push(&value.to_string()),
        Value::Big(value) => out.push(&value.to_string()),
        Value::Float(value) => out.push(&float(*value)),
        Value::Str(text) => quote(text, out),
        Value::List(seq) => items(["[", "]"], &seq.items, out),
        Value::Tuple(seq) if seq.items.len() == 1 => items(["(", ",)"], &seq.items, out),
        Value::Tuple(seq) => items(["(", ")"], &seq.items, out),
        Value::Dict(dict) => {
            out.push("{")?;
            for (i, (key, value)) in dict.entries.iter().enumerate() {
                out.push(if i > 0 { ", " } else { "" })?;
                represent(key, out)?;
                out.push(": ")?;
                represent(value, out)?;
            }
            out.push("}")
        }
        Value::View(view) => match &view.kind {
            ViewKind::Range(text) => out.push(text),
            ViewKind::Generator => out.push("<generator object>"),
            _ => {
                out.push(value.class())?;
                items(["([", "])"], &view.seq.items, out)
            }
        },
        Value::Method(method) => out.push(&format!("<method {} of {} object>", method.1, method.0.class())),
        Value::Function(name) => out.push(&format!("<function {name}>")),
        Value::Object(_) => out.push("<object>"),
    }
}

fn items([open, close]: [&str; 2], items: &[Value], out: &mut Writer) -> Result<()> {
    out.push(open)?;
    for (i, item) in items.iter().enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        represent(item, out)?;
    }
    out.push(close)
}

/// Returns the shortest digits that are read back as `x`, with an exponent for numbers below 1e-4 and from 1e16 on.
pub(crate) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
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

fn quote(text: &str, out: &mut Writer) -> Result<()> {
    let quote = if text.contains('\'') && !text.contains('"') { "\"" } else { "'" };
    out.push(quote)?;
    let mut plain = 0;
    for (at, c) in text.char_indices() {
        let escaped = match c {
            '\n' => "\\n".to_string(),
            '\r' => "\\r".into(),
            '\t' => "\\t".into(),
            '\\' => "\\\\".into(),
            c if quote.starts_with(c) => format!("\\{c}"),
            c if is_printable(c) => continue,
            c => match c as u32 {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            },
        };
        out.push(&text[plain..at])?;
        out.push(&escaped)?;
        plain = at + c.len_utf8();
    }
    out.push(&text[plain..])?;
    out.push(quote)
}

/// Whether a character is printable, like Python's `str.isprintable`. Rust's `escape_debug` escapes the same categories of Unicode.
pub(crate) fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        _ if c.is_alphanumeric() => true,
        // `escape_debug` escapes the first character of a text if it would combine with a character before the text. A letter before it prevents
        // this.
        _ => {
            let mut bytes = [b'a'; 5];
            let length = 1 + c.encode_utf8(&mut bytes[1..]).len();
            let text = std::str::from_utf8(&bytes[..length]).expect("a letter and a character");
            text.escape_debug().nth(1) == Some(c)
        }
    }
}
