//! What is scored.

use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt;

/// A prompt: a text, or the messages of a conversation (`{"role": …, "content": …}`).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Messages.
    Messages(Vec<Value>),
}

/// A completion with its prompt, as rewards see it. Serialized, it is a sample of the protocol of commands.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// The text of the completion, without the token that ends it. With an environment, the text of the whole conversation after the prompt.
    pub completion: &'a str,
    /// The tokens that the policy drew, in all turns.
    pub completion_ids: &'a [u32],
    /// The scores by the reward models of the run, in the order of the rewards of type `model`.
    #[serde(skip)]
    pub model_scores: &'a [f64],
    /// Whether the completion ended at the largest length, and not by an end-of-sequence token.
    pub truncated: bool,
    /// The number of the prompt; all completions of a prompt share it.
    pub group: u64,
    /// The number of the completion among the completions of its prompt, from 0.
    pub index: usize,
    /// The step of training.
    pub step: u64,
    /// The sum of the rewards that the environment has returned in the turns so far, if it has returned any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<f64>,
    /// The columns of the prompt's record in the data.
    pub record: &'a Map<String, Value>,
}

impl Sample<'_> {
    /// How errors name the sample.
    pub(crate) fn place(&self) -> Place {
        Place { group: self.group, index: self.index }
    }
}

/// The numbers of a prompt and of one of its completions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    group: u64,
    index: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "completion {} of prompt {}", self.index, self.group)
    }
}
