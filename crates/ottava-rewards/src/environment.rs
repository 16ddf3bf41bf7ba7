//! Environments: programs that answer the turns of a policy.

use crate::deadline::Deadline;
use crate::sample::{Prompt, Sample};
use ottava_common::Result;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What answers the turns of conversations.
pub trait Environment: Send {
    /// The answers to a batch of turns.
    ///
    /// Errors if the environment fails, `deadline` passes or the process is asked to stop.
    fn step(&mut self, episodes: &[Episode], deadline: Deadline) -> Result<Steps>;
}

/// A conversation after a turn of the policy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Episode<'a> {
    /// The prompt, and what the policy wrote in its last turn.
    #[serde(flatten)]
    pub sample: Sample<'a>,
    /// The number of the last turn, from 0.
    pub turn: usize,
    /// Whether no turn follows, whatever the answer is: the turn was cut, or the conversation has its most turns.
    pub last: bool,
    /// The messages after the prompt, with the last turn as the last message.
    pub messages: &'a [Value],
}

/// The answers to a batch of turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// The answer to each turn, in order.
    pub steps: Vec<Step>,
    /// Numbers for the log, by their names.
    pub metrics: BTreeMap<String, f64>,
}

/// The answer to a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Whether the conversation is over.
    pub done: bool,
    /// What the policy reads next; always there unless the conversation is over.
    pub message: Option<Prompt>,
    /// The reward of the turn, a finite number, if there is one.
    pub reward: Option<f64>,
}
