//! The messages of commands and of HTTP servers: one JSON object each way, which are lines for commands.
//!
//! Ottava sends `{"id": 7, "type": "score", "samples": [SAMPLE, …]}`, and reads `{"id": 7, "rewards": [1.0, null, …]}`, perhaps with
//! `"metrics": {"NAME": number, …}`. For environments the type is `step`, and the answer has
//! `"steps": [{"done": false, "message": "…", "reward": null}, …]`. `{"id": 7, "error": "…"}` says that a batch could not be answered.

use crate::environment::{Step, Steps};
use crate::reward::Scores;
use crate::sample::{Place, Prompt};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The most metrics of an answer.
const MAX_METRICS: usize = 64;

/// Characters of a line that an error repeats.
const EXCERPT: usize = 200;

/// What a request asks for.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Score,
    Step,
}

#[derive(Serialize)]
struct Request<'a, T> {
    id: u64,
    #[serde(rename = "type")]
    kind: Kind,
    samples: &'a [T],
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    id: u64,
    rewards: Option<Vec<Value>>,
    steps: Option<Vec<PlainStep>>,
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    error: Option<String>,
}

/// A step as it was written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainStep {
    done: bool,
    message: Option<Value>,
    reward: Option<f64>,
}

/// A request as a line.
pub(super) fn request<T: Serialize>(id: u64, kind: Kind, samples: &[T]) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Request { id, kind, samples }).expect("texts and numbers are JSON");
    line.push(b'\n');
    line
}

/// The scores that `line` holds for the samples at `places`. Errors with a sentence about what is wrong.
pub(super) fn scores(line: &[u8], id: u64, places: &[Place]) -> Result<Scores, String> {
    let answer = answer(line, id)?;
    let rewards = answer.rewards.ok_or_else(|| lacks("rewards", line))?;
    expect_length("rewards", rewards.len(), places.len())?;
    let reward = |(value, place): (&Value, &Place)| match value {
        Value::Null => Ok(None),
        value => {
            let wrong = || format!("the reward of {place} is {}, and no number", excerpt(value.to_string().as_bytes()));
            value.as_f64().map(Some).ok_or_else(wrong)
        }
    };
    let rewards = rewards.iter().zip(places).map(reward).collect::<Result<_, _>>()?;
    Ok(Scores { rewards, metrics: answer.metrics })
}

/// The steps that `line` holds for the turns at `places`. Errors with a sentence about what is wrong.
pub(super) fn steps(line: &[u8], id: u64, places: &[Place]) -> Result<Steps, String> {
    let answer = answer(line, id)?;
    let steps = answer.steps.ok_or_else(|| lacks("steps", line))?;
    expect_length("steps", steps.len(), places.len())?;
    let step = |(PlainStep { done, message, reward }, place): (PlainStep, &Place)| {
        let message = message.map(|message| message_of(message, place)).transpose()?;
        match done || message.is_some() {
            true => Ok(Step { done, message, reward }),
            false => Err(format!("the step of {place} is not done and has no message")),
        }
    };
    let steps = steps.into_iter().zip(places).map(step).collect::<Result<_, _>>()?;
    Ok(Steps { steps, metrics: answer.metrics })
}

/// The message of a step: a text, or a list of messages.
fn message_of(message: Value, place: &Place) -> Result<Prompt, String> {
    let is_message = |message: &Value| message["role"].is_string();
    match message {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(messages) if !messages.is_empty() && messages.iter().all(is_message) => {
            Ok(Prompt::Messages(messages))
        }
        other => Err(format!(
            "the message of {place} is {}; it is a text, or a list of messages with `role` and `content`",
            excerpt(other.to_string().as_bytes())
        )),
    }
}

fn answer(line: &[u8], id: u64) -> Result<Answer, String> {
    let answer: Answer = serde_json::from_slice(line).map_err(|error| {
        let words = excerpt(line);
        let advice = match words.contains("NaN") || words.contains("Infinity") {
            true => "; NaN and Infinity are no JSON, so write null for a completion that is not scored",
            false => "; print other texts to stderr",
        };
        format!("the answer is none ({error}){advice}: {words}")
    })?;
    if answer.id != id {
        return Err(format!("the answer has the id {}, and the request has {id}", answer.id));
    }
    match answer.error {
        Some(error) => Err(format!("it answered with the error: {}", excerpt(error.as_bytes()))),
        None if answer.metrics.len() > MAX_METRICS => {
            Err(format!("the answer has {} metrics, and {MAX_METRICS} are the most", answer.metrics.len()))
        }
        None => Ok(answer),
    }
}

fn lacks(what: &str, line: &[u8]) -> String {
    format!("the answer has no `{what}`: {}", excerpt(line))
}

fn expect_length(what: &str, found: usize, expected: usize) -> Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("the answer has {found} {what} for {expected} samples")),
    }
}

/// The beginning of a text in one line.
pub(super) fn excerpt(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(EXCERPT * 4)]);
    let mut line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.retain(|c| !c.is_control());
    match line.char_indices().nth(EXCERPT) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}
