//! Messages of conversations in records, in the forms of OpenAI and of ShareGPT. A field that is `null` counts as missing.

use std::path::Path;

use ottava_jinja::json_text;
use serde_json::{Map, Value, json};

use crate::chat::Chat;
use crate::guess::{fields_of_message, toml_table};
use crate::values::{is_not, list, optional_text, text};

/// Returns the messages in field `key`, without fields that are `null`.
pub(super) fn messages(record: &Map<String, Value>, key: &str) -> Result<Vec<Value>, String> {
    let messages = list(record, key)?;
    let checked = messages.iter().enumerate().map(|(i, message)| {
        let place = |reason: String| format!("message {} of `{key}`: {reason}", i + 1);
        let fields = message.as_object().ok_or_else(|| format!("message {} of `{key}` is not an object", i + 1))?;
        message_of(fields).map_err(place)
    });
    checked.collect()
}

/// Converts the fields of a message to the form that templates read.
pub(super) fn message_of(fields: &Map<String, Value>) -> Result<Value, String> {
    let fields = with_train(present(fields))?;
    text(&fields, "role").map_err(|reason| with_names(reason, &fields))?;
    if let Some((field, known)) = fields.keys().find_map(|field| Some((field, misspelt(field)?))) {
        return Err(format!("`{field}` is no field of a message; did you mean `{known}`?"));
    }
    let calls = fields.get("tool_calls").is_some_and(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty()));
    let thinks = ["reasoning_content", "thinking", "reasoning"].iter().any(|field| fields.contains_key(*field));
    match fields.get("content") {
        Some(Value::String(_) | Value::Array(_)) => {}
        None if calls || (thinks && fields["role"] == "assistant") => {}
        None => return Err("field `content` is missing or null".into()),
        Some(other) => return Err(is_not("content", other, "a text")),
    }
    Ok(Value::Object(fields))
}

/// Adds the fields of a message without a role to the `reason`, and the setting that names them if they can be guessed.
fn with_names(reason: String, fields: &Map<String, Value>) -> String {
    let names: Vec<_> = fields.keys().take(8).map(|name| format!("`{name}`")).collect();
    let remedy = match fields_of_message(fields) {
        Some(pairs) if !pairs.is_empty() => {
            format!("; if they are its role and its text, set data.records.fields = {}", toml_table(&pairs))
        }
        _ => String::new(),
    };
    format!("{reason}; the message has {}{remedy}", if names.is_empty() { "no field".into() } else { names.join(", ") })
}

/// Returns the fields that are not `null`.
fn present(fields: &Map<String, Value>) -> Map<String, Value> {
    fields.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Replaces `weight` by `train`: a weight of 0 becomes `train: false`, and a weight of 1 is removed.
fn with_train(mut fields: Map<String, Value>) -> Result<Map<String, Value>, String> {
    if fields.get("train").is_some_and(|train| !train.is_boolean()) {
        return Err("field `train` is neither true nor false".into());
    }
    let Some(weight) = fields.shift_remove("weight") else { return Ok(fields) };
    let weight = match &weight {
        Value::Bool(weight) => *weight,
        _ if weight.as_f64() == Some(0.0) => false,
        _ if weight.as_f64() == Some(1.0) => true,
        _ => return Err(format!("field `weight` is {weight}; it is 0, for a message that is not trained on, or 1")),
    };
    match fields.get("train") {
        Some(train) if *train != weight => Err("fields `train` and `weight` contradict each other".into()),
        None if !weight => {
            fields.insert("train".into(), false.into());
            Ok(fields)
        }
        _ => Ok(fields),
    }
}

/// Returns the turns of `conversations` as messages.
pub(super) fn sharegpt(record: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let turns = list(record, "conversations")?;
    let has = |turn: &Value, field: &str| turn.get(field).is_some_and(|value| !value.is_null());
    if turns.iter().all(|turn| has(turn, "role") && !has(turn, "from")) {
        return messages(record, "conversations");
    }
    let read = |(i, turn): (usize, &Value)| {
        let place = |reason: String| format!("turn {} of `conversations`: {reason}", i + 1);
        turn_of(turn.as_object().ok_or_else(|| place("it is not an object".into()))?).map_err(place)
    };
    turns.iter().enumerate().map(read).collect()
}

/// Converts a turn with `from` and `value` to a message. Its other fields become fields of the message.
fn turn_of(turn: &Map<String, Value>) -> Result<Value, String> {
    let mut turn = with_train(present(turn))?;
    let (role, value) = (text(&turn, "from")?, text(&turn, "value")?);
    let message = match role {
        "human" | "user" => Chat::message("user", value),
        "gpt" | "assistant" | "model" | "chatgpt" | "bot" => Chat::message("assistant", value),
        "system" => Chat::message("system", value),
        "observation" | "function_response" | "tool" => Chat::message("tool", value),
        "function_call" => function_call(value)?,
        other => {
            return Err(format!(
                "`from` is {other:?}; it is human, gpt, system, function_call or observation (`data.records.roles` gives names to others)"
            ));
        }
    };
    let Value::Object(mut message) = message else { unreachable!("a message is an object") };
    turn.retain(|field, _| !["from", "value"].contains(&field.as_str()));
    for (field, value) in turn {
        message.entry(field).or_insert(value);
    }
    Ok(Value::Object(message))
}

/// Returns the conversation of `instruction`, `input` and `history`, with the answer `output`.
pub(super) fn alpaca(record: &Map<String, Value>, output: &str) -> Result<Vec<Value>, String> {
    let mut messages = Vec::new();
    if let Some(history) = record.get("history").filter(|history| !history.is_null()) {
        let turns: Vec<(String, String)> = serde_json::from_value(history.clone())
            .map_err(|_| "field `history` is not a list of pairs of texts".to_string())?;
        for (instruction, output) in turns {
            messages.extend([Chat::message("user", &instruction), Chat::message("assistant", &output)]);
        }
    }
    let (instruction, input) = (text(record, "instruction")?, optional_text(record, "input")?);
    let separator = if input.is_empty() { "" } else { "\n" };
    messages.push(Chat::message("user", &format!("{instruction}{separator}{input}")));
    messages.push(Chat::message("assistant", output));
    Ok(messages)
}

/// Converts one message of OpenAI's form or one turn of ShareGPT's form.
pub(super) fn turn_or_message(value: &Value, key: &str) -> Result<Value, String> {
    let place = |reason: String| format!("`{key}`: {reason}");
    let fields = value.as_object().ok_or_else(|| place("it is not an object".into()))?;
    let is_turn = fields.get("from").is_some_and(|from| !from.is_null());
    if is_turn { turn_of(fields) } else { message_of(fields) }.map_err(place)
}

/// Returns a message with the calls that LLaMA-Factory writes as text: an object with `name` and `arguments`, or a list of such objects.
fn function_call(value: &str) -> Result<Value, String> {
    let wrong = || "its `value` is not the JSON of a call: an object with `name` and `arguments`".to_string();
    let calls = match json_text::parse(value) {
        Ok(Value::Array(calls)) => calls,
        Ok(call @ Value::Object(_)) => vec![call],
        _ => return Err(wrong()),
    };
    if calls.iter().any(|call| !(call["name"].is_string() && call.get("arguments").is_some())) {
        return Err(wrong());
    }
    let calls: Vec<Value> = calls.into_iter().map(|call| json!({"type": "function", "function": call})).collect();
    Ok(json!({"role": "assistant", "content": "", "tool_calls": calls}))
}

/// Returns the system message in the field `system`; empty if there is none.
pub(super) fn system_of(record: &Map<String, Value>) -> Result<&str, String> {
    optional_text(record, "system")
}

impl Chat {
    /// Returns the chat with a system message before it. Errors if the chat has another system message.
    pub(super) fn with_system(mut self, system: &str) -> Result<Chat, String> {
        let first = self.messages.first().filter(|first| first["role"] == "system" || first["role"] == "developer");
        match first {
            Some(first) if first["content"] == system => Ok(self),
            Some(_) => {
                Err("field `system` is beside a conversation that begins with another system message; keep one of them"
                    .into())
            }
            None => {
                self.messages.insert(0, Chat::message("system", system));
                self.learned_from += usize::from(self.learned_from > 0);
                Ok(self)
            }
        }
    }
}

/// The fields that messages may have.
const OF_MESSAGES: [&str; 10] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "reasoning",
    "train",
    "weight",
];

/// The fields by which other formats say whether a message is trained on.
const LEARNED: [&str; 5] = ["training", "trainable", "loss", "loss_weight", "mask"];

/// Whether messages may have a field of this name.
pub(super) fn is_of_messages(field: &str) -> bool {
    OF_MESSAGES.contains(&field)
}

/// Returns why a message must not have `fields`: no chat template knows them, and this template does not read them.
pub(super) fn unknown_fields(fields: &[String], template: &Path) -> String {
    let hint = match fields.iter().any(|field| LEARNED.contains(&field.as_str())) {
        true => "; whether a message is trained on is the field `train`, true or false, or `weight`, 1 or 0",
        false => "",
    };
    let (quoted, listed) = (list_of(fields, '`'), list_of(fields, '"'));
    format!(
        "messages have the fields {quoted}, which are unknown and which the chat template {} does not read{hint}; \
         rename them with `data.records.fields`, or leave them out with `data.records.ignored_fields = [{listed}]`",
        template.display()
    )
}

fn list_of(fields: &[String], quote: char) -> String {
    fields.iter().map(|field| format!("{quote}{field}{quote}")).collect::<Vec<_>>().join(", ")
}

/// Returns the known field whose name is nearly `field`.
fn misspelt(field: &str) -> Option<&'static str> {
    // A much longer name is not near to any field, and the comparison would take long.
    if OF_MESSAGES.contains(&field) || field.len() > 24 {
        return None;
    }
    let near = |known: &&&str| strsim::damerau_levenshtein(field, known) * 4 <= known.len();
    OF_MESSAGES.iter().find(near).copied()
}
