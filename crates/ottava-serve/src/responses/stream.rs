//! The events of a streamed response, in the order of OpenAI's API and with its numbers.

use super::items::{State, item, part};
use crate::answer::Message;
use crate::blocks::{BlockKind, Blocks, Change};
use ottava_data::write_json;
use serde_json::{Value, json};

/// The events that were not sent.
#[derive(Default)]
pub struct Events {
    ready: Vec<Message>,
    /// The number of the next event.
    number: usize,
}

impl Events {
    /// Adds an event with these fields.
    pub fn push(&mut self, name: &'static str, fields: Value) {
        let mut event = json!({"type": name, "sequence_number": self.number});
        for (field, value) in fields.as_object().into_iter().flatten() {
            event[field] = value.clone();
        }
        self.number += 1;
        self.ready.push(Message { event: Some(name), data: write_json(&event) });
    }

    /// Adds the events of a change. `is_cut` says whether `max_output_tokens` has ended the answer.
    pub fn add(&mut self, change: Change, blocks: &Blocks, ids: &[(String, String)], is_cut: bool) {
        let (Change::Begin(index) | Change::Add(index, _) | Change::End(index)) = change;
        let (block, ids) = (&blocks.list()[index], &ids[index]);
        let with = |mut fields: Value| {
            fields["output_index"] = index.into();
            fields["item_id"] = ids.0.clone().into();
            if block.kind != BlockKind::Call {
                fields["content_index"] = 0.into();
            }
            fields
        };
        let [delta, done] = match block.kind {
            BlockKind::Reasoning => ["response.reasoning_text.delta", "response.reasoning_text.done"],
            BlockKind::Content => ["response.output_text.delta", "response.output_text.done"],
            BlockKind::Call => ["response.function_call_arguments.delta", "response.function_call_arguments.done"],
        };
        match change {
            Change::Begin(_) => {
                self.push(
                    "response.output_item.added",
                    json!({"output_index": index, "item": item(block, ids, State::Begun)}),
                );
                if block.kind != BlockKind::Call {
                    self.push("response.content_part.added", with(json!({"part": part(block.kind, "")})));
                }
            }
            Change::Add(_, text) => {
                let fields = match block.kind {
                    BlockKind::Content => json!({"delta": text, "logprobs": []}),
                    BlockKind::Reasoning | BlockKind::Call => json!({"delta": text}),
                };
                self.push(delta, with(fields));
            }
            Change::End(_) => {
                let text = &block.text;
                match block.kind {
                    BlockKind::Call => self.push(done, with(json!({"name": block.name, "arguments": text}))),
                    BlockKind::Reasoning => self.push(done, with(json!({"text": text}))),
                    BlockKind::Content => self.push(done, with(json!({"text": text, "logprobs": []}))),
                }
                if block.kind != BlockKind::Call {
                    self.push("response.content_part.done", with(json!({"part": part(block.kind, text)})));
                }
                let state = State::of_ended(block, is_cut && index + 1 == blocks.list().len());
                self.push("response.output_item.done", json!({"output_index": index, "item": item(block, ids, state)}));
            }
        }
    }

    /// The events since the last call.
    pub fn take(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.ready)
    }
}
