//! The content of a record, read from its fields.

use std::fmt;

use ottava_jinja::json_text::{self, unusual};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::content::Content;
use crate::example_records::TEXT_FIELD;
use crate::guess::ANSWERED;
use crate::mapping::Mapping;
use crate::records::Formatting;

/// Estimates the number of bytes that `record` has in a file.
pub(super) fn size(record: &Map<String, Value>) -> usize {
    let of = |value: &Value| match value {
        Value::String(text) => text.len() + 2,
        Value::Array(list) => list.iter().map(|value| value.as_object().map_or(8, size) + 1).sum(),
        Value::Object(inner) => size(inner),
        _ => 8,
    };
    record.iter().map(|(key, value)| key.len() + 4 + of(value)).sum::<usize>() + 2
}

/// Returns the content of one JSON record. If `formatting` is `Auto`, it is detected from this record and stored for the next records.
pub(super) fn json_content(
    record: &str,
    field: &str,
    formatting: &mut Formatting,
    mapping: &Mapping,
) -> Result<Content, String> {
    // If the record is a text, only its text field is parsed.
    if mapping.is_empty() {
        if *formatting == Formatting::Auto {
            *formatting = Formatting::detect(record)?;
        }
        if *formatting == Formatting::Text {
            let text = json_text(record, field)?;
            return if text.contains('\0') { Err(zero_byte(field)) } else { Ok(Content::Text(text)) };
        }
    }
    match json_text::parse(record) {
        Ok(Value::Object(record)) => content(record, field, formatting, mapping),
        Ok(_) => Err("not a usable record: a record is an object".into()),
        Err(reason) => Err(format!("not a usable record: {reason}")),
    }
}

/// Returns the content of one record.
pub(super) fn content(
    mut record: Map<String, Value>,
    field: &str,
    formatting: &mut Formatting,
    mapping: &Mapping,
) -> Result<Content, String> {
    mapping.apply(&mut record);
    if *formatting == Formatting::Auto {
        *formatting = Formatting::of_record(&record);
    }
    if *formatting == Formatting::Text {
        return match record.remove(field) {
            Some(Value::String(text)) if text.contains('\0') => Err(zero_byte(field)),
            Some(Value::String(text)) => Ok(Content::Text(text)),
            Some(other) => Err(not_a_text(field, &other)),
            None => Err(format!("not a usable record: {}", missing(field, record.keys().map(String::as_str)))),
        };
    }
    if *formatting == Formatting::Classification && field != TEXT_FIELD {
        // `text_field` names the text of an example too.
        if let Some(text) = record.remove(field) {
            record.insert(TEXT_FIELD.into(), text);
        }
    }
    let name = formatting.as_str();
    let content = formatting.read(&Value::Object(record)).and_then(|content| {
        check(&content)?;
        Ok(content)
    });
    content.map_err(|reason| format!("not a usable record of formatting `{name}`: {reason}"))
}

fn not_a_text(field: &str, value: &Value) -> String {
    let shown = unusual(value).map_or_else(|| value.to_string(), str::to_string);
    format!("not a usable record: field `{field}` is {shown:.200}, and not a text")
}

fn zero_byte(field: &str) -> String {
    format!("not a usable record: field `{field}` has a zero byte (\\u0000)")
}

/// Errors if a trained text or a prompt has a zero byte or half of a character.
fn check(content: &Content) -> Result<(), String> {
    match content {
        Content::Tokens { .. } => Ok(()),
        Content::Text(text) => no_zero_byte(text),
        Content::Completion { prompt, completion } => {
            [prompt, completion].into_iter().try_for_each(|text| no_zero_byte(text))
        }
        Content::Chat(chat) => chat.messages.iter().chain([&chat.tools]).try_for_each(check_value),
        Content::Pair { completions, .. } => completions.iter().try_for_each(check),
        Content::Labeled(content, _) => check(content),
        Content::Prompt(record) => check(&record.prompt),
        Content::Example(record) => record.texts.iter().try_for_each(|text| {
            check(&text.content)?;
            text.pair.as_deref().map_or(Ok(()), no_zero_byte)
        }),
    }
}

fn no_zero_byte(text: &str) -> Result<(), String> {
    if text.contains('\0') { Err("a text has a zero byte (\\u0000)".into()) } else { Ok(()) }
}

fn check_value(value: &Value) -> Result<(), String> {
    match value {
        Value::String(text) => no_zero_byte(text),
        Value::Array(items) => items.iter().try_for_each(check_value),
        Value::Object(fields) => match unusual(value).filter(|shown| shown.starts_with("a text")) {
            Some(shown) => Err(format!("a message has {shown}")),
            None => fields.values().try_for_each(check_value),
        },
        _ => Ok(()),
    }
}

/// Returns the message for a record without the text field.
fn missing<'a>(field: &str, fields: impl Iterator<Item = &'a str>) -> String {
    let fields: Vec<&str> = fields.collect();
    let shown: Vec<_> = fields.iter().take(8).map(|field| format!("`{field}`")).collect();
    let pair = ANSWERED.iter().find(|(question, answer)| fields.contains(question) && fields.contains(answer));
    let remedy = match pair {
        Some((question, answer)) => format!(
            "if `{answer}` answers `{question}`, set data.records.fields = {{ prompt = \"{question}\", completion = \"{answer}\" }}; for a plain text, set \
             data.records.text_field to its name"
        ),
        None => "set data.records.text_field to another, or `--text-field` of `ottava eval`".into(),
    };
    let prompts = match fields.contains(&"prompt") {
        true => "; for prompts of reinforcement learning, set data.records.formatting = \"prompts\"",
        false => "",
    };
    match shown.is_empty() {
        true => format!("field `{field}` is missing ({remedy})"),
        false => format!("field `{field}` is missing ({remedy}{prompts}); the record has {}", shown.join(", ")),
    }
}

/// Returns the message for a record that is not JSON. The parser counts lines within the record; the caller adds the line of the file.
fn unusable(error: &serde_json::Error) -> String {
    format!("not a usable record: {}", error.to_string().replace(" at line 1 column ", " at column "))
}

/// Returns the text in `field` of one JSON record.
fn json_text(record: &str, field: &str) -> Result<String, String> {
    let mut parser = serde_json::Deserializer::from_str(record);
    let text = TextField(field).deserialize(&mut parser).and_then(|text| parser.end().map(|()| text));
    text.or_else(|error| {
        // Other fields may have numbers that only Python's JSON allows.
        let Ok(Value::Object(mut record)) = json_text::parse(record) else { return Err(unusable(&error)) };
        match record.remove(field) {
            Some(Value::String(text)) if !error.to_string().contains("appears twice") => Ok(text),
            Some(Value::Null) => Err(format!("not a usable record: field `{field}` is null, and not a text")),
            Some(other) if unusual(&other).is_some() => Err(not_a_text(field, &other)),
            _ => Err(unusable(&error)),
        }
    })
}

/// Reads one text field of an object without storing the other fields.
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
