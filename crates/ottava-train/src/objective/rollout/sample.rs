//! Completions of prompts by the model as it is now.

use ottava_common::error::Result;
use ottava_common::hash::{MIX_STEP, mix};
use ottava_data::Batch;
use ottava_engine::{Engine, Event, FinishReason, Request, RequestId, Sampling};
use ottava_tensor::ops::IGNORE_INDEX;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;

/// A completion that was drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The tokens that were drawn, with the one that ended the text.
    pub tokens: Vec<u32>,
    /// The log-probability of each of them when it was drawn.
    pub logprobs: Vec<f32>,
    /// Whether it ended by itself, and not at its greatest length.
    pub is_complete: bool,
}

impl Sample {
    /// The places in a row of `max_length` tokens whose predictions are the drawn tokens.
    pub fn predictions(&self) -> Range<usize> {
        let first = self.prompt.len() - 1;
        first..first + self.tokens.len()
    }
}

/// The seed of the draws of a completion: a hash of the run's seed, the rollout, the place of the prompt in it, and the number of the completion
/// of the prompt. A sum of these numbers would give different completions the same seed.
pub fn seed_of(parts: [u64; 4]) -> u64 {
    parts.into_iter().fold(0, |seed, part| mix(seed.wrapping_add(MIX_STEP) ^ mix(part.wrapping_add(MIX_STEP))))
}

/// Writes a prompt and its completion into a row, and fills the row with the token `end`. Only the completion is learned.
pub fn set_row(batch: &mut Batch, row: usize, prompt: &[u32], completion: &[u32], end: u32) {
    let (start, length) = (row * batch.seq_len, batch.seq_len);
    let tokens: Vec<i32> = prompt.iter().chain(completion).map(|&token| token as i32).collect();
    let inputs = tokens.iter().copied().chain(std::iter::repeat(end as i32));
    batch.inputs[start..][..length].iter_mut().zip(inputs).for_each(|(input, token)| *input = token);
    for (at, target) in batch.targets[start..][..length].iter_mut().enumerate() {
        *target = if (prompt.len()..tokens.len()).contains(&(at + 1)) { tokens[at + 1] } else { IGNORE_INDEX };
    }
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
    let mut samples: Vec<Sample> = Vec::with_capacity(prompts.len());
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
        samples.push(Sample { prompt: prompt.clone(), tokens: Vec::new(), logprobs: Vec::new(), is_complete: false });
    }
    while !engine.is_idle() {
        ottava_common::interrupt::check("drawing completions")?;
        for event in engine.step()? {
            match event {
                Event::Token { id, token, logprob } => {
                    let sample = &mut samples[places[&id]];
                    sample.tokens.push(token);
                    sample.logprobs.push(logprob.expect("the request asks for it").logprob);
                }
                Event::Finished { id, reason } => samples[places[&id]].is_complete = reason == FinishReason::Stop,
                Event::Prompt { .. } | Event::Embedding { .. } => {}
            }
        }
    }
    Ok(samples)
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
