//! `POST /v1/chat/completions`.

use crate::answer::{Answer, Form};
use crate::body::Body;
use crate::choice::{Choice, Part};
use crate::error::{ApiError, Result};
use crate::logprobs::entry;
use crate::metrics::Timer;
use crate::params::{self, Params};
use crate::served::Served;
use axum::response::Response;
use ottava_lm::data::Chat;
use ottava_lm::engine::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// Messages of the assistant.
struct Messages {
    /// Whether log-probabilities are wanted.
    logprobs: bool,
}

/// Answers a request.
pub async fn chat_completions(served: Arc<Served>, body: Body, timer: Timer) -> Result<Response> {
    served.expect_model(&body)?;
    let params = Params::read(&body, served.tokenizer.eos_ids())?;
    let messages = body.list("messages")?.ok_or_else(|| ApiError::field("messages", "`messages` is missing"))?;
    let messages = messages.iter().map(message).collect::<Result<Vec<_>>>()?;
    let tools = body.list("tools")?.map_or(Value::Null, |tools| tools.clone().into());
    for name in ["response_format", "functions", "function_call"] {
        let is_default = |value: &Value| value.get("type").is_some_and(|kind| kind == "text");
        if body.get(name).is_some_and(|value| !is_default(value)) {
            return Err(ApiError::field(name, format!("`{name}` is not implemented")));
        }
    }
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
    let prompt = served.render(Chat { messages, tools, ..Chat::default() }).await?;
    served.expect_known(&prompt)?;
    let (mut requests, mut choices) = (Vec::new(), Vec::new());
    for choice in 0..params.n {
        let request = params.request(prompt.clone(), choice, asked, served.max_model_len)?;
        requests.push(Request { logprobs, ..request });
        choices.push(Choice::new(&params, String::new(), false));
    }
    let form = Messages { logprobs: logprobs.is_some() };
    Answer::start(served, params, form, choices, requests, timer).await?.respond().await
}

/// A message as templates read it: parts of text are joined, as templates of text models know no parts.
fn message(message: &Value) -> Result<Value> {
    let wrong = |reason: &str| ApiError::field("messages", format!("a message {reason}"));
    let fields = message.as_object().ok_or_else(|| wrong("is no object"))?;
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(wrong("has no `role`"));
    }
    let mut message = message.clone();
    if let Some(Value::Array(parts)) = fields.get("content") {
        let text = |part: &Value| Some(part.get("text")?.as_str()?.to_string());
        let texts: Option<Vec<String>> = parts.iter().map(text).collect();
        message["content"] = texts
            .ok_or_else(|| wrong("has a part that is no text; images and audio are not implemented"))?
            .join("\n")
            .into();
    }
    Ok(message)
}

impl Messages {
    fn logprobs(&self, served: &Served, part: &Part) -> Result<Value> {
        if !self.logprobs {
            return Ok(Value::Null);
        }
        let content =
            part.logprobs.iter().map(|logprob| entry(logprob, &served.tokenizer)).collect::<Result<Vec<_>>>()?;
        Ok(json!({"content": content}))
    }
}

impl Form for Messages {
    const NAMES: [&'static str; 3] = ["chat.completion", "chat.completion.chunk", "chatcmpl"];

    fn choice(&mut self, served: &Served, index: usize, part: Part) -> Result<Value> {
        let logprobs = self.logprobs(served, &part)?;
        let message = json!({"role": "assistant", "content": part.text});
        Ok(json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": part.finish}))
    }

    fn piece(&mut self, served: &Served, index: usize, part: Part) -> Result<Value> {
        let logprobs = self.logprobs(served, &part)?;
        let delta = if part.text.is_empty() { json!({}) } else { json!({"content": part.text}) };
        Ok(json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": part.finish}))
    }

    fn first(&self, choices: usize) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (0..choices)
            .map(|index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
            .collect()
    }
}
