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

    /// The places in a row of `max_length` tokens whose predictions are the drawn tokens.
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
    let tokens: Vec<i32> = sample.prompt.iter().chain(&sample.tokens).map(|&token| token as i32).collect();
    let inputs = tokens.iter().copied().chain(std::iter::repeat(end as i32));
    batch.inputs[start..][..length].iter_mut().zip(inputs).for_each(|(input, token)| *input = token);
    let targets = &mut batch.targets[start..][..length];
    targets.fill(IGNORE_INDEX);
    sample.predictions().for_each(|at| targets[at] = tokens[at + 1]);
    batch.padding[row] = length - tokens.len();
}

/// Draws a completion of each of `prompts`, with its seed, of at most `max_tokens` tokens, at this `temperature`; at 0 the most likely one. A text ends
/// with one of `stop_ids`.
///
/// Errors as [`Engine::add`] and [`Engine::step`], and with [`Error::Cancelled`](ottava_common::Error::Cancelled) after a request to stop.
pub fn sample(
    engine: &mut Engine,
    prompts: &[(Vec<u32>, u64)],
    max_tokens: usize,
    stop_ids: &[u32],
    temperature: f64,
) -> Result<Vec<Sample>> {
    let mut places: HashMap<RequestId, usize> = HashMap::new();
    let mut drawn: Vec<(Vec<u32>, Vec<f32>, End)> = vec![(Vec::new(), Vec::new(), End::Length); prompts.len()];
    for (at, (prompt, seed)) in prompts.iter().enumerate() {
        let request = Request {
            prompt: prompt.clone(),
            sampling: Sampling { temperature, seed: *seed, ..Sampling::default() },
            max_new_tokens: max_tokens,
            stop_ids: stop_ids.to_vec(),
            logprobs: Some(0),
            ..Request::default()
        };
        places.insert(engine.add(request)?, at);
    }
    while !engine.is_idle() {
        ottava_common::interrupt::check("drawing completions")?;
        for event in engine.step()? {
            match event {
                Event::Token { id, token, logprob } => {
                    let (tokens, logprobs, _) = &mut drawn[places[&id]];
                    tokens.push(token);
                    logprobs.push(logprob.expect("the request asks for it").logprob);
                }
                Event::Finished { id, reason: FinishReason::Stop } => drawn[places[&id]].2 = End::Text,
                Event::Finished { .. } => {}
                Event::Prompt { .. } | Event::Embedding { .. } => {}
            }
        }
    }
    let of = |((prompt, _), (tokens, logprobs, end)): (&(Vec<u32>, u64), _)| {
        Sample::of_turn(prompt.clone(), tokens, logprobs, end)
    };
    Ok(prompts.iter().zip(drawn).map(of).collect())
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
