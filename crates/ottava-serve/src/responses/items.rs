//! Items of requests and responses, and the messages of a chat that they stand for.

use crate::blocks::{Block, BlockKind};
use crate::error::{ApiError, Result};
use ottava_data::parse_json;
use serde_json::{Value, json};

/// The state of an item.
#[derive(Clone, Copy, PartialEq)]
pub enum State {
    /// It has begun, and its text is not told yet.
    Begun,
    /// It is complete.
    Complete,
    /// `max_output_tokens` has cut it.
    Cut,
}

impl State {
    /// The state of a block that has ended. `is_last_of_cut` says whether `max_output_tokens` has ended the answer, and the block is its last one. A call
    /// is cut if its arguments are incomplete, wherever it is.
    pub fn of_ended(block: &Block, is_last_of_cut: bool) -> State {
        let is_cut = match block.kind {
            BlockKind::Call => arguments(&block.text).is_none(),
            BlockKind::Reasoning | BlockKind::Content => is_last_of_cut,
        };
        if is_cut { State::Cut } else { State::Complete }
    }

    /// The `status` of the item.
    fn status(self) -> &'static str {
        match self {
            State::Begun => "in_progress",
            State::Complete => "completed",
            State::Cut => "incomplete",
        }
    }
}

/// The arguments of a call, if their text is a whole object.
fn arguments(text: &str) -> Option<Value> {
    parse_json(text).ok().filter(Value::is_object)
}

/// The item of a block with its ids.
pub fn item(block: &Block, (id, call): &(String, String), state: State) -> Value {
    let (status, done) = (state.status(), state != State::Begun);
    let parts = |kind| if done { json!([part(kind, &block.text)]) } else { json!([]) };
    match block.kind {
        BlockKind::Reasoning => {
            json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": parts(block.kind)})
        }
        BlockKind::Content => {
            json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": parts(block.kind)})
        }
        BlockKind::Call => {
            let arguments = if done { &block.text } else { "" };
            json!({
                "id": id, "type": "function_call", "status": status, "call_id": call, "name": block.name,
                "arguments": arguments,
            })
        }
    }
}

/// A part of an item.
pub fn part(kind: BlockKind, text: &str) -> Value {
    match kind {
        BlockKind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        BlockKind::Content | BlockKind::Call => {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        }
    }
}

/// Adds the messages of items. Consecutive items of the assistant become one message.
pub fn add_to_messages<'a>(messages: &mut Vec<Value>, items: impl Iterator<Item = &'a Value>) -> Result<()> {
    for (number, item) in items.enumerate() {
        let wrong = |reason: &str| ApiError::field("input", format!("item {number} of `input` {reason}"));
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let role = match item["role"].as_str() {
                    // Templates have one name for both.
                    Some("developer") => "system",
                    Some(role) => role,
                    None => return Err(wrong("has no `role`")),
                };
                let mut content = content(&item["content"]).ok_or_else(|| {
                    wrong("has no `content` that is a text or a list of texts; images, audio and files are not implemented")
                })?;
                if role == "system" {
                    content = joined(&content).into();
                }
                match messages.last_mut().filter(|last| role == "assistant" && is_open(last)) {
                    Some(last) => last["content"] = content,
                    None => messages.push(json!({"role": role, "content": content})),
                }
            }
            "reasoning" => {
                let texts = |field: &str| {
                    let parts = item[field].as_array().into_iter().flatten();
                    parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
                };
                let text = match texts("content") {
                    text if text.is_empty() => texts("summary"),
                    text => text,
                };
                messages.push(json!({"role": "assistant", "content": null, "reasoning_content": text}));
            }
            "function_call" => {
                let (Some(id), Some(name)) = (item["call_id"].as_str(), item["name"].as_str()) else {
                    return Err(wrong("is a call without `call_id` or `name`"));
                };
                // A cut call has no arguments, so that the conversation can go on.
                let is_cut = item["status"] == "incomplete"
                    && item["arguments"].as_str().is_some_and(|text| arguments(text).is_none());
                let given = if is_cut { "{}".into() } else { item["arguments"].clone() };
                let function = json!({"name": name, "arguments": given});
                let call = json!({"id": id, "type": "function", "function": function});
                match messages.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(last) => match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
                }
            }
            "function_call_output" => {
                let id = item["call_id"].as_str().ok_or_else(|| wrong("is a result without `call_id`"))?;
                let content = content(&item["output"]).ok_or_else(|| wrong("has no `output` that is a text"))?;
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            other => return Err(wrong(&format!("is of the type {other:?}, which is not implemented"))),
        }
    }
    // An answer that has only reasoning is an empty answer.
    for message in messages.iter_mut() {
        if message["content"].is_null() && message["tool_calls"].is_null() {
            message["content"] = "".into();
        }
    }
    Ok(())
}

/// Whether a message has only reasoning so far.
fn is_open(message: &Value) -> bool {
    message["role"] == "assistant" && message["content"].is_null() && message["tool_calls"].is_null()
}

/// The content of a message with these parts.
fn content(content: &Value) -> Option<Value> {
    match content {
        Value::String(_) => Some(content.clone()),
        Value::Array(parts) => {
            let text = |part: &Value| {
                let text = part.get("text").or_else(|| part.get("refusal"))?.as_str()?;
                Some(json!({"type": "text", "text": text}))
            };
            parts.iter().map(text).collect::<Option<Vec<_>>>().map(Value::from)
        }
        _ => None,
    }
}

/// The text of content.
fn joined(content: &Value) -> String {
    match content {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"),
        content => content.as_str().unwrap_or_default().to_string(),
    }
}
