//! The reward `environment`.

use super::Rule;
use crate::sample::Sample;
use ottava_common::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The sum of the rewards that the environment of the run returned in the turns of the completion. A completion for which it returned none is not
/// scored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentRewardConfig {}

impl Rule for EnvironmentRewardConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        Ok(sample.environment)
    }
}
