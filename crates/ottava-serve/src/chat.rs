//! `POST /v1/chat/completions`.

use crate::answer::Answer;
use crate::body::Body;
use crate::chat_request::Conversation;
use crate::choice::Delta;
use crate::choices::Choices;
use crate::error::Result;
use crate::finish::Finish;
use crate::format::Part;
use crate::json::{ListText, ObjectText, text};
use crate::logprobs::{Place, entry, of_prompt};
use crate::metrics::Timer;
use crate::params::Hidden;
use crate::served::Served;
use crate::token_ids::TokenIds;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::OwnedSemaphorePermit;

/// Messages of the assistant.
pub struct Messages {
    /// Whether log-probabilities are wanted.
    logprobs: bool,
    hidden: Hidden,
    choices: Vec<Message>,
    /// Whether answers with calls end with the reason `tool_calls`.
    ends_with_calls: bool,
    has_reasoning: bool,
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
    reasoning: String,
    calls: Vec<Call>,
    /// All calls that have begun.
    called: usize,
    token_ids: TokenIds,
    logprobs: ListText,
    finish: Option<Finish>,
}

/// A call, or the part of it since the last piece.
struct Call {
    /// The number of earlier calls.
    index: usize,
    /// The id and the name, if they were not told.
    head: Option<(String, String)>,
    /// The arguments as JSON.
    arguments: String,
}

impl Call {
    /// The call of a whole message.
    fn whole(&self) -> Value {
        let (id, name) = self.head.as_ref().expect("it was never told");
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": self.arguments}})
    }

    /// The delta of a stream.
    fn delta(&self) -> Value {
        match &self.head {
            Some((id, name)) => json!({
                "index": self.index, "id": id, "type": "function",
                "function": {"name": name, "arguments": self.arguments},
            }),
            None => json!({"index": self.index, "function": {"arguments": self.arguments}}),
        }
    }
}

/// A new id of a call. It is unique in the server and has nine digits and letters, which templates of Mistral require.
pub fn id_of_call() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("c{:08x}", COUNT.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff)
}

/// Reads a request, and starts its completions.
pub async fn chat_completions(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    body: Body,
    timer: Timer,
) -> Result<Answer<Messages>> {
    let Conversation { prepared, prompt, echo, logprobs, ends_with_calls, has_reasoning } =
        Conversation::read(&served, &body).await?;
    let (params, mut choices) = (&prepared.params, Vec::new());
    let wanted = params.return_token_ids;
    for _ in 0..params.n {
        let place = Place::after(&served.tokenizer, &prompt)?.spelled(params.spelling);
        choices.push(Message::at(place, TokenIds::new(wanted), echo.clone()));
    }
    let form = Messages {
        logprobs,
        hidden: params.hidden.clone(),
        choices,
        ends_with_calls,
        has_reasoning,
        beside: wanted.then(|| ("prompt_token_ids", text(&prompt))).into_iter().collect(),
        prompt,
        has_prompt_logprobs: false,
    };
    Answer::start(served, permit, prepared, form, timer)
}

impl Message {
    fn at(place: Place, token_ids: TokenIds, content: String) -> Message {
        let (reasoning, logprobs) = (String::new(), ListText::default());
        Message { place, content, reasoning, calls: Vec::new(), called: 0, token_ids, logprobs, finish: None }
    }

    fn add(&mut self, part: Part) {
        match part {
            Part::Content(text) => self.content.push_str(&text),
            Part::Reasoning(text) => self.reasoning.push_str(&text),
            Part::Call { name, id } => {
                let head = Some((id.unwrap_or_else(id_of_call), name));
                self.calls.push(Call { index: self.called, head, arguments: String::new() });
                self.called += 1;
            }
            Part::Arguments(text) => match self.calls.last_mut() {
                Some(call) => call.arguments.push_str(&text),
                None => self.calls.push(Call { index: self.called - 1, head: None, arguments: text }),
            },
            Part::EndOfCall => {}
        }
    }

    /// Moves the reasoning into its two fields: vLLM's, and the field that earlier versions of vLLM, DeepSeek and other servers have.
    fn move_reasoning(&mut self, to: &mut Value) {
        if !self.reasoning.is_empty() {
            let reasoning = std::mem::take(&mut self.reasoning);
            to["reasoning"] = reasoning.clone().into();
            to["reasoning_content"] = reasoning.into();
        }
    }
}

impl Messages {
    /// Why a choice has ended, if it has.
    fn finish(&mut self, index: usize) -> Option<Finish> {
        let Message { finish, called, .. } = &mut self.choices[index];
        let has_calls = self.ends_with_calls && *called > 0;
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

impl Choices for Messages {
    const NAMES: [&'static str; 3] = ["chat.completion", "chat.completion.chunk", "chatcmpl-"];

    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()> {
        let tokenizer = &served.tokenizer;
        if let Some(logprobs) = part.prompt_logprobs.filter(|_| !self.has_prompt_logprobs) {
            self.beside.push(("prompt_logprobs", of_prompt(&logprobs, &self.prompt, 0, tokenizer)?));
            self.has_prompt_logprobs = true;
        }
        let message = &mut self.choices[index];
        part.parts.into_iter().for_each(|part| message.add(part));
        message.token_ids.extend(&part.tokens);
        message.finish = part.finish.or(message.finish.take());
        for logprob in part.logprobs.iter().filter(|_| self.logprobs) {
            message.logprobs.push(&entry(logprob, &message.place, tokenizer)?);
            if !self.hidden.hides(tokenizer, logprob.token) {
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
        if answer["content"] == "" && !(calls.is_empty() && message.reasoning.is_empty()) {
            answer["content"] = Value::Null;
        }
        message.move_reasoning(&mut answer);
        if !calls.is_empty() {
            answer["tool_calls"] = calls.iter().map(Call::whole).collect();
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
            delta["tool_calls"] = calls.iter().map(Call::delta).collect();
        }
        message.move_reasoning(&mut delta);
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

    fn has_reasoning(&self) -> bool {
        self.has_reasoning
    }
}
