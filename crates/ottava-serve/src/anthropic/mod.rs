//! `/v1/messages`: Anthropic's API. A request is answered as a chat, and only the form of the answer differs.

mod request;

use crate::answer::{Answer, Form, Message, Work, new_id};
use crate::blocks::{Block, BlockKind, Blocks, Change};
use crate::body::Body;
use crate::chat_request::Conversation;
use crate::choice::Delta;
use crate::error::{ApiError, Result};
use crate::finish::{Finish, StopReason};
use crate::metrics::Timer;
use crate::served::Served;
use request::RENAMED;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

pub use request::{COUNT, fields};

/// A message of the assistant.
pub struct MessageReply {
    blocks: Blocks,
    /// The id of each block, which only calls tell.
    ids: Vec<String>,
    finish: Option<Finish>,
    ready: Vec<Message>,
}

/// Reads a request, and starts its completion.
pub async fn message(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    body: Body,
    timer: Timer,
) -> Result<Answer<MessageReply>> {
    if body.count("max_tokens")?.is_none() {
        return Err(ApiError::field("max_tokens", "`max_tokens` is missing"));
    }
    let chat = request::translate(&served, &body)?;
    let conversation = Conversation::read(&served, &chat).await.map_err(|error| error.renamed(RENAMED))?;
    let form = MessageReply { blocks: Blocks::default(), ids: Vec::new(), finish: None, ready: Vec::new() };
    Answer::start(served, permit, conversation.prepared, form, timer)
}

/// Counts the tokens of a prompt.
pub async fn count_tokens(served: &Arc<Served>, body: Body) -> Result<Value> {
    let chat = request::translate(served, &body)?;
    let conversation = Conversation::read(served, &chat).await.map_err(|error| error.renamed(RENAMED))?;
    Ok(json!({"input_tokens": conversation.prompt.len()}))
}

/// The error of a request, in Anthropic's form.
pub fn error(error: &ApiError) -> Value {
    let kind = match error.status().as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message()}})
}

impl MessageReply {
    fn message(&self, work: &Work, content: Value) -> Value {
        let usage = work.usage();
        let (reason, sequence) = self.stop();
        json!({
            "id": work.id, "type": "message", "role": "assistant", "model": work.params.model.name, "content": content,
            "stop_reason": reason, "stop_sequence": sequence,
            "usage": {
                "input_tokens": usage.prompt - usage.cached.unwrap_or(0),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached.unwrap_or(0),
                "output_tokens": usage.completion,
            },
        })
    }

    /// Why the message has ended, and the text that has ended it.
    fn stop(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(finish) = &self.finish else { return (None, None) };
        let calls = self.blocks.list().iter().any(|block| block.kind == BlockKind::Call);
        match (&finish.stop, finish.reason) {
            (_, "length") => (Some("max_tokens"), None),
            _ if calls => (Some("tool_use"), None),
            (StopReason::Text(text), _) => (Some("stop_sequence"), Some(text)),
            _ => (Some("end_turn"), None),
        }
    }

    fn push(&mut self, name: &'static str, mut fields: Value) {
        fields["type"] = name.into();
        self.ready.push(Message { event: Some(name), data: fields.to_string() });
    }

    /// Adds the events of changes.
    fn follow(&mut self, changes: Vec<Change>) {
        for block in &self.blocks.list()[self.ids.len()..] {
            self.ids.push(block.id.clone().unwrap_or_else(|| new_id("toolu_")));
        }
        for change in changes {
            match change {
                Change::Begin(index) => {
                    let block = self.blocks.list()[index].clone();
                    let begun = content_block(&Block { text: String::new(), ..block }, &self.ids[index]);
                    self.push("content_block_start", json!({"index": index, "content_block": begun}));
                }
                Change::Add(index, text) => {
                    let delta = match self.blocks.list()[index].kind {
                        BlockKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                        BlockKind::Content => json!({"type": "text_delta", "text": text}),
                        BlockKind::Call => json!({"type": "input_json_delta", "partial_json": text}),
                    };
                    self.push("content_block_delta", json!({"index": index, "delta": delta}));
                }
                Change::End(index) => {
                    if self.blocks.list()[index].kind == BlockKind::Reasoning {
                        let delta = json!({"type": "signature_delta", "signature": ""});
                        self.push("content_block_delta", json!({"index": index, "delta": delta}));
                    }
                    self.push("content_block_stop", json!({"index": index}));
                }
            }
        }
    }
}

/// A block in Anthropic's form. Arguments that are incomplete, because the answer was cut, are left out.
fn content_block(block: &Block, id: &str) -> Value {
    let Block { kind, text, name, .. } = block;
    match kind {
        BlockKind::Reasoning => json!({"type": "thinking", "thinking": text, "signature": ""}),
        BlockKind::Content => json!({"type": "text", "text": text}),
        BlockKind::Call => {
            let input = ottava_data::parse_json(text).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

impl Form for MessageReply {
    const ID: &'static str = "msg_";

    fn add(&mut self, _served: &Served, _index: usize, part: Delta) -> Result<()> {
        for part in part.parts {
            let changes = self.blocks.add(part);
            self.follow(changes);
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }

    fn whole(&mut self, work: &Work, _choices: &[usize]) -> String {
        let changes = self.blocks.finish();
        self.follow(changes);
        let content = self.blocks.list().iter().zip(&self.ids).map(|(block, id)| content_block(block, id)).collect();
        self.message(work, content).to_string()
    }

    fn first(&mut self, work: &Work) -> Vec<Message> {
        let message = self.message(work, json!([]));
        self.push("message_start", json!({"message": message}));
        self.push("ping", json!({}));
        std::mem::take(&mut self.ready)
    }

    fn piece(&mut self, _work: &Work, _index: usize) -> Vec<Message> {
        std::mem::take(&mut self.ready)
    }

    fn last(&mut self, work: &Work) -> Vec<Message> {
        let changes = self.blocks.finish();
        self.follow(changes);
        let (reason, sequence) = self.stop();
        let (delta, usage) = (json!({"stop_reason": reason, "stop_sequence": sequence}), work.usage());
        let usage = json!({
            "input_tokens": usage.prompt - usage.cached.unwrap_or(0), "cache_read_input_tokens": usage.cached.unwrap_or(0),
            "output_tokens": usage.completion,
        });
        self.push("message_delta", json!({"delta": delta, "usage": usage}));
        self.push("message_stop", json!({}));
        std::mem::take(&mut self.ready)
    }

    fn failed(&mut self, _work: &Work, failure: &ApiError) -> Vec<Message> {
        self.push("error", error(failure));
        std::mem::take(&mut self.ready)
    }
}
