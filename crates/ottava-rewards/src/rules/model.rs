//! The reward `model`.

use super::Rule;
use crate::sample::Sample;
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The score of prompt and completion by a reward model, read at the last token. The program that draws the completions runs the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The folder of the reward model: a checkpoint of a run with `preference.loss_type` = "bradley_terry", or a model of transformers for the
    /// classification of sequences with one label. Its tokenizer is the tokenizer of the run.
    pub path: PathBuf,
}

/// The rule of the reward model with this number among the reward models of a run.
pub(crate) struct ModelScore {
    pub(crate) number: usize,
}

impl Rule for ModelScore {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        match sample.model_scores.get(self.number) {
            Some(score) if score.is_finite() => Ok(Some(*score)),
            Some(score) => Err(Error::NonFinite(format!(
                "the score of {} is {score}: the weights or activations of the reward model are not finite",
                sample.place()
            ))),
            None => Err(Error::Config("a reward model scores completions only in a run of `ottava train`".into())),
        }
    }
}
