//! The table `[training]`: steps and batches.

use ottava_common::error::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The maximum number of sequences of a step. The time of a plan grows with this number, because the plan tries divisions into micro-batches.
pub(super) const MAX_SEQUENCES: usize = 1 << 18;

/// The `[training]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingConfig {
    /// Optimizer steps; without the key, the run takes the steps of num_train_epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(example = 1000)]
    pub max_steps: Option<u64>,
    /// Passes over the training documents. Only used without max_steps.
    pub num_train_epochs: f64,
    /// Sequences per micro-batch, that is, per forward and backward pass.
    pub per_device_train_batch_size: usize,
    /// Micro-batches per optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Sequences per optimizer step over all ranks; without the key, per_device_train_batch_size x gradient_accumulation_steps x ranks. If
    /// the key is set, the number of micro-batches of each rank follows from it, so a step has the same data on any number of ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(example = 64)]
    pub global_batch_size: Option<usize>,
    /// Gradients are clipped to this global norm; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Label smoothing e of the loss of texts, from 0 to less than 1. The loss of a token is (1 - e) times its negative log-likelihood plus
    /// e times the mean negative log-probability of all V tokens of the vocabulary. Validation losses are smoothed too.
    pub label_smoothing_factor: f64,
    /// Strength a of the noise that training adds to embeddings (NEFTune): uniform between plus and minus a / sqrt(L C) for sequences of L
    /// tokens and C channels. 0 adds no noise; a common value is 5.
    pub neftune_noise_alpha: f64,
}

impl Default for TrainingConfig {
    fn default() -> TrainingConfig {
        TrainingConfig {
            max_steps: None,
            num_train_epochs: 1.0,
            per_device_train_batch_size: 8,
            gradient_accumulation_steps: 1,
            global_batch_size: None,
            max_grad_norm: 1.0,
            label_smoothing_factor: 0.0,
            neftune_noise_alpha: 0.0,
        }
    }
}

impl TrainingConfig {
    /// Returns the number of sequences per optimizer step: over all ranks once [`TrainingConfig::share_batch`] has divided them.
    pub fn sequences(&self) -> usize {
        self.global_batch_size.unwrap_or(self.per_device_train_batch_size * self.gradient_accumulation_steps)
    }

    /// Divides the sequences of a step among `ranks`. Sets the micro-batches of each rank from `global_batch_size`, or the other way round.
    ///
    /// Errors with [`Error::Config`] if the sequences cannot be divided evenly, if both settings are given and contradict each other, or if a step
    /// would have too many sequences.
    pub fn share_batch(&mut self, ranks: usize) -> Result<()> {
        let (rows, micro_batches) = (self.per_device_train_batch_size, self.gradient_accumulation_steps);
        let Some(global) = self.global_batch_size else {
            let sequences = rows.saturating_mul(micro_batches).saturating_mul(ranks);
            if sequences > MAX_SEQUENCES {
                return Err(Error::Config(format!(
                    "`per_device_train_batch_size` times `gradient_accumulation_steps` on {ranks} ranks is {sequences}; \
                     a step has at most {MAX_SEQUENCES} sequences"
                )));
            }
            self.global_batch_size = Some(sequences);
            return Ok(());
        };
        if !global.is_multiple_of(rows * ranks) {
            return Err(Error::Config(format!(
                "`training.global_batch_size`: {global} sequences per step cannot be split over {ranks} ranks of {rows} sequences \
                 (`per_device_train_batch_size`); change one of them"
            )));
        }
        let needed = global / (rows * ranks);
        if micro_batches != 1 && micro_batches != needed {
            return Err(Error::Config(format!(
                "`training.global_batch_size` = {global} takes {needed} micro-batches of {rows} sequences on {ranks} ranks, \
                 and `gradient_accumulation_steps` is {micro_batches}; leave one of them out"
            )));
        }
        self.gradient_accumulation_steps = needed;
        Ok(())
    }
}
