//! The content of a record by its fields.

use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::mapping::Mapping;
use super::records::{Content, Formatting};

/// About as many bytes as `record` has in a file.
pub(super) fn size(record: &Map<String, Value>) -> usize {
    let of = |value: &Value| match value {
        Value::String(text) => text.len() + 2,
        Value::Array(list) => list.iter().map(|value| value.as_object().map_or(8, size) + 1).sum(),
        Value::Object(inner) => size(inner),
        _ => 8,
    };
    record.iter().map(|(key, value)| key.len() + 4 + of(value)).sum::<usize>() + 2
}

/// The content of one JSON record of a file of this `formatting`, which the first record decides if it is not known.
pub(super) fn json_content(
    record: &str,
    field: &str,
    formatting: &mut Formatting,
    mapping: &Mapping,
) -> Result<Content, String> {
    // Of a text, the other fields need not be kept.
    if mapping.is_empty() {
        if *formatting == Formatting::Auto {
            *formatting = Formatting::detect(record)?;
        }
        if *formatting == Formatting::Text {
            return Ok(Content::Text(json_text(record, field)?));
        }
    }
    let record: Value = serde_json::from_str(record).map_err(|e| unusable(&e))?;
    match record {
        Value::Object(record) => content(record, field, formatting, mapping),
        _ => Err("not a usable record: a record is an object".into()),
    }
}

/// The content of one record.
pub(super) fn content(
    mut record: Map<String, Value>,
    field: &str,
    formatting: &mut Formatting,
    mapping: &Mapping,
) -> Result<Content, String> {
    mapping.apply(&mut record);
    if *formatting == Formatting::Auto {
        *formatting = Formatting::of_fields(&|key| record.contains_key(key));
    }
    if *formatting == Formatting::Text {
        return match record.remove(field) {
            Some(Value::String(text)) => Ok(Content::Text(text)),
            Some(other) => Err(format!("not a usable record: field `{field}` is {other}, and not a text")),
            None => Err(format!("not a usable record: {}", missing(field, record.keys().map(String::as_str)))),
        };
    }
    let content = formatting.read(&Value::Object(record));
    content.map_err(|reason| format!("not a usable record of formatting `{}`: {reason}", formatting.as_str()))
}

/// The message for a record without the field of the text.
fn missing<'a>(field: &str, fields: impl Iterator<Item = &'a str>) -> String {
    let fields: Vec<&str> = fields.collect();
    let shown: Vec<_> = fields.iter().take(8).map(|field| format!("`{field}`")).collect();
    match shown.is_empty() {
        true => format!("field `{field}` is missing (set text_field to another)"),
        false => format!("field `{field}` is missing (set text_field to another); the record has {}", shown.join(", ")),
    }
}

/// The message for a record that is not JSON. The parser counts lines within the record; the caller names the line of the file.
fn unusable(error: &serde_json::Error) -> String {
    format!("not a usable record: {}", error.to_string().replace(" at line 1 column ", " at column "))
}

/// The text in `field` of one JSON record.
fn json_text(record: &str, field: &str) -> Result<String, String> {
    let mut parser = serde_json::Deserializer::from_str(record);
    let text = TextField(field).deserialize(&mut parser).and_then(|text| parser.end().map(|()| text));
    text.map_err(|e| unusable(&e))
}

/// Picks one string field out of an object without keeping the rest.
struct TextField<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for TextField<'_> {
    type Value = String;
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextField<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object with the text in its field `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        let custom = |reason: String| <A::Error as serde::de::Error>::custom(reason);
        let (mut found, mut others) = (None, Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
                if others.len() < 8 {
                    others.push(key);
                }
            } else if found.is_some() {
                return Err(custom(format!("field `{}` appears twice", self.0)));
            } else {
                found = Some(map.next_value::<String>()?);
            }
        }
        found.ok_or_else(|| custom(missing(self.0, others.iter().map(String::as_str))))
    }
}
