//! Completions that the trained model draws in the place of the completions of the data.

use crate::objective::Opening;
use crate::objective::rollout::{Draw, DrawSizes, Drawer, sample, seed_of, set_row};
use crate::step::Metrics;
use ottava_common::error::Result;
use ottava_data::{Batch, RowShare, Tokenizer};
use ottava_engine::{Engine, LogprobsMode};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::KvCacheDtype;
use ottava_settings::{DistillationConfig, RunConfig};
use ottava_tensor::ops::IGNORE_INDEX;

/// Draws completions of the prompts of loaded rows.
pub(super) struct Draws {
    config: DistillationConfig,
    seed: u64,
    share: RowShare,
    /// Tokens of a row.
    max_length: usize,
    /// Steps that are loaded.
    step: u64,
    tokenizer: Tokenizer,
    drawer: Drawer,
}

impl Draws {
    pub(super) fn open(opening: &Opening) -> Result<Draws> {
        let Opening { config, share, step, .. } = *opening;
        Ok(Draws {
            config: config.distillation.clone(),
            seed: config.seed,
            share,
            max_length: config.data.max_length,
            step,
            tokenizer: Tokenizer::load(config.tokenizer_path())?,
            drawer: drawer(config),
        })
    }

    /// Replaces the completions of `batches` by completions that `model` draws, in the share of the steps that the settings say. All ranks of `partition` draw
    /// in the same steps, each for its own rows.
    ///
    /// Errors as [`sample`], on all ranks.
    pub(super) fn replace(
        &mut self,
        model: &mut Decoder,
        batches: &mut [Batch],
        partition: &Partition,
    ) -> Result<Metrics> {
        let step = self.step;
        self.step += 1;
        // The upper bits of a hash as a number from 0 to 1.
        let number = (seed_of([self.seed, step, u64::MAX, 0]) >> 11) as f64 / (1u64 << 53) as f64;
        let draws = number < self.config.lmbda;
        let mut metrics = vec![("on_policy", f64::from(u8::from(draws)))];
        if draws {
            let (drawn, ranks) = (self.draw(model, partition, batches, step), partition.ranks());
            let lengths = ranks.together("drawing completions", drawn)?;
            let mine = [lengths.len(), lengths.iter().sum()].map(|number| number as f64);
            let all = ranks.gather("lengths of completions", mine)?;
            let [count, sum] = [0, 1].map(|at| all.iter().map(|of_rank| of_rank[at]).sum::<f64>());
            metrics.push(("completions/mean_length", sum / count.max(1.0)));
        }
        Ok(Metrics::new(metrics, ""))
    }

    /// Draws a completion for each row that has a prompt and room behind it, and returns their lengths.
    fn draw(
        &mut self,
        model: &mut Decoder,
        partition: &Partition,
        batches: &mut [Batch],
        step: u64,
    ) -> Result<Vec<usize>> {
        let DistillationConfig { max_completion_length, temperature, .. } = self.config;
        let (mut wanted, mut places) = (Vec::new(), Vec::new());
        for (number, batch) in batches.iter().enumerate() {
            for row in 0..batch.rows {
                let Some(prompt) = prompt_of(batch, row) else { continue };
                // The place of the row in the data of the step, which does not depend on the number of ranks.
                let place = (number * batch.rows + row) * self.share.world + self.share.rank;
                if prompt.len() < self.max_length {
                    let seed = seed_of([self.seed, step, place as u64, 0]);
                    wanted.push(Draw { prompt, seed, max_tokens: max_completion_length });
                    places.push((number, row));
                }
            }
        }
        let stop_ids = self.tokenizer.eos_ids();
        // A completion ends where its row ends.
        let draw = |engine: &mut Engine| sample(engine, &wanted, stop_ids, temperature);
        let drawn = self.drawer.lend(model, partition, draw)?;
        let end = self.tokenizer.eos_id().unwrap_or(0);
        for ((number, row), sample) in places.into_iter().zip(&drawn) {
            set_row(&mut batches[number], row, sample, end);
        }
        Ok(drawn.iter().map(|sample| sample.tokens.len()).collect())
    }
}

/// Draws for the rows of a step of a rank.
pub(super) fn drawer(config: &RunConfig) -> Drawer {
    Drawer::new(DrawSizes {
        completions: config.micro_batch_rows() * config.training.gradient_accumulation_steps,
        max_length: config.data.max_length,
        kv_cache_tokens: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        logprobs_mode: LogprobsMode::Raw,
    })
}

/// The tokens of a row before the first one that is learned; `None` if no token is learned.
fn prompt_of(batch: &Batch, row: usize) -> Option<Vec<u32>> {
    let start = row * batch.seq_len;
    let first = batch.targets[start..][..batch.seq_len].iter().position(|&target| target != IGNORE_INDEX)?;
    Some(batch.inputs[start..][..=first].iter().map(|&token| token as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::rollout::{End, Sample};

    #[test]
    fn rows_keep_their_prompts_and_learn_what_was_drawn() {
        let x = IGNORE_INDEX;
        let (inputs, targets) = (vec![5, 6, 7, 8, 0, 9, 9, 9, 9, 9], vec![x, 7, 8, x, x, x, x, x, x, x]);
        let mut batch = Batch { padding: vec![1, 0], ..Batch::whole(inputs, targets, 2) };
        assert_eq!(prompt_of(&batch, 0), Some(vec![5, 6]));
        assert_eq!(prompt_of(&batch, 1), None);
        let sample = |tokens: &[u32]| Sample::of_turn(vec![5, 6], tokens.to_vec(), vec![-0.5; tokens.len()], End::Text);
        set_row(&mut batch, 0, &sample(&[3, 4]), 1);
        assert_eq!((&batch.inputs[..5], &batch.targets[..5]), (&[5, 6, 3, 4, 1][..], &[x, 3, 4, x, x][..]));
        assert_eq!(batch.padding, [1, 0]);
        // A completion up to the end of the row.
        set_row(&mut batch, 0, &sample(&[3, 4, 2]), 1);
        assert_eq!((&batch.inputs[..5], &batch.targets[..5]), (&[5, 6, 3, 4, 2][..], &[x, 3, 4, 2, x][..]));
        assert_eq!(batch.padding, [0, 0]);
        // Tokens of an environment between two turns are read, and not learned.
        let mut turns = sample(&[3]);
        turns.tokens.push(9);
        turns.add_turn(sample(&[4]));
        set_row(&mut batch, 0, &turns, 1);
        assert_eq!((&batch.inputs[..5], &batch.targets[..5]), (&[5, 6, 3, 9, 4][..], &[x, 3, x, 4, x][..]));
    }
}
