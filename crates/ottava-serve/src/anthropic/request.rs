//! The fields of a request for a message, and the chat that it stands for.

use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::params;
use crate::served::Served;
use serde_json::{Map, Value, json};

/// Fields that chats do not have, or have with another meaning.
const OWN: &[&str] = &[
    "messages",
    "system",
    "max_tokens",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[("container", &[]), ("mcp_servers", &["[]"]), ("output_format", &[])];
/// Fields of completions that messages do not have.
const OTHERS: &[&str] = &["n", "best_of", "logprobs", "return_token_ids", "stop", "response_format", "stream_options"];
/// The fields of a request to count tokens.
pub const COUNT: &[&str] =
    &["model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"];
/// The fields of a chat, and the fields of a message that they stand for.
pub const RENAMED: &[(&str, &str)] = &[
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "thinking"),
];
/// The maximum number of messages, and of entries of other lists.
const MOST: usize = 4096;
/// The efforts of reasoning with fewer tokens than these.
const EFFORTS: [(u64, &str); 2] = [(4096, "low"), (16_384, "medium")];

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    let mut names = params::known(OWN, NOT_IMPLEMENTED);
    names.retain(|name| !OTHERS.contains(name));
    names
}

/// Returns the chat of a request.
pub fn translate(served: &Served, body: &Body) -> Result<Body> {
    params::expect_implemented(body, served, NOT_IMPLEMENTED)?;
    let mut fields = Map::new();
    for name in params::known(&["chat_template_kwargs", "max_tokens"], &[]) {
        if !OTHERS.contains(&name) {
            fields.extend(body.get(name).map(|value| (name.to_string(), value.clone())));
        }
    }
    let mut messages = Vec::new();
    if let Some(system) = body.get("system") {
        let text =
            text_of(system).ok_or_else(|| ApiError::field("system", "`system` is no text and no list of texts"))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    for (number, message) in body.list("messages", MOST)?.into_iter().flatten().enumerate() {
        add_message(&mut messages, message)
            .map_err(|reason| ApiError::field("messages", format!("message {number} {reason}")))?;
    }
    if begins_answer(&messages)? {
        fields.insert("add_generation_prompt".into(), false.into());
        fields.insert("continue_final_message".into(), true.into());
    }
    fields.insert("messages".into(), messages.into());
    fields.extend(body.get("stop_sequences").map(|stops| ("stop".to_string(), stops.clone())));
    if let Some(effort) = effort(body)? {
        fields.insert("reasoning_effort".into(), effort.into());
    }
    let format = body.object("output_config", MOST)?.and_then(|config| config.get("format"));
    if let Some(format) = format.filter(|format| !format.is_null()) {
        if format["type"].as_str().is_some_and(|kind| kind != "json_schema") {
            let message = format!("`output_config.format.type` is {}; it is json_schema", format["type"]);
            return Err(ApiError::field("output_config", message));
        }
        let schema = json!({"type": "json_schema", "json_schema": {"schema": format["schema"]}});
        fields.insert("response_format".into(), schema);
    }
    if let Some(tools) = body.list("tools", MOST)?.filter(|tools| !tools.is_empty()) {
        fields.insert("tools".into(), tools.iter().enumerate().map(tool).collect::<Result<Vec<_>>>()?.into());
    }
    if let Some(choice) = body.get("tool_choice") {
        let chosen = match (choice["type"].as_str(), choice["name"].as_str()) {
            (Some("auto"), _) => json!("auto"),
            (Some("any"), _) => json!("required"),
            (Some("none"), _) => json!("none"),
            (Some("tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
            _ => {
                let message = r#"`tool_choice.type` is auto, any, none, or "tool" with the `name` of a tool"#;
                return Err(ApiError::field("tool_choice", message));
            }
        };
        fields.insert("tool_choice".into(), chosen);
        if choice["disable_parallel_tool_use"] == true {
            fields.insert("parallel_tool_calls".into(), false.into());
        }
    }
    Ok(Body::of(body.bytes, fields))
}

/// Whether the last message is the beginning of the answer, which the answer continues.
fn begins_answer(messages: &[Value]) -> Result<bool> {
    let Some(last) = messages.last().filter(|last| last["role"] == "assistant") else { return Ok(false) };
    if !last["tool_calls"].is_null() {
        let message = "`messages` ends with calls of tools; add a message with their results";
        return Err(ApiError::field("messages", message));
    }
    // The end of a template's turn cannot be told from an empty text.
    Ok(last["content"].as_str().is_some_and(|text| !text.trim().is_empty()))
}

/// The effort of reasoning that a request asks for.
fn effort(body: &Body) -> Result<Option<String>> {
    let config = body.object("output_config", MOST)?.and_then(|config| config.get("effort")).and_then(Value::as_str);
    let Some(thinking) = body.object("thinking", MOST)? else { return Ok(config.map(str::to_string)) };
    match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => Ok(Some("none".into())),
        Some("adaptive") => Ok(config.map(str::to_string)),
        Some("enabled") => {
            let budget = thinking.get("budget_tokens").and_then(Value::as_u64).unwrap_or(u64::MAX);
            let of_budget = EFFORTS.iter().find(|(most, _)| budget < *most).map_or("high", |(_, effort)| effort);
            Ok(Some(config.unwrap_or(of_budget).to_string()))
        }
        _ => Err(ApiError::field("thinking", "`thinking.type` is enabled, disabled or adaptive")),
    }
}

/// A tool in the form of chats.
fn tool((number, tool): (usize, &Value)) -> Result<Value> {
    match (tool["type"].as_str().unwrap_or("custom"), tool["name"].as_str()) {
        ("custom", Some(name)) => {
            let mut function = json!({"name": name});
            for (from, to) in [("description", "description"), ("input_schema", "parameters")] {
                if let Some(value) = tool.get(from).filter(|value| !value.is_null()) {
                    function[to] = value.clone();
                }
            }
            Ok(json!({"type": "function", "function": function}))
        }
        ("custom", None) => Err(ApiError::field("tools", format!("tool {number} has no `name`"))),
        (kind, _) => {
            let message =
                format!("tool {number} is of the type {kind:?}; only tools with an `input_schema` are implemented");
            Err(ApiError::field("tools", message))
        }
    }
}

/// Adds the messages of a chat that a message stands for: results of tools are messages of their own. Errors with the reason.
fn add_message(messages: &mut Vec<Value>, message: &Value) -> std::result::Result<(), String> {
    let role = message["role"].as_str().ok_or("has no `role`")?;
    if !["user", "assistant", "system"].contains(&role) {
        return Err(format!("has the role {role:?}; roles are user, assistant and system"));
    }
    let blocks = match &message["content"] {
        Value::String(text) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err("has no `content` that is a text or a list of blocks".into()),
    };
    let (mut texts, mut thinking, mut calls) = (Vec::new(), String::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str().unwrap_or_default() {
            "text" => texts.push(block["text"].as_str().ok_or("has a block of text without `text`")?),
            "thinking" => thinking.push_str(block["thinking"].as_str().unwrap_or_default()),
            // Nobody but Anthropic can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let function = json!({"name": block["name"], "arguments": block["input"]});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            "tool_result" => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => {
                        text_of(content).ok_or("has a result of a tool that is no text; images are not implemented")?
                    }
                };
                let content = if block["is_error"] == true { format!("Error: {content}") } else { content };
                messages.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}));
            }
            kind => return Err(format!("has a block of the type {kind:?}, which is not implemented")),
        }
    }
    if texts.is_empty() && calls.is_empty() && thinking.is_empty() {
        return Ok(());
    }
    let mut turn = json!({"role": role, "content": texts.join("\n")});
    if !calls.is_empty() {
        turn["tool_calls"] = calls.into();
    }
    if !thinking.is_empty() {
        turn["reasoning_content"] = thinking.into();
    }
    messages.push(turn);
    Ok(())
}

/// The text of a value that is a text or a list of blocks of text.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().map(|block| block["text"].as_str()).collect::<Option<Vec<_>>>()?;
            Some(texts.join("\n"))
        }
        _ => None,
    }
}
