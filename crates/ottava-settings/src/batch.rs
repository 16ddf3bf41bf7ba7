//! The batches and steps of a run: dividing them among ranks, and checking their sizes.

use crate::RunConfig;
use crate::demands::{Problems, from_zero};
use crate::training::MAX_SEQUENCES;
use ottava_common::error::Result;

/// The maximum number of tokens of a micro-batch. Positions are counted in 32 bits.
const MAX_TOKENS: usize = i32::MAX as usize;

impl RunConfig {
    /// Keeps the number of sequences per step of `saved` if the run resumes on another number of ranks, by changing the micro-batches per step.
    /// Changes nothing if the file or the command line sets `global_batch_size`. Returns a sentence about the change.
    pub fn keep_batch(&mut self, saved: &RunConfig, ranks: usize) -> Option<String> {
        let (before, rows) = (saved.training.sequences(), self.training.per_device_train_batch_size * ranks);
        let open = self.training.global_batch_size.is_none() && saved.parallel.data.max(1) != ranks;
        if !open || rows * self.training.gradient_accumulation_steps == before || !before.is_multiple_of(rows) {
            return None;
        }
        self.training.gradient_accumulation_steps = before / rows;
        let (micro_batches, was) = (self.training.gradient_accumulation_steps, saved.parallel.data.max(1));
        Some(format!(
            "`training.gradient_accumulation_steps` is {micro_batches} on {ranks} ranks, so that a step keeps the {before} sequences it had on {was}"
        ))
    }

    /// Divides a step among `ranks`, like [`TrainingConfig::share_batch`](super::TrainingConfig::share_batch).
    ///
    /// Also returns the errors of [`ParallelConfig::mesh`](super::ParallelConfig::mesh).
    pub fn share(&mut self, ranks: usize) -> Result<()> {
        self.parallel.data = self.parallel.mesh(ranks)?.data;
        self.training.share_batch(self.parallel.data)
    }

    /// Checks the sizes of a step.
    pub(super) fn check_batch(&self, problems: &mut Problems) {
        let t = &self.training;
        problems.demand(
            t.global_batch_size.is_none_or(|sequences| (1..=MAX_SEQUENCES).contains(&sequences)),
            format!(
                "`training.global_batch_size` is {}; a step has from 1 to {MAX_SEQUENCES} sequences",
                t.sequences()
            ),
        );
        let sequences = t.per_device_train_batch_size.saturating_mul(t.gradient_accumulation_steps);
        problems.demand(
            sequences <= MAX_SEQUENCES,
            format!(
                "`per_device_train_batch_size` times `gradient_accumulation_steps` is {sequences}; \
                 a step has at most {MAX_SEQUENCES} sequences"
            ),
        );
        let of_evaluation = self.evaluation.per_device_eval_batch_size;
        if let Some(sequences) = of_evaluation {
            problems.demand_count("evaluation.per_device_eval_batch_size", sequences as u64);
        }
        let batches = [
            ("per_device_train_batch_size", t.per_device_train_batch_size),
            ("per_device_eval_batch_size", of_evaluation.unwrap_or(1)),
        ];
        for (key, sequences) in batches {
            let tokens = sequences.saturating_mul(self.data.max_length);
            problems.demand(
                tokens <= MAX_TOKENS,
                format!("`{key}` times `max_length` is {tokens}; a batch has at most {MAX_TOKENS} tokens"),
            );
        }
    }

    /// Checks the other keys of `[training]`.
    pub(super) fn check_training(&self, problems: &mut Problems) {
        let t = &self.training;
        problems.demand(
            t.max_steps.is_some() || (t.num_train_epochs > 0.0 && t.num_train_epochs.is_finite()),
            "set `training.max_steps`, or `training.num_train_epochs` above 0",
        );
        problems.demand(
            t.max_steps != Some(0),
            "`training.max_steps` is 0; it is a number of steps from 1 up: leave it out to train `num_train_epochs`",
        );
        problems.demand(
            (0.0..1.0).contains(&t.label_smoothing_factor),
            "`training.label_smoothing_factor` is a share from 0 to less than 1",
        );
        problems.demand(
            from_zero(t.neftune_noise_alpha),
            "`training.neftune_noise_alpha` must not be negative or infinite; 0 adds no noise",
        );
        problems.demand(
            from_zero(t.max_grad_norm),
            "`training.max_grad_norm` must not be negative or infinite; 0 turns clipping off",
        );
        problems.demand_single("training.max_grad_norm", t.max_grad_norm);
    }
}
