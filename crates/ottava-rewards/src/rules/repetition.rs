//! The reward `repetition`.

use super::Rule;
use crate::sample::Sample;
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The share of n-grams of tokens that repeat earlier n-grams of the completion, as a punishment: 0 if no n-gram repeats, and -1 at most. Yeo et al.
/// 2025, arXiv:2502.03373, appendix B.2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RepetitionConfig {
    /// The number of tokens of an n-gram.
    #[serde(default = "ngram")]
    pub ngram: usize,
}

fn ngram() -> usize {
    20
}

impl RepetitionConfig {
    /// Returns the rule. Errors with [`Error::Config`] if `ngram` is 0.
    pub(crate) fn rule(&self) -> Result<RepetitionConfig> {
        match self.ngram > 0 {
            true => Ok(self.clone()),
            false => Err(Error::Config("`ngram` is 0; it has to be at least 1".into())),
        }
    }
}

impl Rule for RepetitionConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        let ngrams = sample.completion_ids.windows(self.ngram);
        let count = ngrams.len();
        let distinct: HashSet<&[u32]> = ngrams.collect();
        Ok(Some(if count == 0 { 0.0 } else { distinct.len() as f64 / count as f64 - 1.0 }))
    }
}
