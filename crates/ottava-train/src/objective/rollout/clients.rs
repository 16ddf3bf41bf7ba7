//! Completions that clients outside of the run draw and score.

use super::sample::Sample;
use ottava_common::error::Result;
use ottava_engine::Engine;
use serde::{Deserialize, Serialize};

/// Lends the model to clients, and collects the completions that they return.
pub trait Clients {
    /// Lets clients draw with `engine`, which has the weights of today, until they have returned what is `wanted`. Returns the groups of completions. When
    /// the call returns, no request is left in the engine.
    ///
    /// Errors with [`Error::Cancelled`](ottava_common::Error::Cancelled) after a request to stop, and if the engine fails.
    fn collect(&mut self, engine: &mut Engine, wanted: Wanted) -> Result<Vec<Vec<Returned>>>;
}

/// The completions that a run waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The number of steps that have changed the weights: the version of the weights.
    pub step: u64,
    /// The number of groups.
    pub groups: usize,
    /// The number of completions of a group.
    pub of_group: usize,
}

/// A completion that a client has returned.
#[derive(Clone, Debug, PartialEq)]
pub struct Returned {
    /// The completion, with the log-probabilities of its drawn tokens.
    pub sample: Sample,
    /// The reward; `None` is not scored.
    pub reward: Option<f64>,
}
