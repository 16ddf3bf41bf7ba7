//! The fields of a request for a response, and the chat that it stands for.

use super::items::add_to_messages;
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::params::{self, expect_implemented};
use crate::served::Served;
use serde_json::{Map, Value, json};

/// Fields that chats do not have, or have with another meaning.
const OWN: &[&str] = &[
    "input",
    "instructions",
    "previous_response_id",
    "background",
    "max_output_tokens",
    "reasoning",
    "text",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include",
    "truncation",
    "max_tool_calls",
    "chat_template_kwargs",
];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] =
    &[("conversation", &[]), ("prompt", &[]), ("top_logprobs", &["0"]), ("context_management", &[])];
/// Fields of completions that responses do not have.
const OTHERS: &[&str] = &["n", "best_of", "logprobs", "max_tokens", "return_token_ids", "response_format"];
/// The fields of a chat, and the fields of a response that they stand for.
pub const RENAMED: &[(&str, &str)] = &[
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
];
/// The values of `include` that name parts of items which tools of OpenAI's servers and images add.
const INCLUDABLE: &[&str] = &[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
];
/// The maximum number of items, and of fields of an object.
const MOST_ITEMS: usize = 4096;
const MOST_FIELDS: usize = 64;

/// What a request asks for beside its completion.
pub struct Asked {
    /// The conversation, without the instructions.
    pub messages: Vec<Value>,
    /// Whether the response is stored.
    pub stores: bool,
    /// Fields of the request that the response repeats.
    pub echoed: Vec<(&'static str, Value)>,
}

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    let mut names = params::known(OWN, NOT_IMPLEMENTED);
    names.retain(|name| !OTHERS.contains(name));
    names
}

/// Returns what a request asks for, and its chat.
pub fn translate(served: &Served, body: Body) -> Result<(Asked, Body)> {
    expect_implemented(&body, served, NOT_IMPLEMENTED)?;
    if body.flag("background")? {
        let message = "`background` is true, and responses in the background are not implemented; leave it out, and keep the connection open";
        return Err(ApiError::field("background", message));
    }
    expect_includable(served, &body)?;
    // The limit counts the calls that a server runs itself, and this server runs none.
    body.count("max_tool_calls")?;
    if body.text("truncation")?.is_some_and(|truncation| truncation != "disabled") {
        served.tolerance.ignore("truncation", "is not implemented")?;
    }
    let mut messages = match body.text("previous_response_id")? {
        None => Vec::new(),
        Some(id) => match served.responses.get(id) {
            Some(stored) => stored.messages.clone(),
            None => return Err(ApiError::no_previous_response(id)),
        },
    };
    match body.get("input") {
        None => return Err(ApiError::field("input", "`input` is missing; it is a text or a list of items")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(_) => {
            let items = body.list("input", MOST_ITEMS)?.into_iter().flatten();
            add_to_messages(&mut messages, items)?;
        }
    }
    let mut fields = Map::new();
    let common = params::known(&["chat_template_kwargs", "parallel_tool_calls"], &[]);
    for name in common.iter().filter(|name| !OTHERS.contains(name) && !["store", "priority"].contains(name)) {
        fields.extend(body.get(name).map(|value| (name.to_string(), value.clone())));
    }
    let instructions = body.text("instructions")?;
    fields.insert("messages".into(), with_instructions(&messages, instructions).into());
    if let Some(most) = body.get("max_output_tokens") {
        fields.insert("max_completion_tokens".into(), most.clone());
    }
    let reasoning = body.object("reasoning", MOST_FIELDS)?;
    fields.extend(
        reasoning
            .and_then(|reasoning| reasoning.get("effort"))
            .map(|effort| ("reasoning_effort".into(), effort.clone())),
    );
    if let Some(format) = format(&body)? {
        fields.insert("response_format".into(), format);
    }
    let tools = body.list("tools", MOST_ITEMS)?.filter(|tools| !tools.is_empty());
    if let Some(tools) = tools {
        fields.insert("tools".into(), tools.iter().map(tool).collect());
    }
    if let Some(choice) = body.get("tool_choice") {
        let choice = match choice["name"].as_str().filter(|_| choice["type"] == "function") {
            Some(name) => json!({"type": "function", "function": {"name": name}}),
            None => choice.clone(),
        };
        fields.insert("tool_choice".into(), choice);
    }
    let get = |name: &str, default: Value| body.get(name).cloned().unwrap_or(default);
    let reasoning = reasoning.cloned().unwrap_or_default();
    let stores = body.flag_on("store")?;
    let echoed = vec![
        ("background", false.into()),
        ("instructions", get("instructions", Value::Null)),
        ("max_output_tokens", get("max_output_tokens", Value::Null)),
        ("max_tool_calls", get("max_tool_calls", Value::Null)),
        ("metadata", get("metadata", json!({}))),
        ("parallel_tool_calls", get("parallel_tool_calls", true.into())),
        ("previous_response_id", get("previous_response_id", Value::Null)),
        ("reasoning", json!({"effort": reasoning.get("effort"), "summary": reasoning.get("summary")})),
        ("service_tier", "default".into()),
        ("store", stores.into()),
        ("temperature", get("temperature", served.sampling.temperature.into())),
        ("text", get("text", json!({"format": {"type": "text"}}))),
        ("tool_choice", get("tool_choice", "auto".into())),
        ("tools", get("tools", json!([]))),
        ("top_logprobs", 0.into()),
        ("top_p", get("top_p", served.sampling.top_p.into())),
        ("truncation", "disabled".into()),
        ("user", get("user", Value::Null)),
    ];
    Ok((Asked { messages, stores, echoed }, Body::of(body.bytes, fields)))
}

/// The messages, beginning with one message that has the instructions and the system messages at the beginning. Many templates accept a single system
/// message, and only at the beginning.
fn with_instructions(messages: &[Value], instructions: Option<&str>) -> Vec<Value> {
    let leading = messages.iter().take_while(|message| message["role"] == "system").count();
    let (systems, others) = messages.split_at(leading);
    let texts = instructions.into_iter().chain(systems.iter().filter_map(|message| message["content"].as_str()));
    let text = texts.collect::<Vec<_>>().join("\n\n");
    let system = (leading > 0 || instructions.is_some()).then(|| json!({"role": "system", "content": text}));
    system.into_iter().chain(others.iter().cloned()).collect()
}

/// Reads `include`. Values that name parts of items which no answer has are accepted.
fn expect_includable(served: &Served, body: &Body) -> Result<()> {
    for value in body.texts("include", MOST_FIELDS)? {
        match value {
            "reasoning.encrypted_content" | "message.output_text.logprobs" => {
                served.tolerance.ignore(&format!("include: {value}"), "is not implemented")?;
            }
            value if INCLUDABLE.contains(&value) => {}
            value => {
                let known = INCLUDABLE.join(", ");
                let message =
                    format!("`include` has {value:?}, which is no part of a response; the other values are {known}");
                return Err(ApiError::field("include", message));
            }
        }
    }
    Ok(())
}

/// The constraint of `text.format`, in the form of chats.
fn format(body: &Body) -> Result<Option<Value>> {
    let Some(format) = body.object("text", MOST_FIELDS)?.and_then(|text| text.get("format")) else { return Ok(None) };
    Ok(Some(match format["type"].as_str() {
        Some("json_schema") => {
            json!({"type": "json_schema", "json_schema": {"name": format["name"], "schema": format["schema"]}})
        }
        _ => format.clone(),
    }))
}

/// A tool in the form of chats. A tool that is no function stays as it is, and is refused there.
fn tool(tool: &Value) -> Value {
    match tool["type"].as_str() {
        Some("function") if tool["function"].is_null() => {
            let mut function = tool.clone();
            if let Some(fields) = function.as_object_mut() {
                fields.retain(|name, value| name != "type" && !value.is_null());
            }
            json!({"type": "function", "function": function})
        }
        _ => tool.clone(),
    }
}
