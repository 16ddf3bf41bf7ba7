//! Rewards that are computed here, by a rule for each sample.

mod environment;
mod exact;
mod extract;
mod format;
mod gold;
mod length;
mod math;
mod model;
mod number;
mod pattern;
mod repetition;
#[cfg(test)]
mod tests;

pub use environment::EnvironmentRewardConfig;
pub use exact::ExactConfig;
pub use extract::Extract;
pub use format::FormatConfig;
pub use length::{LengthConfig, OverlongConfig};
pub use math::MathConfig;
pub use model::ModelConfig;
pub(crate) use model::ModelScore;
pub use number::NumberConfig;
pub use pattern::{RegexConfig, RegexMatch};
pub use repetition::RepetitionConfig;

use crate::deadline::Deadline;
use crate::reward::{Reward, Scores};
use crate::sample::Sample;
use ottava_common::Result;

/// A rule for one sample.
pub(crate) trait Rule: Send {
    /// The score of `sample`. Errors with [`ottava_common::Error::Data`] if its record cannot be used; a completion is never an error.
    fn score(&self, sample: &Sample) -> Result<Option<f64>>;
}

impl<R: Rule> Reward for R {
    fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scores> {
        let score = |sample| {
            deadline.check()?;
            Rule::score(self, sample)
        };
        let rewards = samples.iter().map(score).collect::<Result<_>>()?;
        Ok(Scores { rewards, ..Scores::default() })
    }
}

/// The score of a condition.
fn score_of(is_right: bool) -> Option<f64> {
    Some(if is_right { 1.0 } else { 0.0 })
}
