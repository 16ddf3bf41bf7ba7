//! Answers that are a list of choices: completions, chats, and completions of token ids.

use crate::answer::{Form, Message, Usage, Work};
use crate::choice::Delta;
use crate::error::{ApiError, Result};
use crate::json::{ListText, ObjectText};
use crate::served::Served;
use serde_json::{Value, json};

/// The format of a choice.
pub trait Choices: Send + Sync + 'static {
    /// The object of a whole answer, the object of a piece of an answer, and the start of ids.
    const NAMES: [&'static str; 3];
    /// The field with the id of an answer.
    const ID: &'static str = "id";

    /// Adds a part of a choice.
    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()>;

    /// A choice of a whole answer as JSON, with its number there.
    fn whole(&mut self, index: usize, number: usize) -> String;

    /// What was added to a choice since its last piece, as JSON; `None` if there is nothing to tell yet.
    fn piece(&mut self, index: usize) -> Option<String>;

    /// Fields beside the choices that no object of the answer has had, with their values as JSON.
    fn beside(&mut self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The pieces before all others.
    fn first(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the usage tells how many tokens are reasoning.
    fn has_reasoning(&self) -> bool {
        false
    }
}

/// The version that has computed an answer.
const FINGERPRINT: &str = concat!("ottava-", env!("CARGO_PKG_VERSION"));

/// The usage of an answer.
fn usage(usage: Usage, has_reasoning: bool) -> Value {
    let Usage { prompt, cached, completion, reasoning } = usage;
    let mut value =
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion});
    if let Some(cached) = cached {
        value["prompt_tokens_details"] = json!({"cached_tokens": cached});
    }
    if has_reasoning {
        value["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
    }
    value
}

/// An object with these choices.
fn envelope<C: Choices>(form: &mut C, work: &Work, object: &str, choices: &[String], with_usage: bool) -> String {
    let mut list = ListText::default();
    choices.iter().for_each(|choice| list.push(choice));
    let answer = ObjectText::new().field(C::ID, &work.id).field("object", &object).field("created", &work.created);
    let answer = answer.field("model", &work.params.model.name).field("system_fingerprint", &FINGERPRINT);
    let answer = answer.json("choices", &list.json());
    let answer = form.beside().into_iter().fold(answer, |answer, (name, value)| answer.json(name, &value));
    match with_usage {
        true => answer.field("usage", &usage(work.usage(), form.has_reasoning())).end(),
        false => answer.end(),
    }
}

impl<C: Choices> Form for C {
    const ID: &'static str = C::NAMES[2];

    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()> {
        Choices::add(self, served, index, part)
    }

    fn whole(&mut self, work: &Work, choices: &[usize]) -> String {
        let choices = choices.iter().enumerate().map(|(number, &index)| Choices::whole(self, index, number));
        let choices: Vec<String> = choices.collect();
        envelope(self, work, C::NAMES[0], &choices, true)
    }

    fn first(&mut self, work: &Work) -> Vec<Message> {
        let pieces = Choices::first(self).into_iter();
        let usage = work.params.usage_in_pieces;
        pieces.map(|piece| Message::data(envelope(self, work, C::NAMES[1], &[piece], usage))).collect()
    }

    fn piece(&mut self, work: &Work, index: usize) -> Vec<Message> {
        let usage = work.params.usage_in_pieces;
        let piece = Choices::piece(self, index);
        piece.map(|piece| Message::data(envelope(self, work, C::NAMES[1], &[piece], usage))).into_iter().collect()
    }

    fn last(&mut self, work: &Work) -> Vec<Message> {
        let usage = work.params.include_usage.then(|| envelope(self, work, C::NAMES[1], &[], true));
        usage.into_iter().chain([DONE.into()]).map(Message::data).collect()
    }

    fn failed(&mut self, _work: &Work, error: &ApiError) -> Vec<Message> {
        [error.json().to_string(), DONE.into()].map(Message::data).into()
    }
}

/// The last message of a stream.
const DONE: &str = "[DONE]";
