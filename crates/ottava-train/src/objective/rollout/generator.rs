//! Completions of prompts by the model as it is now, with their rewards.

use super::completion::{Completion, Generation};
use super::reward_model::RewardRows;
use super::sample::{Sample as Drawn, engine_for, sample};
use crate::objective::FrozenModel;
use ottava_common::error::Result;
use ottava_data::{Prompt, Tokenizer};
use ottava_engine::{Engine, LogprobsMode};
use ottava_models::Decoder;
use ottava_rewards::{Deadline, RewardSpec, Rewards, Sample};
use ottava_settings::RunConfig;
use std::cell::RefCell;

/// A prompt with the seeds of its completions.
pub(super) type Seeded = (Prompt, Vec<u64>);

/// Draws and scores completions.
pub(super) struct Generator {
    /// Completions of a generation.
    completions: usize,
    /// Tokens of a prompt and its completion, at most.
    max_length: usize,
    max_completion_length: usize,
    tokenizer: Tokenizer,
    rewards: RefCell<Rewards>,
    /// For each reward model.
    reward_rows: Vec<RewardRows>,
    /// Made of the model at the first generation.
    engine: RefCell<Option<Engine>>,
}

impl Generator {
    /// Starts what scores completions. A generation of this rank has so many `completions`.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) when a reward cannot be made.
    pub(super) fn new(run: &RunConfig, completions: usize) -> Result<Generator> {
        let tokenizer = Tokenizer::load(run.model.tokenizer_path())?;
        Ok(Generator {
            completions,
            max_length: run.data.max_length,
            max_completion_length: run.reinforcement.max_completion_length,
            rewards: RefCell::new(RewardSpec::build(&run.reinforcement.rewards)?),
            reward_rows: RewardRows::of_run(run, &tokenizer)?,
            tokenizer,
            engine: RefCell::new(None),
        })
    }

    /// The token that ends a text.
    pub(super) fn end(&self) -> u32 {
        self.tokenizer.eos_id().unwrap_or(0)
    }

    /// The text of `tokens`, with its special tokens.
    pub(super) fn text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    /// Draws and scores one completion with each seed of each of `prompts`, before step `step`; the most likely completion if `is_greedy`. Returns the
    /// completions in the order of prompts and seeds. `reward_models` are the reward models of the run.
    ///
    /// Errors as [`sample`] and [`Rewards::score`].
    pub(super) fn generate(
        &self,
        model: &mut Decoder,
        reward_models: &[FrozenModel],
        prompts: &[Seeded],
        step: u64,
        is_greedy: bool,
    ) -> Result<Generation> {
        let drawn = self.draw(model, prompts, is_greedy)?;
        let models = self.reward_rows.iter().zip(reward_models);
        let by_model = models.map(|(rows, model)| rows.scores(model, &drawn)).collect::<Result<Vec<_>>>()?;
        self.score(prompts, drawn, &by_model, step)
    }

    fn draw(&self, model: &mut Decoder, prompts: &[Seeded], is_greedy: bool) -> Result<Vec<Drawn>> {
        let each = prompts.iter().flat_map(|(prompt, seeds)| seeds.iter().map(|&seed| (prompt.tokens.clone(), seed)));
        let requests: Vec<_> = each.collect();
        let mut engine = self.engine.borrow_mut();
        let engine = match &mut *engine {
            Some(engine) => engine,
            // A generation may have more completions than are drawn now: an evaluation may come first.
            none => none.insert(engine_for(model, self.completions, self.max_length, LogprobsMode::Loss)?),
        };
        let (most, stop_ids) = (self.max_completion_length, self.tokenizer.eos_ids());
        // The head applies the temperature of the run.
        let temperature = if is_greedy { 0.0 } else { 1.0 };
        engine.lend(model, |engine| sample(engine, &requests, most, stop_ids, temperature))
    }

    /// The rewards of `samples`, which are completions of `prompts` in their order. `by_model` has the scores by each reward model.
    fn score(&self, prompts: &[Seeded], samples: Vec<Drawn>, by_model: &[Vec<f64>], step: u64) -> Result<Generation> {
        let told: Vec<ottava_rewards::Prompt> = prompts.iter().map(|(prompt, _)| told(prompt)).collect();
        let ends = self.tokenizer.eos_ids();
        let text = |drawn: &Drawn| {
            let end = drawn.tokens.iter().rposition(|token| !ends.contains(token)).map_or(0, |last| last + 1);
            self.tokenizer.decode(&drawn.tokens[..end])
        };
        let texts: Vec<String> = samples.iter().map(text).collect::<Result<_>>()?;
        let owners =
            prompts.iter().enumerate().flat_map(|(at, (_, seeds))| (0..seeds.len()).map(move |index| (at, index)));
        let of_sample = |at: usize| by_model.iter().map(|scores| scores[at]).collect();
        let model_scores: Vec<Vec<f64>> = (0..samples.len()).map(of_sample).collect();
        let drawn = samples.iter().zip(&texts).zip(&model_scores);
        let batch = drawn.zip(owners).map(|(((drawn, text), model_scores), (at, index))| Sample {
            prompt: &told[at],
            completion: text,
            completion_ids: &drawn.tokens,
            model_scores,
            truncated: !drawn.is_complete,
            group: prompts[at].0.document as u64,
            index,
            step,
            record: &prompts[at].0.columns,
        });
        let batch: Vec<Sample> = batch.collect();
        let scored = self.rewards.borrow_mut().score(&batch, Deadline::never())?;
        let metrics = scored.metrics.into_iter().filter(|(name, _)| name.contains("/metrics/")).collect();
        let (rewards, scores): (Vec<_>, Vec<_>) = scored.by_reward.into_iter().unzip();
        let completion = |(at, sample)| Completion {
            sample,
            old: None,
            values: None,
            reward: scored.totals[at],
            scores: scores.iter().map(|of_reward| of_reward[at]).collect(),
        };
        drop(batch);
        let completions = samples.into_iter().enumerate().map(completion).collect();
        Ok(Generation { completions, texts, rewards, metrics })
    }
}

/// The prompt as rewards read it: the messages or the text of its record.
fn told(prompt: &Prompt) -> ottava_rewards::Prompt {
    match prompt.columns.get("prompt") {
        Some(serde_json::Value::Array(messages)) => ottava_rewards::Prompt::Messages(messages.clone()),
        Some(serde_json::Value::String(text)) => ottava_rewards::Prompt::Text(text.clone()),
        other => ottava_rewards::Prompt::Text(other.map(ToString::to_string).unwrap_or_default()),
    }
}
