//! Records of prompts: a prompt, and the columns that rewards read.

use ottava_jinja::json_text::{self, unusual};
use serde_json::{Map, Value};

use crate::chat::Chat;
use crate::content::{Content, PromptRecord};
use crate::messages::messages;
use crate::values::{field, is_not};

/// The field with further variables of the chat template.
const KWARGS: &str = "chat_template_kwargs";

/// Reads the prompt of a record. Errors with the reason.
pub(super) fn prompt_record(record: &Map<String, Value>) -> Result<PromptRecord, String> {
    let prompt = match field(record, "prompt")? {
        Value::String(text) if text.is_empty() => return Err("field `prompt` is empty".into()),
        Value::String(text) => Content::Text(text.clone()),
        Value::Array(_) => Content::Chat(Chat { messages: messages(record, "prompt")?, ..Chat::default() }),
        other => return Err(is_not("prompt", other, "a text or a list of messages")),
    };
    if let Some((name, shown)) = record.iter().find_map(|(name, value)| Some((name, cut_text(value)?))) {
        return Err(format!("field `{name}` has {shown}"));
    }
    Ok(PromptRecord { prompt, kwargs: kwargs(record)?, columns: Value::Object(record.clone()) })
}

/// Describes the first text in `value` that has half of a character, which columns cannot store; `None` if there is no such text.
fn cut_text(value: &Value) -> Option<&str> {
    let inner = match value {
        Value::Array(items) => items.iter().find_map(cut_text),
        Value::Object(fields) => fields.values().find_map(cut_text),
        _ => None,
    };
    inner.or_else(|| unusual(value).filter(|shown| shown.starts_with("a text")))
}

/// Reads the further variables of the template: an object, or the JSON text of an object. A variable that is `null` counts as missing, because
/// Parquet writes `null` for missing values.
fn kwargs(record: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let wrong = || format!("field `{KWARGS}` is not an object of variables of the chat template");
    let mut kwargs = match record.get(KWARGS) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(kwargs)) => kwargs.clone(),
        Some(Value::String(text)) if text.is_empty() => Map::new(),
        Some(Value::String(text)) => match json_text::parse(text) {
            Ok(Value::Object(kwargs)) => kwargs,
            _ => return Err(wrong()),
        },
        Some(_) => return Err(wrong()),
    };
    kwargs.retain(|_, value| !value.is_null());
    Ok(kwargs)
}

#[cfg(test)]
#[path = "prompt_records_tests.rs"]
mod tests;
