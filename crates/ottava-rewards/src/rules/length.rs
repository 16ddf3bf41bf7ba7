//! The rewards `overlong` and `length`.

use super::Rule;
use crate::sample::Sample;
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// DAPO's soft punishment of long completions (arXiv:2503.14476): 0 for up to max_length - buffer tokens, then falling linearly to -1 at max_length
/// tokens, and -1 for more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlongConfig {
    /// The length in tokens at which the reward is -1.
    pub max_length: u64,
    /// The tokens before max_length over which the reward falls.
    pub buffer: u64,
}

/// How near the length of the completion is to a target: 0 at the target, falling linearly to -1 at a distance, and -1 farther away.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LengthConfig {
    /// The length in tokens at which the reward is 0.
    pub target: u64,
    /// The distance from the target, in tokens, at which the reward is -1.
    pub distance: u64,
}

impl OverlongConfig {
    /// The rule. Errors with [`Error::Config`] unless `0 < buffer <= max_length`.
    pub(crate) fn rule(&self) -> Result<OverlongConfig> {
        match self.buffer > 0 && self.buffer <= self.max_length {
            true => Ok(self.clone()),
            false => Err(Error::Config(format!(
                "`buffer` is {}; it has to be at least 1, and at most `max_length` ({})",
                self.buffer, self.max_length
            ))),
        }
    }
}

impl LengthConfig {
    /// The rule. Errors with [`Error::Config`] if `distance` is 0.
    pub(crate) fn rule(&self) -> Result<LengthConfig> {
        match self.distance > 0 {
            true => Ok(self.clone()),
            false => Err(Error::Config("`distance` is 0; it has to be at least 1".into())),
        }
    }
}

impl Rule for OverlongConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        let excess = (sample.completion_ids.len() as u64).saturating_sub(self.max_length - self.buffer);
        Ok(Some(falling(excess, self.buffer)))
    }
}

impl Rule for LengthConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        Ok(Some(falling((sample.completion_ids.len() as u64).abs_diff(self.target), self.distance)))
    }
}

/// 0 for 0, falling linearly to -1 at `end`, and -1 beyond.
fn falling(value: u64, end: u64) -> f64 {
    if value == 0 { 0.0 } else { -(value.min(end) as f64) / end as f64 }
}
