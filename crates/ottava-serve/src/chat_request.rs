//! A conversation that asks for an answer: its fields, its prompt, and how the text of the answer is divided.

use crate::answer::Prepared;
use crate::body::Body;
use crate::choice::Choice;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::params::{self, Params};
use crate::reader::{Division, Reader};
use crate::reasoning::Beginning;
use crate::served::{PromptOptions, Rendered, Served};
use crate::tool_calls::{Calls, Tools};
use crate::tool_choice::{Kind, ToolChoice};
use crate::truncation::Truncation;
use ottava_data::{Chat, PromptForm, parse_json};
use ottava_engine::Request;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields that only chats have.
const OWN: &[&str] = &[
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_completion_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "echo",
];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[
    ("functions", &["[]"]),
    ("function_call", &["\"auto\"", "\"none\""]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("documents", &["[]"]),
    ("chat_template", &[]),
    ("add_special_tokens", &["false"]),
];
/// Messages, tools and variables of the template, at most.
const MOST_MESSAGES: usize = 4096;
const MOST_TOOLS: usize = 128;
const MOST_KWARGS: usize = 64;

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    params::known(OWN, NOT_IMPLEMENTED)
}

/// A conversation whose answer can be computed.
pub struct Conversation {
    pub prepared: Prepared,
    pub prompt: Vec<u32>,
    /// The text before the answer: the last message of the assistant, if the request wants it repeated.
    pub echo: String,
    /// Whether log-probabilities are wanted.
    pub logprobs: bool,
    /// Whether answers with calls end with the reason `tool_calls`: not for a function that the request names, as with OpenAI.
    pub ends_with_calls: bool,
    /// Whether reasoning is divided from content.
    pub has_reasoning: bool,
}

impl Conversation {
    /// Reads a request.
    pub async fn read(served: &Arc<Served>, body: &Body) -> Result<Conversation> {
        let model = served.model(body)?;
        params::expect_implemented(body, served, NOT_IMPLEMENTED)?;
        let mut params = Params::read(body, served, model)?;
        let (chat, form) = (conversation(body)?, prompt_form(body)?);
        let asked = match body.count("max_completion_tokens")? {
            Some(count) => Some(count),
            None => body.count("max_tokens")?,
        };
        if asked == Some(0) {
            return Err(ApiError::field("max_tokens", "`max_tokens` is 0; an answer has one token at least"));
        }
        let top = params::logprobs(body, "top_logprobs")?;
        let logprobs = body.flag("logprobs")?.then(|| top.unwrap_or(0));
        if logprobs.is_none() && top.is_some_and(|top| top > 0) {
            return Err(ApiError::field("top_logprobs", "`top_logprobs` is for `logprobs: true`"));
        }
        let prompt_logprobs = params::logprobs(body, "prompt_logprobs")?;
        let choice = tool_choice(body)?;
        let most = if body.flag_on("parallel_tool_calls")? { usize::MAX } else { 1 };
        let grammar = constraint::grammar(served, body, choice.schema(most)?).await?;
        // Channels have their own calls, so calls that are constrained to JSON have no reasoning there.
        let has_constrained_calls = matches!(choice.kind, Kind::Required | Kind::Named(_));
        let reasoning = served.reasoning_parser.filter(|parser| !(has_constrained_calls && parser.has_channels()));
        let continued =
            form.continue_final_message.then(|| chat.messages.last().map_or("", |last| text_of(last)).to_string());
        let effort = body.text("reasoning_effort")?.map(str::to_string);
        let thinks = effort.as_deref() != Some("none");
        let options = PromptOptions { form, effort, reasoning, continued };
        let echo = if body.flag("echo")? { echoed(&chat) } else { String::new() };
        let Rendered { ids: mut prompt, beginning, describes } = served.render(body.bytes, chat, options).await?;
        let room = served.max_model_len.saturating_sub(asked.unwrap_or(1));
        Truncation::read(body, room)?.shorten(&mut prompt);
        served.expect_known("messages", &prompt)?;
        // Some templates begin reasoning whatever the effort is.
        let thinks = thinks || beginning == Beginning::Within;
        let before = reasoning.filter(|_| thinks).and_then(|parser| parser.before_constraint(beginning));
        let has_grammar = grammar.is_some();
        let grammar = grammar.map(|grammar| match before {
            Some(marks) => grammar.after_reasoning(marks),
            None => grammar,
        });
        let parser =
            served.tool_call_parser.or_else(|| describes.then(|| "hermes".parse().expect("it is implemented")));
        let calls = match &choice.kind {
            Kind::Required => Some(Calls::Required),
            Kind::Named(name) => Some(Calls::Named(name.clone())),
            // A text with another constraint is no call.
            Kind::Auto if !choice.tools.is_empty() && !has_grammar => parser.map(Calls::Free),
            Kind::Auto | Kind::None => None,
        };
        let opened = beginning == Beginning::Within;
        let tools = Tools::new(&choice.tools);
        let division = Division { reasoning, opened, is_constrained: has_grammar, calls, tools, most };
        params.hidden.show(&served.tokenizer, division.markers().into_iter());
        let request = params.request(prompt, asked, served.max_model_len);
        let request = request.map_err(|error| error.renamed(&[("prompt", "messages")]))?;
        let requests =
            vec![Request { logprobs: params.logprobs_of_engine(logprobs), prompt_logprobs, grammar, ..request }];
        params.expect_small_answer(&requests, false)?;
        let prompt = requests[0].prompt.clone();
        let mut choices = Vec::new();
        for _ in 0..params.n {
            let choice = Choice::new(&params, &served.tokenizer, &prompt, String::new(), false)?;
            choices.push(choice.read_by(Reader::new(&division)));
        }
        Ok(Conversation {
            prepared: Prepared { params, choices, requests },
            prompt,
            echo,
            logprobs: logprobs.is_some(),
            ends_with_calls: !matches!(choice.kind, Kind::Named(_)),
            has_reasoning: division.reasoning.is_some(),
        })
    }
}

/// The text of the last message, if the assistant has written it.
fn echoed(chat: &Chat) -> String {
    let last = chat.messages.last().filter(|message| message["role"] == "assistant");
    match last.map(|message| &message["content"]) {
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        content => content.and_then(Value::as_str).unwrap_or_default().to_string(),
    }
}

/// The text of a message.
fn text_of(message: &Value) -> &str {
    match &message["content"] {
        Value::Array(parts) => parts.last().and_then(|part| part["text"].as_str()).unwrap_or_default(),
        content => content.as_str().unwrap_or_default(),
    }
}

/// The messages and tools of a request.
pub fn conversation(body: &Body) -> Result<Chat> {
    let messages = body.list("messages", MOST_MESSAGES)?.filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| ApiError::field("messages", "`messages` is missing or empty"))?;
    let messages = messages.iter().enumerate().map(message).collect::<Result<Vec<_>>>()?;
    let tools = tool_choice(body)?.for_template(body.get("tools"));
    Ok(Chat { messages, tools, ..Chat::default() })
}

/// Which tools the request lists, and which of them the answer may call.
pub fn tool_choice(body: &Body) -> Result<ToolChoice> {
    let tools = body.list("tools", MOST_TOOLS)?.map_or(&[][..], Vec::as_slice);
    ToolChoice::read(body.get("tool_choice"), tools)
}

/// The options for rendering the conversation as a prompt.
pub fn prompt_form(body: &Body) -> Result<PromptForm> {
    let (add_generation_prompt, continue_final_message) =
        (body.flag_on("add_generation_prompt")?, body.flag("continue_final_message")?);
    if add_generation_prompt && continue_final_message {
        let message = "`continue_final_message` is for `add_generation_prompt: false`";
        return Err(ApiError::field("continue_final_message", message));
    }
    let kwargs = body.object("chat_template_kwargs", MOST_KWARGS)?.cloned().unwrap_or_default();
    if let Some(name) =
        kwargs.keys().find(|name| ["messages", "tools", "add_generation_prompt"].contains(&name.as_str()))
    {
        let message = format!("`chat_template_kwargs` has `{name}`, which is a field of the request");
        return Err(ApiError::field("chat_template_kwargs", message));
    }
    Ok(PromptForm { add_generation_prompt, continue_final_message, kwargs })
}

/// A message as templates read it. The template takes parts of text, or gets them as one text.
fn message((number, message): (usize, &Value)) -> Result<Value> {
    let wrong = |reason: &str| ApiError::field("messages", format!("message {number} {reason}"));
    let fields = message.as_object().ok_or_else(|| wrong("is no object"))?;
    let role = fields.get("role").and_then(Value::as_str).ok_or_else(|| wrong("has no `role`"))?;
    let mut message = message.clone();
    match fields.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            if parts.iter().any(|part| !part.get("text").is_some_and(Value::is_string)) {
                return Err(wrong("has a part that is no text; images and audio are not implemented"));
            }
        }
        // A turn that calls tools says nothing.
        None | Some(Value::Null) if role == "assistant" && calls_tools(fields) => {}
        Some(Value::Null) if role == "assistant" => message["content"] = "".into(),
        _ => return Err(wrong("has no `content` that is a text or a list of texts")),
    }
    // Templates read this field, or the field to which rendering moves its text.
    if let (Some(Value::String(reasoning)), None | Some(Value::Null)) =
        (fields.get("reasoning"), fields.get("reasoning_content"))
    {
        message["reasoning_content"] = reasoning.clone().into();
    }
    // OpenAI's arguments are JSON in a text, and templates write objects. A call without arguments may leave them out.
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let function = function.filter(|function| function.get("name").is_some_and(Value::is_string));
        let function = function.ok_or_else(|| wrong("has a call without the name of its function"))?;
        let arguments = function.entry("arguments").or_insert(Value::Null);
        *arguments = match arguments.take() {
            Value::Null => json!({}),
            Value::String(text) if text.trim().is_empty() => json!({}),
            Value::String(text) => parse_json(&text)
                .map_err(|reason| wrong(&format!("has `arguments` of a call that are not JSON: {reason}")))?,
            value => value,
        };
    }
    Ok(message)
}

fn calls_tools(fields: &Map<String, Value>) -> bool {
    fields.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty())
}
