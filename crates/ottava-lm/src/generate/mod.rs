//! Text completion, one token at a time, with a cache of keys and values.

use crate::data::Tokenizer;
use crate::data::order::{MIX_STEP, mix};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::models::{Decoder, Logits};
use ottava_tensor::{Device, Tensor};

/// Settings of sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Tokens at most.
    pub max_new_tokens: usize,
    /// 0 always takes the likeliest token; above, logits are divided by it.
    pub temperature: f64,
    /// Tokens are drawn from the likeliest ones that together have this probability.
    pub top_p: f64,
    /// The seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Errors with [`Error::Config`] when temperature or `top_p` cannot be used.
    fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(Error::Config(format!("temperature is {}; it is a number from 0 up", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::Config(format!("top-p is {}; it is above 0 and at most 1", self.top_p)));
        }
        Ok(())
    }
}

/// Completes a text that begins with the tokens `ids`, and returns the new text. Calls `on_token` after each token with the text that it
/// completes, which is empty within a character. Stops at the end of text or at the end of the model's positions, `capacity`.
///
/// # Errors
/// [`Error::Config`] for settings or a beginning that cannot be used, [`Error::NonFinite`] for logits that are infinite or NaN.
pub fn generate(
    model: &Decoder,
    tokenizer: &Tokenizer,
    mut ids: Vec<u32>,
    capacity: usize,
    how: &Sampling,
    on_token: &mut dyn FnMut(&str),
) -> Result<String> {
    how.check()?;
    if ids.is_empty() {
        return Err(Error::Config(
            "the prompt is empty and the tokenizer has no token that ends a text; give a prompt".into(),
        ));
    }
    check_ids(&ids, model)?;
    if ids.len() >= capacity {
        return Err(Error::Config(format!("the prompt has {} tokens; the model has room for {capacity}", ids.len())));
    }
    let prompt_len = ids.len();
    let mut session = model.session(capacity)?;
    let mut done = 0;
    let mut text = String::new();
    let mut draws = Draws(how.seed);
    while ids.len() < capacity && ids.len() - prompt_len < how.max_new_tokens {
        interrupt::check("generating")?;
        let new: Vec<i32> = ids[done..].iter().map(|&id| id as i32).collect();
        let new = Tensor::from_slice(model.device(), &[new.len()], &new)?;
        let logits = model.logits(&new, &mut session, Logits::Last)?;
        done = ids.len();
        let logits = logits.to_device(&Device::Cpu)?.to_vec::<f32>()?;
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::NonFinite(format!(
                "a logit of token {} is {bad}: the model's weights or activations are not finite",
                ids.len() + 1
            )));
        }
        let next = choose(&logits, how, &mut draws);
        if tokenizer.eos_ids().contains(&next) {
            break;
        }
        ids.push(next);
        let whole = tokenizer.decode(&ids[prompt_len..])?;
        // The bytes of a character may be in several tokens, and decode to this one until the last of them is there.
        let new = whole.strip_prefix(&text).filter(|new| !new.ends_with(char::REPLACEMENT_CHARACTER));
        on_token(new.unwrap_or_default());
        if new.is_some() {
            text = whole;
        }
    }
    let whole = tokenizer.decode(&ids[prompt_len..])?;
    // A character that was cut off.
    if let Some(rest) = whole.strip_prefix(&text).filter(|rest| !rest.is_empty()) {
        on_token(rest);
    }
    Ok(whole)
}

/// Errors when a token has no row in the model's embedding.
pub fn check_ids(ids: &[u32], model: &Decoder) -> Result<()> {
    let vocabulary = model.config().vocabulary;
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        Some(id) => Err(Error::Data(format!(
            "the tokenizer gives token {id}, the model's vocabulary ends at {vocabulary}: tokenizer and model do not belong together"
        ))),
        None => Ok(()),
    }
}

fn choose(logits: &[f32], how: &Sampling, draws: &mut Draws) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if how.temperature == 0.0 {
        let best = order.into_iter().reduce(|a, b| if logits[b] > logits[a] { b } else { a });
        return best.expect("a vocabulary") as u32;
    }
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let largest = f64::from(logits[order[0]]);
    let weights: Vec<f64> = order.iter().map(|&i| ((f64::from(logits[i]) - largest) / how.temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    // The smallest set of likeliest tokens that reaches top_p; at least one.
    let mut kept = 0.0;
    let mut count = 0;
    while count < weights.len() && kept < how.top_p * total {
        kept += weights[count];
        count += 1;
    }
    let mut left = draws.next() * weights[..count].iter().sum::<f64>();
    for (&token, weight) in order.iter().zip(&weights[..count]) {
        left -= weight;
        if left < 0.0 {
            return token as u32;
        }
    }
    order[count - 1] as u32
}

/// Uniform numbers in [0, 1): SplitMix64 (Steele, Lea and Flood 2014).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(MIX_STEP);
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(temperature: f64, top_p: f64) -> [f64; 4] {
        let logits = [0.0f32, 2.0, 1.0, -1.0];
        let how = Sampling { max_new_tokens: 0, temperature, top_p, seed: 5 };
        let (mut draws, mut counts) = (Draws(how.seed), [0.0; 4]);
        for _ in 0..20_000 {
            counts[choose(&logits, &how, &mut draws) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn draws_follow_the_softmax_at_every_temperature() {
        assert!(shares(0.0, 1.0)[1] > 0.999, "temperature 0 takes the likeliest token");
        for temperature in [0.5, 1.0, 3.0] {
            let weights = [0.0f64, 2.0, 1.0, -1.0].map(|l| (l / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (found, weight) in shares(temperature, 1.0).into_iter().zip(weights) {
                assert!((found - weight / total).abs() < 0.015, "{found} at temperature {temperature}");
            }
        }
    }

    #[test]
    fn top_p_cuts_the_tail() {
        let found = shares(1.0, 0.8);
        assert!(found[0] == 0.0 && found[3] == 0.0 && found[1] > 0.6 && found[2] > 0.2, "{found:?}");
        assert!(shares(1.0, 1e-9)[1] > 0.999, "the likeliest token always stays");
    }
}
