//! Reward models of a run: frozen models that score completions by their heads, in batches of rows.

use super::sample::{Sample, set_row};
use crate::objective::frozen::{FrozenModel, expect_tokens};
use ottava_common::error::Result;
use ottava_common::interrupt;
use ottava_data::{Batch, Tokenizer};
use ottava_models::{ConfigFile, pad_token, reward_model};
use ottava_rewards::RewardSpec;
use ottava_settings::RunConfig;
use ottava_tensor::ops::IGNORE_INDEX;

/// How completions become rows of a reward model.
pub(super) struct RewardRows {
    /// The padding token of the reward model. The score is read at the last token that is no padding, as in transformers.
    padding: Option<i64>,
    /// Rows of a batch.
    rows: usize,
    /// Tokens of a row.
    max_length: usize,
    /// The token that fills a row.
    end: u32,
}

impl RewardRows {
    /// Opens the rows of each reward model of `run`, in the order of the settings.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) if a reward model has another tokenizer than the run.
    pub(super) fn of_run(run: &RunConfig, tokenizer: &Tokenizer) -> Result<Vec<RewardRows>> {
        let open = |(name, model): (&str, &ottava_rewards::ModelConfig)| {
            let what = format!("the reward model of `{name}`");
            expect_tokens(&what, &model.path, run, "its scores would be scores of other texts")?;
            let file = reward_model(&ConfigFile::read(&model.path)?, tokenizer.padding_id())?;
            Ok(RewardRows {
                padding: pad_token(&file)?,
                rows: run.micro_batch_rows(),
                max_length: run.data.max_length,
                end: tokenizer.eos_id().unwrap_or(0),
            })
        };
        RewardSpec::models(&run.reinforcement.rewards).map(open).collect()
    }

    /// The scores of `samples` by `model`.
    pub(super) fn scores<'s>(
        &self,
        model: &FrozenModel,
        samples: impl Iterator<Item = &'s Sample>,
    ) -> Result<Vec<f64>> {
        let samples: Vec<&Sample> = samples.collect();
        let mut scores = Vec::with_capacity(samples.len());
        for of_batch in samples.chunks(self.rows) {
            interrupt::check("scoring completions")?;
            let tokens = of_batch.len() * self.max_length;
            let mut batch = Batch::whole(vec![0; tokens], vec![IGNORE_INDEX; tokens], of_batch.len());
            let places: Vec<usize> =
                of_batch.iter().enumerate().map(|(row, sample)| self.set(&mut batch, row, sample)).collect();
            let losses = model.losses_of(&batch)?;
            scores.extend(places.into_iter().map(|at| -losses[at]));
        }
        Ok(scores)
    }

    /// Writes a sample into a row, and returns the place of its score, which is the only target of the row.
    fn set(&self, batch: &mut Batch, row: usize, sample: &Sample) -> usize {
        set_row(batch, row, sample, self.end);
        let start = row * self.max_length;
        let ids = &batch.inputs[start..][..sample.prompt.len() + sample.tokens.len()];
        let last = ids.iter().rposition(|&id| self.padding != Some(i64::from(id))).unwrap_or(0);
        batch.targets[start..][..self.max_length].fill(IGNORE_INDEX);
        batch.targets[start + last] = batch.inputs[start + last];
        start + last
    }
}
