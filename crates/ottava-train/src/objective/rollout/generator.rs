//! Completions of prompts by the model as it is now, with their rewards.

use super::completion::{Completion, Generation};
use super::draw_sizes;
use super::drawer::Drawer;
use super::sample::{Sample as Drawn, sample};
use ottava_common::error::Result;
use ottava_data::{Prompt, Tokenizer};
use ottava_engine::Engine;
use ottava_models::Decoder;
use ottava_rewards::{Deadline, RewardSpec, Rewards, Sample};
use ottava_settings::RunConfig;
use std::cell::RefCell;

/// A prompt with the seeds of its completions.
pub(super) type Seeded = (Prompt, Vec<u64>);

/// Draws and scores completions.
pub(super) struct Generator {
    max_completion_length: usize,
    tokenizer: Tokenizer,
    rewards: RefCell<Rewards>,
    drawer: RefCell<Drawer>,
}

impl Generator {
    /// Starts what scores completions. A generation of this rank has so many `completions`.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) when a reward cannot be made.
    pub(super) fn new(run: &RunConfig, completions: usize) -> Result<Generator> {
        Ok(Generator {
            max_completion_length: run.reinforcement.max_completion_length,
            tokenizer: Tokenizer::load(run.model.tokenizer_path())?,
            rewards: RefCell::new(RewardSpec::build(&run.reinforcement.rewards)?),
            // A generation may have more completions than the first draws: an evaluation may come first.
            drawer: RefCell::new(Drawer::new(draw_sizes(run, completions))),
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
    /// completions in the order of prompts and seeds.
    ///
    /// Errors as [`sample`] and [`Rewards::score`].
    pub(super) fn generate(
        &self,
        model: &mut Decoder,
        prompts: &[Seeded],
        step: u64,
        is_greedy: bool,
    ) -> Result<Generation> {
        let drawn = self.draw(model, prompts, is_greedy)?;
        self.score(prompts, drawn, step)
    }

    fn draw(&self, model: &mut Decoder, prompts: &[Seeded], is_greedy: bool) -> Result<Vec<Drawn>> {
        let each = prompts.iter().flat_map(|(prompt, seeds)| seeds.iter().map(|&seed| (prompt.tokens.clone(), seed)));
        let requests: Vec<_> = each.collect();
        let (most, stop_ids) = (self.max_completion_length, self.tokenizer.eos_ids());
        // The head applies the temperature of the run.
        let temperature = if is_greedy { 0.0 } else { 1.0 };
        let draw = |engine: &mut Engine| sample(engine, &requests, most, stop_ids, temperature);
        self.drawer.borrow_mut().lend(model, draw)
    }

    /// The rewards of `samples`, which are completions of `prompts` in their order.
    fn score(&self, prompts: &[Seeded], samples: Vec<Drawn>, step: u64) -> Result<Generation> {
        let told: Vec<ottava_rewards::Prompt> = prompts.iter().map(|(prompt, _)| told(prompt)).collect();
        let ends = self.tokenizer.eos_ids();
        let text = |drawn: &Drawn| {
            let end = drawn.tokens.iter().rposition(|token| !ends.contains(token)).map_or(0, |last| last + 1);
            self.tokenizer.decode(&drawn.tokens[..end])
        };
        let texts: Vec<String> = samples.iter().map(text).collect::<Result<_>>()?;
        let owners =
            prompts.iter().enumerate().flat_map(|(at, (_, seeds))| (0..seeds.len()).map(move |index| (at, index)));
        let batch = samples.iter().zip(&texts).zip(owners).map(|((drawn, text), (at, index))| Sample {
            prompt: &told[at],
            completion: text,
            completion_ids: &drawn.tokens,
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
