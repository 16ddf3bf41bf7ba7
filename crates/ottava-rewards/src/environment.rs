//! Environments: programs that answer the turns of a policy.

use crate::deadline::Deadline;
use crate::sample::Sample;
use ottava_common::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What answers the turns of conversations.
pub trait Environment: Send {
    /// The answers to a batch of turns, in order.
    ///
    /// Errors if the environment fails, `deadline` passes or the process is asked to stop.
    fn step(&mut self, episodes: &[Episode], deadline: Deadline) -> Result<Vec<Step>>;
}

/// A conversation after a turn of the policy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Episode<'a> {
    /// The prompt, and what the policy wrote in its last turn.
    #[serde(flatten)]
    pub sample: Sample<'a>,
    /// The number of the last turn, from 0.
    pub turn: usize,
    /// The messages after the prompt, with the last turn as the last message.
    pub messages: &'a [Value],
}

/// The answer to a turn.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Whether the conversation is over.
    pub done: bool,
    /// The text of the next message to the policy; always there unless the conversation is over.
    #[serde(default)]
    pub message: Option<String>,
    /// The reward of the turn, if there is one.
    #[serde(default)]
    pub reward: Option<f64>,
}
