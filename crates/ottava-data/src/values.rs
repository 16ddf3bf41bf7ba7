//! Values of fields of records.

use std::borrow::Cow;

use ottava_jinja::json_text::{self, unusual};
use serde_json::{Map, Value};

pub(super) fn field<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a Value, String> {
    match record.get(key) {
        None => Err(format!("field `{key}` is missing")),
        Some(Value::Null) => Err(format!("field `{key}` is null")),
        Some(value) => Ok(value),
    }
}

pub(super) fn text<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    let value = field(record, key)?;
    value.as_str().ok_or_else(|| is_not(key, value, "a text"))
}

/// Returns the message for a field whose value does not have the `wanted` type.
pub(super) fn is_not(key: &str, value: &Value, wanted: &str) -> String {
    match unusual(value) {
        Some(shown) => format!("field `{key}` is {shown}, and not {wanted}"),
        None => format!("field `{key}` is not {wanted}"),
    }
}

/// Reads a text. A missing text or `null` is an empty text.
pub(super) fn optional_text<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(_) => text(record, key),
    }
}

/// Reads a list, or the JSON text of a list, as in CSV files.
pub(super) fn list<'a>(record: &'a Map<String, Value>, key: &str) -> Result<Cow<'a, [Value]>, String> {
    let parsed = |text: &str| match json_text::parse(text) {
        Ok(Value::Array(list)) => Some(list),
        _ => None,
    };
    let list = match field(record, key)? {
        Value::Array(list) => Cow::Borrowed(list.as_slice()),
        Value::String(text) => Cow::Owned(parsed(text).ok_or_else(|| format!("field `{key}` is not a list"))?),
        _ => return Err(format!("field `{key}` is not a list")),
    };
    match list.is_empty() {
        true => Err(format!("field `{key}` is an empty list")),
        false => Ok(list),
    }
}
