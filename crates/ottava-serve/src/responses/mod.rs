//! `/v1/responses`: OpenAI's API whose answers are lists of items. A request is a conversation in other words, so it is answered as a chat, and only the
//! form of the answer differs.

mod items;
mod request;
mod stream;

use crate::answer::{Answer, Form, Message, Work};
use crate::blocks::{BlockKind, Blocks};
use crate::body::Body;
use crate::chat::id_of_call;
use crate::chat_request::Conversation;
use crate::choice::Delta;
use crate::error::{ApiError, Result};
use crate::metrics::Timer;
use crate::served::Served;
use items::State;
use ottava_data::write_json;
use request::{Asked, RENAMED};
use serde_json::{Value, json};
use std::sync::Arc;
use stream::Events;
use tokio::sync::OwnedSemaphorePermit;

pub use request::fields;

/// A response.
pub struct ResponseReply {
    served: Arc<Served>,
    asked: Asked,
    blocks: Blocks,
    /// The id of each item, and the id of the call for calls.
    ids: Vec<(String, String)>,
    /// Why the answer has ended, if it has.
    reason: Option<&'static str>,
    events: Events,
}

/// Reads a request, and starts its completion.
pub async fn respond(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    body: Body,
    timer: Timer,
) -> Result<Answer<ResponseReply>> {
    let (asked, chat) = request::translate(&served, body)?;
    let conversation = Conversation::read(&served, &chat).await.map_err(|error| error.renamed(RENAMED))?;
    let form = ResponseReply {
        served: served.clone(),
        asked,
        blocks: Blocks::default(),
        ids: Vec::new(),
        reason: None,
        events: Events::default(),
    };
    Answer::start(served, permit, conversation.prepared, form, timer)
}

/// Returns the stored response with this id.
pub fn stored(served: &Served, id: &str) -> Result<Value> {
    served.responses.get(id).map(|stored| stored.response.clone()).ok_or_else(|| ApiError::no_response(id))
}

/// Removes the stored response with this id.
pub fn delete(served: &Served, id: &str) -> Result<Value> {
    match served.responses.remove(id) {
        true => Ok(json!({"id": id, "object": "response.deleted", "deleted": true})),
        false => Err(ApiError::no_response(id)),
    }
}

impl ResponseReply {
    /// The response in a state.
    fn response(&self, work: &Work, status: &str) -> Value {
        let usage = work.usage();
        let is_over = status != "in_progress";
        let mut response = json!({
            "id": work.id, "object": "response", "created_at": work.created, "status": status, "error": null,
            "incomplete_details": if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "model": work.params.model.name,
            "output": if is_over { self.output() } else { json!([]) },
            "usage": if is_over { json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached.unwrap_or(0)},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }) } else { Value::Null },
        });
        for (name, value) in &self.asked.echoed {
            response[name] = value.clone();
        }
        response
    }

    /// The items of the answer.
    fn output(&self) -> Value {
        let (blocks, is_cut) = (self.blocks.list(), self.is_cut());
        let state = |index| State::of_ended(&blocks[index], is_cut && index + 1 == blocks.len());
        self.ids.iter().enumerate().map(|(index, ids)| items::item(&blocks[index], ids, state(index))).collect()
    }

    /// Whether `max_output_tokens` has ended the answer.
    fn is_cut(&self) -> bool {
        self.reason == Some("length")
    }

    /// The state of an answer that has ended.
    fn status(&self) -> &'static str {
        if self.is_cut() { "incomplete" } else { "completed" }
    }

    /// Adds the items that blocks have begun, and their events.
    fn follow(&mut self, changes: Vec<crate::blocks::Change>) {
        let is_cut = self.is_cut();
        let ResponseReply { blocks, ids, events, .. } = self;
        for block in &blocks.list()[ids.len()..] {
            let (start, call) = match block.kind {
                BlockKind::Reasoning => ("rs_", String::new()),
                BlockKind::Content => ("msg_", String::new()),
                BlockKind::Call => ("fc_", block.id.clone().unwrap_or_else(id_of_call)),
            };
            ids.push((crate::answer::new_id(start), call));
        }
        changes.into_iter().for_each(|change| events.add(change, blocks, ids, is_cut));
    }

    /// Ends the answer, and stores it.
    fn finish(&mut self, work: &Work) -> Value {
        let changes = self.blocks.finish();
        self.follow(changes);
        let response = self.response(work, self.status());
        if self.asked.stores {
            let mut messages = std::mem::take(&mut self.asked.messages);
            items::add_to_messages(&mut messages, response["output"].as_array().into_iter().flatten())
                .expect("items of answers are messages");
            self.served.responses.insert(work.id.clone(), response.clone(), messages);
        }
        response
    }
}

impl Form for ResponseReply {
    const ID: &'static str = "resp_";

    fn add(&mut self, _served: &Served, _index: usize, part: Delta) -> Result<()> {
        // The end of the last item tells whether the answer was cut.
        self.reason = part.finish.map(|finish| finish.reason).or(self.reason);
        for part in part.parts {
            let changes = self.blocks.add(part);
            self.follow(changes);
        }
        Ok(())
    }

    fn whole(&mut self, work: &Work, _choices: &[usize]) -> String {
        write_json(&self.finish(work))
    }

    fn first(&mut self, work: &Work) -> Vec<Message> {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response(work, "in_progress");
            self.events.push(name, json!({"response": response}));
        }
        self.events.take()
    }

    fn piece(&mut self, _work: &Work, _index: usize) -> Vec<Message> {
        self.events.take()
    }

    fn last(&mut self, work: &Work) -> Vec<Message> {
        let response = self.finish(work);
        let name = if self.status() == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.events.push(name, json!({"response": response}));
        self.events.take()
    }

    fn failed(&mut self, work: &Work, error: &ApiError) -> Vec<Message> {
        let error = error.json()["error"].clone();
        let mut response = self.response(work, "failed");
        response["error"] = json!({"code": "server_error", "message": error["message"]});
        self.events.push("error", json!({"code": error["code"], "message": error["message"], "param": error["param"]}));
        self.events.push("response.failed", json!({"response": response}));
        self.events.take()
    }
}
