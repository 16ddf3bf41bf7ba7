//! `POST /v1/chat/completions`.

use crate::answer::{Answer, Form};
use crate::body::Body;
use crate::choice::{Choice, Delta};
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::finish::Finish;
use crate::json::{ListText, ObjectText, text};
use crate::logprobs::{Place, entry, of_prompt};
use crate::metrics::Timer;
use crate::params::{self, Params};
use crate::served::Served;
use crate::token_ids::TokenIds;
use crate::tool_calls::{Call, CallStream, Calls, ToolChoice, as_json};
use ottava_data::{Chat, PromptForm, parse_json};
use ottava_engine::Request;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Messages of the assistant.
pub struct Messages {
    /// Whether log-probabilities are wanted.
    logprobs: bool,
    skip_special_tokens: bool,
    choices: Vec<Message>,
    /// Whether answers with calls end with the reason `tool_calls`: not for a function that the request names, as with OpenAI.
    ends_with_calls: bool,
    prompt: Vec<u32>,
    /// Whether the log-probabilities of the prompt are in `beside`, or were told.
    has_prompt_logprobs: bool,
    /// What is known of the prompt, and not told yet.
    beside: Vec<(&'static str, String)>,
}

/// A choice, or the part of it since the last piece.
struct Message {
    place: Place,
    content: String,
    calls: Vec<Call>,
    /// Calls of earlier pieces.
    called: usize,
    token_ids: TokenIds,
    logprobs: ListText,
    finish: Option<Finish>,
}

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
];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[
    ("functions", &["[]"]),
    ("function_call", &["\"auto\"", "\"none\""]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("prediction", &[]),
    ("reasoning_effort", &[]),
    ("verbosity", &[]),
    ("web_search_options", &[]),
    ("documents", &["[]"]),
    ("chat_template", &[]),
    ("echo", &["false"]),
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

/// Reads a request, and starts its completions.
pub async fn chat_completions(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    body: Body,
    timer: Timer,
) -> Result<Answer<Messages>> {
    let model = served.model(&body)?.clone();
    params::expect_implemented(&body, NOT_IMPLEMENTED)?;
    let mut params = Params::read(&body, &served, model)?;
    let (chat, form) = (conversation(&body)?, prompt_form(&body)?);
    let asked = match body.count("max_completion_tokens")? {
        Some(count) => Some(count),
        None => body.count("max_tokens")?,
    };
    if asked == Some(0) {
        return Err(ApiError::field("max_tokens", "`max_tokens` is 0; an answer has one token at least"));
    }
    let top = params::logprobs(&body, "top_logprobs")?;
    let logprobs = body.flag("logprobs")?.then(|| top.unwrap_or(0));
    if logprobs.is_none() && top.is_some() {
        return Err(ApiError::field("top_logprobs", "`top_logprobs` is for `logprobs: true`"));
    }
    let prompt_logprobs = params::logprobs(&body, "prompt_logprobs")?;
    let tools = listed_tools(&body)?;
    let choice = ToolChoice::read(body.get("tool_choice"), tools)?;
    let most = if body.flag_on("parallel_tool_calls")? { usize::MAX } else { 1 };
    let grammar = constraint::grammar(&served, &body, choice.schema(tools, most)?).await?;
    let calls = match &choice {
        ToolChoice::Required => Some(Calls::Required),
        ToolChoice::Named(name) => Some(Calls::Named(name.clone())),
        // A text with another constraint is no call.
        ToolChoice::Auto if !tools.is_empty() && grammar.is_none() => served.tool_call_parser.map(Calls::Free),
        ToolChoice::Auto | ToolChoice::None => None,
    };
    if matches!(&calls, Some(Calls::Free(parser)) if parser.marks_by_special_token()) {
        params.skip_special_tokens = false;
    }
    let prompt = served.render(body.bytes, chat, form).await?;
    served.expect_known("messages", &prompt)?;
    let request = params.request(prompt, asked, served.max_model_len)?;
    let requests = vec![Request { logprobs: params.logprobs_of_engine(logprobs), prompt_logprobs, grammar, ..request }];
    params.expect_small_answer(&requests, false)?;
    let prompt = &requests[0].prompt;
    let wanted = params.return_token_ids;
    let (mut choices, mut messages) = (Vec::new(), Vec::new());
    for _ in 0..params.n {
        let calls = calls.clone().map(|form| CallStream::new(form, most));
        choices.push(Choice::new(&params, &served.tokenizer, prompt, String::new(), false)?.with_calls(calls));
        let place = Place::after(&served.tokenizer, prompt)?.spelled(params.spelling);
        messages.push(Message::at(place, TokenIds::new(wanted)));
    }
    let form = Messages {
        logprobs: logprobs.is_some(),
        skip_special_tokens: params.skip_special_tokens,
        choices: messages,
        ends_with_calls: !matches!(calls, Some(Calls::Named(_))),
        prompt: prompt.clone(),
        has_prompt_logprobs: false,
        beside: wanted.then(|| ("prompt_token_ids", text(prompt))).into_iter().collect(),
    };
    Answer::start(served, permit, params, form, choices, requests, timer)
}

/// The messages and tools of a request.
pub fn conversation(body: &Body) -> Result<Chat> {
    let messages = body.list("messages", MOST_MESSAGES)?.filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| ApiError::field("messages", "`messages` is missing or empty"))?;
    let messages = messages.iter().enumerate().map(message).collect::<Result<Vec<_>>>()?;
    Ok(Chat { messages, tools: tools(body)?, ..Chat::default() })
}

/// The tools of a request.
fn listed_tools(body: &Body) -> Result<&[Value]> {
    Ok(body.list("tools", MOST_TOOLS)?.map_or(&[], Vec::as_slice))
}

/// The tools for the template; `null` for none, as with `tool_choice: "none"`. An empty list stays one, as in transformers.
fn tools(body: &Body) -> Result<Value> {
    let tools = body.list("tools", MOST_TOOLS)?;
    match (ToolChoice::read(body.get("tool_choice"), tools.map_or(&[], Vec::as_slice))?, tools) {
        (ToolChoice::None, _) | (_, None) => Ok(Value::Null),
        (ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_), Some(tools)) => Ok(tools.clone().into()),
    }
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
    // OpenAI's arguments are JSON in a text, and templates write objects. A call without arguments may leave them out.
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { continue };
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

impl Message {
    fn at(place: Place, token_ids: TokenIds) -> Message {
        let (content, calls, logprobs) = (String::new(), Vec::new(), ListText::default());
        Message { place, content, calls, called: 0, token_ids, logprobs, finish: None }
    }
}

impl Messages {
    /// Why a choice has ended, if it has.
    fn finish(&mut self, index: usize) -> Option<Finish> {
        let Message { finish, called, calls, .. } = &mut self.choices[index];
        let has_calls = self.ends_with_calls && *called + calls.len() > 0;
        let finish = finish.take()?;
        let reason = if has_calls && finish.reason == "stop" { "tool_calls" } else { finish.reason };
        Some(Finish { reason, ..finish })
    }

    /// Adds log-probabilities, the end and tokens to the object of a choice, which gives them away.
    fn end(&mut self, index: usize, finish: Option<Finish>, object: ObjectText) -> String {
        let Message { token_ids, logprobs, .. } = &mut self.choices[index];
        let logprobs = match self.logprobs {
            true => ObjectText::new().json("content", &std::mem::take(logprobs).json()).end(),
            false => "null".into(),
        };
        token_ids.write(Finish::write(finish, object.json("logprobs", &logprobs))).end()
    }
}

impl Form for Messages {
    const NAMES: [&'static str; 3] = ["chat.completion", "chat.completion.chunk", "chatcmpl"];

    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()> {
        let tokenizer = &served.tokenizer;
        if let Some(logprobs) = part.prompt_logprobs.filter(|_| !self.has_prompt_logprobs) {
            self.beside.push(("prompt_logprobs", of_prompt(&logprobs, &self.prompt, 0, tokenizer)?));
            self.has_prompt_logprobs = true;
        }
        let message = &mut self.choices[index];
        message.content.push_str(&part.text);
        message.calls.extend(part.calls);
        message.token_ids.extend(&part.tokens);
        message.finish = part.finish.or(message.finish.take());
        for logprob in part.logprobs.iter().filter(|_| self.logprobs) {
            message.logprobs.push(&entry(logprob, &message.place, tokenizer)?);
            if !(self.skip_special_tokens && tokenizer.is_special(logprob.token)) {
                message.place.push(tokenizer, logprob.token)?;
            }
        }
        Ok(())
    }

    fn whole(&mut self, index: usize, number: usize) -> String {
        let finish = self.finish(index);
        let message = &mut self.choices[index];
        let (content, calls) = (std::mem::take(&mut message.content), std::mem::take(&mut message.calls));
        let mut answer = json!({"role": "assistant", "content": content});
        if !calls.is_empty() {
            answer["tool_calls"] = as_json(&calls, None).into();
            if answer["content"] == "" {
                answer["content"] = Value::Null;
            }
        }
        let object = ObjectText::new().field("index", &number).field("message", &answer);
        self.end(index, finish, object)
    }

    fn piece(&mut self, index: usize) -> Option<String> {
        let finish = self.finish(index);
        let message = &mut self.choices[index];
        let has_tokens = !(message.logprobs.is_empty() && message.token_ids.is_empty());
        let mut delta = json!({});
        let calls = std::mem::take(&mut message.calls);
        if !calls.is_empty() {
            delta["tool_calls"] = as_json(&calls, Some(message.called)).into();
            message.called += calls.len();
        }
        if !message.content.is_empty() {
            delta["content"] = std::mem::take(&mut message.content).into();
        }
        // Text that may become a call is held back.
        let is_empty = delta == json!({}) && finish.is_none() && !has_tokens;
        let object = ObjectText::new().field("index", &index).field("delta", &delta);
        (!is_empty).then(|| self.end(index, finish, object))
    }

    fn beside(&mut self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut self.beside)
    }

    fn first(&self) -> Vec<String> {
        let delta = json!({"role": "assistant", "content": ""});
        let piece =
            |index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}).to_string();
        (0..self.choices.len()).map(piece).collect()
    }
}
