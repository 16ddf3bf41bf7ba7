//! Items of requests and responses, and the messages of a chat that they stand for.

use crate::blocks::{Block, BlockKind};
use crate::error::{ApiError, Result};
use serde_json::{Value, json};

/// The item of a block with its ids. An item that is not `done` has no text yet.
pub fn item(block: &Block, (id, call): &(String, String), done: bool) -> Value {
    let status = if done { "completed" } else { "in_progress" };
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
                let content = content(&item["content"]).ok_or_else(|| {
                    wrong("has no `content` that is a text or a list of texts; images, audio and files are not implemented")
                })?;
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
                let function = json!({"name": name, "arguments": item["arguments"]});
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
