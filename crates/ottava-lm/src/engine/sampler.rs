//! From logits to a token. Logits are F32, one row of the vocabulary.

use super::request::{Sampling, TokenLogprob};
use crate::data::order::{MIX_STEP, mix};
use std::cmp::Ordering;
use std::collections::HashMap;

/// How often tokens occur in a request: what penalties depend on.
#[derive(Clone, Debug, Default)]
pub struct Occurrences {
    /// Of each token: times in the output. Tokens of the prompt alone are there with 0.
    counts: HashMap<u32, u32>,
}

impl Occurrences {
    /// Those of a request that has this prompt and no output.
    pub fn of_prompt(prompt: &[u32]) -> Occurrences {
        Occurrences { counts: prompt.iter().map(|&token| (token, 0)).collect() }
    }

    /// Counts a token of the output.
    pub fn add(&mut self, token: u32) {
        *self.counts.entry(token).or_default() += 1;
    }
}

/// Draws the token after `drawn` others. `barred` tokens are never drawn.
pub fn draw(logits: &[f32], how: &Sampling, seen: &Occurrences, barred: &[u32], drawn: usize) -> u32 {
    let mut logits = logits.to_vec();
    penalise(&mut logits, how, seen);
    for &token in barred {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if how.temperature == 0.0 {
        return likeliest(&logits);
    }
    let uniform = uniform(how.seed, drawn);
    let candidates = Candidates::of(&logits, how);
    candidates.token_at(uniform)
}

/// The token with the largest logit, the first among equals.
fn likeliest(logits: &[f32]) -> u32 {
    // Independent maxima of eight interleaved parts, which compilers vectorise.
    let mut largest = [f32::NEG_INFINITY; 8];
    let (eights, rest) = logits.as_chunks::<8>();
    for eight in eights {
        largest.iter_mut().zip(eight).for_each(|(largest, &x)| *largest = if x > *largest { x } else { *largest });
    }
    let largest = largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&x| x == largest).unwrap_or(0) as u32
}

/// Applies bias and penalties as vLLM does: repetition by prompt and output, presence and frequency by the output.
fn penalise(logits: &mut [f32], how: &Sampling, seen: &Occurrences) {
    for (&token, &count) in &seen.counts {
        let Some(logit) = logits.get_mut(token as usize) else {
            continue;
        };
        let penalty = how.repetition_penalty as f32;
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        if count > 0 {
            *logit -= how.presence_penalty as f32 + how.frequency_penalty as f32 * count as f32;
        }
    }
    for &(token, bias) in &how.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

/// The uniform number in [0, 1) that decides draw `number`: SplitMix64 (Steele, Lea and Flood 2014).
fn uniform(seed: u64, number: usize) -> f64 {
    let bits = mix(seed.wrapping_add(MIX_STEP.wrapping_mul(number as u64)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Tokens that can be drawn, with weights in proportion to their probabilities.
struct Candidates(Vec<(u32, f64)>);

/// Likelier tokens first, the smaller id first among equals.
fn likelier(a: &(u32, f64), b: &(u32, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

impl Candidates {
    /// What temperature, min-p, top-k and top-p leave, in this order. Without the last two, in the order of ids.
    fn of(logits: &[f32], how: &Sampling) -> Candidates {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| (f64::from(logit - largest) / how.temperature).exp();
        let mut all: Vec<(u32, f64)> = (0..).zip(logits).map(|(token, &logit)| (token, weight(logit))).collect();
        // The likeliest token has the weight 1.
        all.retain(|(_, weight)| *weight > 0.0 && *weight >= how.min_p);
        if let Some(k) = how.top_k.filter(|&k| k < all.len()) {
            all.select_nth_unstable_by(k - 1, likelier);
            all.truncate(k);
            all.sort_unstable_by(likelier);
        }
        if how.top_p < 1.0 {
            keep_mass(&mut all, how.top_p);
        }
        Candidates(all)
    }

    /// The token at `uniform` of the way through all weights.
    fn token_at(&self, uniform: f64) -> u32 {
        let mut left = uniform * self.0.iter().map(|(_, weight)| weight).sum::<f64>();
        for &(token, weight) in &self.0 {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        self.0.last().expect("the likeliest token always stays").0
    }
}

/// Keeps the smallest set of likeliest tokens that has the share `top_p` of all weights, at least one, in order.
fn keep_mass(all: &mut Vec<(u32, f64)>, top_p: f64) {
    let wanted = top_p * all.iter().map(|(_, weight)| weight).sum::<f64>();
    // Few tokens have most of the mass, so as few as possible are sorted.
    let mut sorted = 64;
    loop {
        sorted = sorted.min(all.len());
        if sorted < all.len() {
            all.select_nth_unstable_by(sorted, likelier);
        }
        all[..sorted].sort_unstable_by(likelier);
        let mut mass = 0.0;
        let within = all[..sorted].iter().take_while(|(_, weight)| {
            let before = mass;
            mass += weight;
            before < wanted
        });
        let count = within.count().max(1);
        if count < sorted || sorted == all.len() {
            all.truncate(count);
            return;
        }
        sorted *= 8;
    }
}

/// The log-probability of `token` and the `top` likeliest ones, of unchanged logits.
pub fn logprob(logits: &[f32], token: u32, top: usize) -> TokenLogprob {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let of = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
    let mut likely: Vec<(u32, f64)> = Vec::new();
    if top > 0 {
        likely.extend((0..).zip(logits).map(|(token, &logit)| (token, f64::from(logit))));
        let top = top.min(likely.len());
        likely.select_nth_unstable_by(top - 1, likelier);
        likely.truncate(top);
        likely.sort_unstable_by(likelier);
    }
    let top = likely.into_iter().map(|(token, logit)| (token, of(logit as f32))).collect();
    TokenLogprob { token, logprob: of(logits[token as usize]), top }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 1.5];

    /// How often each token is drawn.
    fn shares(how: &Sampling) -> [f64; 5] {
        let mut shares = [0.0; 5];
        for number in 0..20_000 {
            let token = draw(&LOGITS, how, &Occurrences::default(), &[], number);
            shares[token as usize] += 1.0 / 20_000.0;
        }
        shares
    }

    fn softmax(logits: [f64; 5]) -> [f64; 5] {
        let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
        logits.map(|logit| logit.exp() / sum)
    }

    fn at(temperature: f64) -> Sampling {
        Sampling { temperature, seed: 5, ..Sampling::default() }
    }

    fn assert_shares(how: &Sampling, expected: [f64; 5]) {
        let found = shares(how);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 0.015, "{found} for {expected} of {how:?}");
            assert!(expected > 0.0 || *found == 0.0, "a token that cannot be drawn: {how:?}");
        }
    }

    #[test]
    fn draws_follow_the_softmax_at_every_temperature() {
        assert!(shares(&at(0.0))[1] > 0.999, "temperature 0 takes the likeliest token");
        for temperature in [0.5, 1.0, 3.0] {
            assert_shares(&at(temperature), softmax(LOGITS.map(|logit| f64::from(logit) / temperature)));
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_cut_the_tail() {
        let only = |kept: &[usize]| {
            let all = softmax(LOGITS.map(f64::from));
            let sum: f64 = kept.iter().map(|&token| all[token]).sum();
            std::array::from_fn(|token| if kept.contains(&token) { all[token] / sum } else { 0.0 })
        };
        assert_shares(&Sampling { top_k: Some(2), ..at(1.0) }, only(&[1, 4]));
        assert_shares(&Sampling { top_k: Some(9), ..at(1.0) }, only(&[0, 1, 2, 3, 4]));
        // Probabilities are 0.44, 0.27, 0.16, 0.06 and 0.02 in the order 1, 4, 2, 0, 3.
        assert_shares(&Sampling { top_p: 0.8, ..at(1.0) }, only(&[1, 4, 2]));
        assert_shares(&Sampling { top_p: 1e-9, ..at(1.0) }, only(&[1]));
        assert_shares(&Sampling { min_p: 0.5, ..at(1.0) }, only(&[1, 4]));
        assert_shares(&Sampling { min_p: 1.0, ..at(1.0) }, only(&[1]));
        assert_shares(&Sampling { top_k: Some(3), top_p: 0.7, ..at(1.0) }, only(&[1, 4]));
    }

    #[test]
    fn top_p_of_a_large_vocabulary_is_that_of_a_whole_sort() {
        let weights: Vec<(u32, f64)> = (0..3000).map(|i| (i, f64::from(i * 7919 % 3001) + 1.0)).collect();
        for top_p in [0.001, 0.02, 0.3, 0.9, 0.99999] {
            let mut expected = weights.clone();
            expected.sort_by(likelier);
            let wanted = top_p * weights.iter().map(|(_, weight)| weight).sum::<f64>();
            let mut mass = 0.0;
            let count = expected.iter().position(|(_, weight)| {
                mass += weight;
                mass >= wanted
            });
            expected.truncate(count.unwrap() + 1);
            let mut found = weights.clone();
            keep_mass(&mut found, top_p);
            assert_eq!(found, expected, "{top_p}");
        }
    }

    #[test]
    fn penalties_are_those_of_vllm() {
        let mut seen = Occurrences::of_prompt(&[0, 3]);
        for token in [1, 1, 3] {
            seen.add(token);
        }
        let how = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            logit_bias: vec![(4, 3.0), (99, 1.0)],
            ..Sampling::default()
        };
        let mut logits = LOGITS;
        penalise(&mut logits, &how, &seen);
        assert_eq!(logits, [0.0, 1.0 - 0.25 - 1.0, 1.0, -2.0 - 0.25 - 0.5, 4.5]);
        assert_eq!(draw(&LOGITS, &how, &seen, &[], 0), 4);
        assert_eq!(draw(&LOGITS, &how, &seen, &[4, 99], 0), 2, "a token that is barred");
        assert_eq!(draw(&LOGITS, &Sampling::default(), &seen, &[1], 0), 4);
    }

    #[test]
    fn logprobs_are_the_log_softmax() {
        let found = logprob(&LOGITS, 2, 3);
        let expected = softmax(LOGITS.map(f64::from)).map(f64::ln);
        assert!((f64::from(found.logprob) - expected[2]).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 4, 2]);
        assert!((f64::from(found.top[1].1) - expected[4]).abs() < 1e-6);
        assert_eq!(logprob(&LOGITS, 2, 0).top, []);
        assert_eq!(logprob(&[1.0, 1.0, 1.0], 2, 9).top.len(), 3);
        assert_eq!(logprob(&[1.0, 1.0, 1.0], 2, 2).top[1].0, 1, "the smaller ids of equals");
    }

    #[test]
    fn the_first_of_equal_logits_is_the_likeliest() {
        assert_eq!(likeliest(&[1.0, 3.0, 3.0]), 1);
        let mut many = vec![-5.0; 100];
        (many[77], many[93]) = (2.0, 2.0);
        assert_eq!(likeliest(&many), 77);
        assert_eq!(likeliest(&[f32::NEG_INFINITY; 3]), 0);
    }
}
