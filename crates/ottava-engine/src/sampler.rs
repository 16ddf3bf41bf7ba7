//! Draws the next token of a request, and computes log-probabilities. Logits are F32, and a row has one logit per token of the vocabulary.

use crate::request::TokenLogprob;
use crate::sampling::Sampling;
use ottava_common::hash::{MIX_STEP, mix};
use ottava_tensor::ops::{Adjustment, Draw};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

/// The counts of the tokens of a request, for penalties.
#[derive(Clone, Debug, Default)]
pub struct Occurrences {
    /// The number of occurrences of each token in the output. It is 0 for tokens that occur only in the prompt.
    counts: HashMap<u32, u32>,
}

impl Occurrences {
    /// Returns the counts of a request with this prompt and without output.
    pub fn of_prompt(prompt: &[u32]) -> Occurrences {
        Occurrences { counts: prompt.iter().map(|&token| (token, 0)).collect() }
    }

    /// Counts a token of the output.
    pub fn add(&mut self, token: u32) {
        *self.counts.entry(token).or_default() += 1;
    }
}

/// Returns the settings for drawing a token after `drawn` drawn tokens. Tokens in `barred` are never drawn.
pub fn draw(how: &Sampling, seen: &Occurrences, barred: &[u32], drawn: usize) -> Draw {
    let is_penalised = how.counts_tokens();
    let counts = seen.counts.iter().filter(|_| is_penalised).map(|(&token, &count)| (token, (Some(count), 0.0)));
    // Adjustments are in the order of token ids, and each token occurs once.
    let mut adjustments: BTreeMap<u32, (Option<u32>, f32)> = counts.collect();
    let barred = barred.iter().map(|&token| (token, f32::NEG_INFINITY));
    for (token, bias) in how.logit_bias.iter().copied().chain(barred) {
        adjustments.entry(token).or_default().1 += bias;
    }
    let adjustment = |(token, (count, bias))| Adjustment { token, count, bias };
    let adjustments = adjustments.into_iter().map(adjustment).collect();
    Draw { uniform: uniform(how.seed, drawn), adjustments, ..how.draw() }
}

/// Bars further `tokens`, in the order of ids.
pub fn bar(draw: &mut Draw, tokens: impl Iterator<Item = u32>) {
    let mut others = std::mem::take(&mut draw.adjustments).into_iter().peekable();
    for token in tokens {
        while let Some(other) = others.next_if(|other| other.token < token) {
            draw.adjustments.push(other);
        }
        others.next_if(|other| other.token == token);
        draw.adjustments.push(Adjustment { token, count: None, bias: f32::NEG_INFINITY });
    }
    draw.adjustments.extend(others);
}

/// Returns the uniform number for draw `number`, by SplitMix64 (Steele, Lea and Flood 2014).
fn uniform(seed: u64, number: usize) -> u64 {
    mix(seed.wrapping_add(MIX_STEP.wrapping_mul(number as u64)))
}

/// Returns the `count` largest of `logits` with their tokens in descending order. Among equals, the smaller id is first.
fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let count = count.min(logits.len());
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(count);
    for (token, &logit) in (0..).zip(logits) {
        if found.len() == count {
            // Among equals, the earlier token stays, since its id is smaller.
            match found.last() {
                Some(least) if logit.total_cmp(&least.1) == Ordering::Greater => drop(found.pop()),
                _ => continue,
            }
        }
        let at = found.partition_point(|other| other.1.total_cmp(&logit) != Ordering::Less);
        found.insert(at, (token, logit));
    }
    found
}

/// Returns the log-probability of `token` and the `top` likeliest tokens, from these logits. Allocates memory for `top` tokens, not for all logits.
pub fn logprob(logits: &[f32], token: u32, top: usize) -> TokenLogprob {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let of = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
    let top = likeliest(logits, top).into_iter().map(|(token, logit)| (token, of(logit))).collect();
    TokenLogprob { token, logprob: of(logits[token as usize]), top }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 1.5];

    #[test]
    fn each_token_has_its_counts_and_biases_once() {
        let mut seen = Occurrences::of_prompt(&[7, 3]);
        [1, 1, 3].into_iter().for_each(|token| seen.add(token));
        let mut how = Sampling { logit_bias: vec![(3, 2.0), (9, 1.0), (9, 0.5)], seed: 4, ..Sampling::default() };
        let adjusted = |how: &Sampling| draw(how, &seen, &[1, 20], 0).adjustments;
        let of = |token, count, bias| Adjustment { token, count, bias };
        let barred = f32::NEG_INFINITY;
        assert_eq!(
            adjusted(&how),
            [of(1, None, barred), of(3, None, 2.0), of(9, None, 1.5), of(20, None, barred)],
            "nothing is penalised"
        );
        how.presence_penalty = 0.5;
        let expected =
            [of(1, Some(2), barred), of(3, Some(1), 2.0), of(7, Some(0), 0.0), of(9, None, 1.5), of(20, None, barred)];
        assert_eq!(adjusted(&how), expected);
    }

    #[test]
    fn barred_tokens_replace_other_adjustments() {
        let how = Sampling { logit_bias: vec![(3, 2.0), (5, 1.0), (9, 1.0)], ..Sampling::default() };
        let mut draw = draw(&how, &Occurrences::default(), &[], 0);
        bar(&mut draw, [1, 5, 6].into_iter());
        let found: Vec<_> = draw.adjustments.iter().map(|adjustment| (adjustment.token, adjustment.bias)).collect();
        let barred = f32::NEG_INFINITY;
        assert_eq!(found, [(1, barred), (3, 2.0), (5, barred), (6, barred), (9, 1.0)]);
    }

    #[test]
    fn draws_of_a_request_are_spread_evenly_and_depend_on_its_seed() {
        let quarters = |seed| {
            let mut quarters = [0; 4];
            (0..4000).for_each(|number| quarters[(uniform(seed, number) >> 62) as usize] += 1);
            quarters
        };
        assert!(quarters(5).iter().all(|count| (900..1100).contains(count)), "{:?}", quarters(5));
        assert_ne!(uniform(5, 0), uniform(6, 0));
    }

    #[test]
    fn the_likeliest_tokens_are_those_of_a_sorted_row() {
        let values = |seed: u64| mix(seed) as i64 as f32 / 2f32.powi(60);
        let rows: [Vec<f32>; 5] = [
            (0..997).map(values).collect(),
            (0..997).map(|number| values(number % 7)).collect(),
            (0..300).map(|number| number as f32).collect(),
            (0..300).map(|number| -(number as f32)).collect(),
            vec![0.0, -0.0, f32::NEG_INFINITY, 0.0, f32::INFINITY, f32::MIN],
        ];
        for row in rows {
            let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            for count in [0, 1, 2, 100, row.len(), row.len() + 1] {
                assert_eq!(likeliest(&row, count), sorted[..count.min(row.len())], "{count} of {}", row.len());
            }
        }
    }

    #[test]
    fn logprobs_are_the_log_softmax() {
        let found = logprob(&LOGITS, 2, 3);
        let sum: f64 = LOGITS.iter().map(|&logit| f64::from(logit).exp()).sum();
        // The results are F32 below 4, and half a step there is 1.2e-7.
        let expected = LOGITS.map(|logit| f64::from(logit) - sum.ln());
        assert!((f64::from(found.logprob) - expected[2]).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 4, 2]);
        assert!((f64::from(found.top[1].1) - expected[4]).abs() < 1e-6);
        assert!(logprob(&LOGITS, 2, 0).top.is_empty());
        assert_eq!(logprob(&[1.0, 1.0, 1.0], 2, 9).top.len(), 3);
        assert_eq!(logprob(&[1.0, 1.0, 1.0], 2, 2).top[1].0, 1, "the smaller ids of equals");
    }
}
