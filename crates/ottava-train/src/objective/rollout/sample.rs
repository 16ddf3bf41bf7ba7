//! Completions of prompts by the model as it is now.

use ottava_common::error::Result;
use ottava_common::hash::{MIX_STEP, mix};
use ottava_data::Batch;
use ottava_engine::{Engine, Event, FinishReason, Request, RequestId, Sampling};
use ottava_tensor::ops::IGNORE_INDEX;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;

/// A completion that was drawn, in one turn, or in several turns that an environment has answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The tokens after the prompt: the tokens that were drawn, with the token that ended a turn, and between turns the tokens of the environment.
    pub tokens: Vec<u32>,
    /// The log-probability of each drawn token when it was drawn.
    pub logprobs: Vec<f32>,
    /// The places in `tokens` of the drawn tokens of each turn.
    pub turns: Vec<Range<usize>>,
    /// Why no token follows.
    pub end: End,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The last turn ended with an end-of-sequence token.
    Text,
    /// The last turn was cut at the greatest length, or there was no room for a further turn.
    Length,
    /// The environment ended the conversation.
    Environment,
}

impl Sample {
    /// A completion of one turn.
    pub fn of_turn(prompt: Vec<u32>, tokens: Vec<u32>, logprobs: Vec<f32>, end: End) -> Sample {
        let turn = 0..tokens.len();
        Sample { prompt, tokens, logprobs, turns: vec![turn], end }
    }

    /// The number of tokens of the prompt and of the completion.
    pub fn length(&self) -> usize {
        self.prompt.len() + self.tokens.len()
    }

    /// The places, counted from the first token of the prompt, whose predictions are the drawn tokens.
    pub fn predictions(&self) -> impl Iterator<Item = usize> {
        let first = self.prompt.len() - 1;
        self.turns.iter().flat_map(move |turn| first + turn.start..first + turn.end)
    }

    /// The number of drawn tokens.
    pub fn drawn(&self) -> usize {
        self.logprobs.len()
    }

    /// The drawn tokens.
    pub fn drawn_tokens(&self) -> Vec<u32> {
        self.turns.iter().flat_map(|turn| &self.tokens[turn.clone()]).copied().collect()
    }

    /// Whether the completion ended by itself, and not at its greatest length.
    pub fn is_complete(&self) -> bool {
        self.end != End::Length
    }

    /// Adds the tokens of `turn`, which was drawn after the tokens so far.
    pub fn add_turn(&mut self, turn: Sample) {
        let start = self.tokens.len();
        self.turns.push(start..start + turn.tokens.len());
        self.tokens.extend(turn.tokens);
        self.logprobs.extend(turn.logprobs);
        self.end = turn.end;
    }
}

/// The seed of the draws of a completion: a hash of the run's seed, the rollout, the place of the prompt in it, and the number of the completion
/// of the prompt. A sum of these numbers would give different completions the same seed.
pub fn seed_of(parts: [u64; 4]) -> u64 {
    parts.into_iter().fold(0, |seed, part| mix(seed.wrapping_add(MIX_STEP) ^ mix(part.wrapping_add(MIX_STEP))))
}

/// Writes a prompt and its completion into a row, and fills the row with the token `end`. Only drawn tokens are learned.
pub fn set_row(batch: &mut Batch, row: usize, sample: &Sample, end: u32) {
    let (start, length) = (row * batch.seq_len, batch.seq_len);
    batch.inputs[start..][..length].fill(end as i32);
    batch.targets[start..][..length].fill(IGNORE_INDEX);
    write_sample(batch, start, sample);
    batch.padding[row] = length - sample.length();
}

/// Writes a prompt and its completion to the tokens from `start`, whose targets are [`IGNORE_INDEX`].
pub(super) fn write_sample(batch: &mut Batch, start: usize, sample: &Sample) {
    let tokens: Vec<i32> = sample.prompt.iter().chain(&sample.tokens).map(|&token| token as i32).collect();
    batch.inputs[start..][..tokens.len()].copy_from_slice(&tokens);
    sample.predictions().for_each(|at| batch.targets[start + at] = tokens[at + 1]);
}

/// A completion to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The seed of the draws.
    pub seed: u64,
    /// Tokens of the completion, at most.
    pub max_tokens: usize,
}

/// The tokens that were drawn of a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Drawn {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The log-probability of each token when it was drawn.
    pub logprobs: Vec<f32>,
    /// Why no token follows; `None` if the completion is not finished.
    pub end: Option<End>,
}

/// Draws the completions `wanted` at this `temperature`; at 0 the most likely ones. A text ends with one of `stop_ids`.
///
/// Errors as [`Engine::add`] and [`Engine::step`], and with [`Error::Cancelled`](ottava_common::Error::Cancelled) after a request to stop.
pub fn sample(engine: &mut Engine, wanted: &[Draw], stop_ids: &[u32], temperature: f64) -> Result<Vec<Sample>> {
    let mut draws = Draws::new(stop_ids, temperature);
    wanted.iter().try_for_each(|draw| draws.add(engine, draw))?;
    while !engine.is_idle() {
        draws.step(engine)?;
    }
    let of = |(draw, drawn): (&Draw, Drawn)| {
        Sample::of_turn(draw.prompt.clone(), drawn.tokens, drawn.logprobs, drawn.end.unwrap_or(End::Length))
    };
    Ok(wanted.iter().zip(draws.drawn).map(of).collect())
}

/// Completions that an engine draws.
pub(super) struct Draws<'a> {
    stop_ids: &'a [u32],
    temperature: f64,
    places: HashMap<RequestId, usize>,
    /// The completions, in the order in which they were added.
    pub(super) drawn: Vec<Drawn>,
}

impl<'a> Draws<'a> {
    /// No completions yet.
    pub(super) fn new(stop_ids: &'a [u32], temperature: f64) -> Draws<'a> {
        Draws { stop_ids, temperature, places: HashMap::new(), drawn: Vec::new() }
    }

    /// Begins a completion.
    pub(super) fn add(&mut self, engine: &mut Engine, draw: &Draw) -> Result<()> {
        let request = Request {
            prompt: draw.prompt.clone(),
            sampling: Sampling { temperature: self.temperature, seed: draw.seed, ..Sampling::default() },
            max_new_tokens: draw.max_tokens,
            stop_ids: self.stop_ids.to_vec(),
            logprobs: Some(0),
            ..Request::default()
        };
        self.places.insert(engine.add(request)?, self.drawn.len());
        self.drawn.push(Drawn::default());
        Ok(())
    }

    /// Draws a token of each completion that the engine computes.
    pub(super) fn step(&mut self, engine: &mut Engine) -> Result<()> {
        engine.check_stop("drawing completions")?;
        for event in engine.step()? {
            match event {
                Event::Token { id, token, logprob, .. } => {
                    let drawn = &mut self.drawn[self.places[&id]];
                    drawn.tokens.push(token);
                    drawn.logprobs.push(logprob.expect("the request asks for it").logprob);
                }
                Event::Finished { id, reason, .. } => {
                    self.drawn[self.places[&id]].end = match reason {
                        FinishReason::Stop => Some(End::Text),
                        FinishReason::Cancelled => None,
                        _ => Some(End::Length),
                    };
                }
                Event::Prompt { .. } | Event::Embedding { .. } => {}
            }
        }
        Ok(())
    }

    /// Cancels unfinished completions in the engine, and keeps their tokens.
    pub(super) fn stop(&mut self, engine: &mut Engine) -> Result<()> {
        for (&id, &at) in &self.places {
            if self.drawn[at].end.is_none() {
                engine.cancel(id);
            }
        }
        while !engine.is_idle() {
            self.step(engine)?;
        }
        Ok(())
    }

    /// Returns how many of the first `count` completions are unfinished.
    pub(super) fn open(&self, count: usize) -> usize {
        self.drawn.iter().take(count).filter(|drawn| drawn.end.is_none()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_completion_of_a_run_has_a_seed_of_its_own() {
        let all =
            (0..20).flat_map(|rollout| (0..16).flat_map(move |prompt| (0..16).map(move |i| [7, rollout, prompt, i])));
        let seeds: HashSet<u64> = all.clone().map(seed_of).collect();
        assert_eq!(seeds.len(), all.count());
        assert_ne!(seed_of([7, 1, 2, 3]), seed_of([7, 3, 2, 1]));
    }
}
