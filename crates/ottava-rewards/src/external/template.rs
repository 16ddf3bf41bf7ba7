//! Texts with places for the parts of a sample.

use crate::sample::{Prompt, Sample};
use ottava_common::{Error, Result};
use serde_json::Value;
use std::borrow::Cow;

/// A text in which `{NAME}` stands for `prompt`, `completion` or a column of the record, and `{{` and `}}` for braces.
#[derive(Clone, Debug)]
pub(super) struct Template(Vec<Piece>);

#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    Name(String),
}

impl Template {
    /// Errors with [`Error::Config`] if a brace is alone or a name is empty.
    pub(super) fn new(text: &str) -> Result<Template> {
        let (mut pieces, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            let (before, after) = rest.split_at(at);
            plain += before;
            if let Some(after) = after.strip_prefix("{{").or(after.strip_prefix("}}")) {
                plain += &rest[at..=at];
                rest = after;
                continue;
            }
            let name = after.strip_prefix('{').and_then(|after| after.split_once('}'));
            let Some((name, after)) = name.filter(|(name, _)| !name.is_empty() && !name.contains('{')) else {
                let why = "has a brace without its partner or without a name in it; write {{ and }} for braces";
                return Err(Error::Config(format!("`template` {why}")));
            };
            pieces.push(Piece::Text(std::mem::take(&mut plain)));
            pieces.push(Piece::Name(name.to_string()));
            rest = after;
        }
        pieces.push(Piece::Text(plain + rest));
        Ok(Template(pieces))
    }

    /// The text for `sample`. What is filled in is not read as a template again. Errors with [`Error::Data`] if the record lacks a column.
    pub(super) fn fill(&self, sample: &Sample) -> Result<String> {
        let piece = |piece: &Piece| match piece {
            Piece::Text(text) => Ok(text.clone()),
            Piece::Name(name) => part(name, sample).map(Cow::into_owned),
        };
        self.0.iter().map(piece).collect()
    }
}

fn part<'a>(name: &str, sample: &Sample<'a>) -> Result<Cow<'a, str>> {
    match name {
        "prompt" => Ok(prompt(sample.prompt)),
        "completion" => Ok(sample.completion.into()),
        column => match sample.record.get(column) {
            Some(value) => Ok(text(value)),
            None => {
                let place = sample.place();
                Err(Error::Data(format!("the record of {place} has no column `{column}`, which `template` names")))
            }
        },
    }
}

/// A text as it is, and messages as paragraphs `role: content`.
fn prompt(prompt: &Prompt) -> Cow<'_, str> {
    let message = |message: &Value| format!("{}: {}", text(&message["role"]), text(&message["content"]));
    match prompt {
        Prompt::Text(text) => text.into(),
        Prompt::Messages(messages) => messages.iter().map(message).collect::<Vec<_>>().join("\n\n").into(),
    }
}

fn text(value: &Value) -> Cow<'_, str> {
    match value {
        Value::String(text) => text.into(),
        value => value.to_string().into(),
    }
}
