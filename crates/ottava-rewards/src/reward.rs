//! Rewards, and what they return.

use crate::deadline::Deadline;
use crate::sample::Sample;
use ottava_common::Result;
use std::collections::BTreeMap;

/// A function that scores completions.
pub trait Reward: Send {
    /// Scores a batch, whose groups are whole.
    ///
    /// Errors if the reward fails, `deadline` passes or the process is asked to stop.
    fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scores>;
}

/// The scores of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// A finite score for each sample, in order; `None` is no opinion.
    pub rewards: Vec<Option<f64>>,
    /// Numbers for the log, by their names.
    pub metrics: BTreeMap<String, f64>,
}
