//! Completions with their rewards, and what a run logs of them.

use super::sample::{Drawn, End, Sample};
use crate::step::Metrics;
use ottava_common::error::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// A completion with its rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The completion.
    pub sample: Sample,
    /// The log-probabilities of its tokens as steps compute them with the same weights, if draws are corrected.
    pub old: Option<Vec<f32>>,
    /// The values of its tokens by the value head with the weights that drew them, if values give the advantages.
    pub values: Option<Vec<f32>>,
    /// The weighted sum of its scores; `None` if no reward has an opinion.
    pub reward: Option<f64>,
    /// The score by each reward.
    pub scores: Vec<Option<f64>>,
}

/// Completions of a rank, in the order of their prompts.
#[derive(Serialize, Deserialize)]
pub(super) struct Generation {
    /// The completions.
    pub(super) completions: Vec<Completion>,
    /// Their texts.
    pub(super) texts: Vec<String>,
    /// With an environment, the messages of each conversation after the prompt.
    pub(super) messages: Option<Vec<Vec<Value>>>,
    /// The names of the rewards.
    pub(super) rewards: Vec<String>,
    /// The numbers that rewards returned beside scores, as `rewards/NAME/metrics/METRIC`.
    pub(super) metrics: BTreeMap<String, f64>,
    /// The tokens of completions of the next generation, in the order of their prompts.
    pub(super) begun: Vec<Drawn>,
}

impl Generation {
    /// The first `count` completions for a reader, with the text of their prompts from `prompt`.
    pub(super) fn examples(&self, count: usize, prompt: impl Fn(&[u32]) -> Result<String>) -> Result<Vec<Value>> {
        let example = |(completion, text): (&Completion, &String)| {
            let scores: Map<String, Value> =
                self.rewards.iter().cloned().zip(completion.scores.iter().map(|score| json!(score))).collect();
            Ok(json!({
                "prompt": prompt(&completion.sample.prompt)?,
                "completion": text,
                "reward": completion.reward,
                "rewards": scores,
                "tokens": completion.sample.drawn(),
                "truncated": !completion.sample.is_complete(),
            }))
        };
        let examples = self.completions.iter().zip(&self.texts).take(count).map(example);
        let mut examples: Vec<Value> = examples.collect::<Result<_>>()?;
        for (example, messages) in examples.iter_mut().zip(self.messages.iter().flatten()) {
            example["turns"] = json!(messages);
        }
        Ok(examples)
    }
}

/// Mean and standard deviation of numbers; the deviation divides by one less than their number.
fn moments(numbers: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    let count = numbers.clone().count() as f64;
    let mean = numbers.clone().sum::<f64>() / count;
    let squares: f64 = numbers.map(|number| (number - mean).powi(2)).sum();
    (count > 0.0).then(|| (mean, (squares / (count - 1.0).max(1.0)).sqrt()))
}

/// The metrics of `groups` of completions, each of one prompt, under the names of TRL. `rewards` are the names of the scores.
pub fn metrics(groups: &[Vec<Completion>], rewards: &[String]) -> Metrics {
    let all = || groups.iter().flatten();
    let mut named: Vec<(String, f64)> = Vec::new();
    let mut add = |name: &str, value: Option<f64>| named.extend(value.map(|value| (name.to_string(), value)));
    let total = moments(all().filter_map(|completion| completion.reward));
    add("reward", total.map(|(mean, _)| mean));
    let spreads: Vec<f64> =
        groups.iter().filter_map(|group| Some(moments(group.iter().filter_map(|c| c.reward))?.1)).collect();
    add("reward_std", moments(spreads.iter().copied()).map(|(mean, _)| mean));
    let equal = spreads.iter().filter(|spread| **spread == 0.0).count();
    add("frac_reward_zero_std", (!spreads.is_empty()).then(|| equal as f64 / spreads.len() as f64));
    for (at, name) in rewards.iter().enumerate() {
        let own = moments(all().filter_map(|completion| completion.scores[at]));
        add(&format!("rewards/{name}/mean"), own.map(|(mean, _)| mean));
        add(&format!("rewards/{name}/std"), own.map(|(_, deviation)| deviation));
        let scored = all().filter(|completion| completion.scores[at].is_some()).count();
        add(&format!("rewards/{name}/scored"), Some(scored as f64 / all().count().max(1) as f64));
    }
    let length = |completion: &Completion| completion.sample.drawn() as f64;
    let lengths = moments(all().map(length));
    add("completions/mean_length", lengths.map(|(mean, _)| mean));
    let ended = || all().filter(|completion| completion.sample.is_complete());
    add("completions/mean_terminated_length", moments(ended().map(length)).map(|(mean, _)| mean));
    let count = all().count() as f64;
    add("completions/clipped_ratio", Some(1.0 - ended().count() as f64 / count.max(1.0)));
    let words = match (total, lengths) {
        (Some((reward, _)), Some((length, _))) => format!("reward {reward:.3}  length {length:.1}"),
        _ => "no completion has a reward".into(),
    };
    Metrics { named: named.into_iter().map(|(name, value)| (name.into(), value)).collect(), words }
}

/// The metrics of conversations with an environment.
pub(super) fn metrics_of_turns<'c>(completions: impl Iterator<Item = &'c Completion> + Clone) -> Metrics {
    let turns = moments(completions.clone().map(|completion| completion.sample.turns.len() as f64));
    let ended = completions.map(|completion| f64::from(u8::from(completion.sample.end == End::Environment)));
    let mean = |moments: Option<(f64, f64)>| moments.map_or(0.0, |(mean, _)| mean);
    Metrics::new([("turns/mean", mean(turns)), ("turns/ended_by_environment", mean(moments(ended)))], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_means_over_completions_and_groups() {
        let completion = |reward: Option<f64>, tokens: usize, is_complete: bool| Completion {
            sample: Sample::of_turn(
                vec![1],
                vec![2; tokens],
                vec![-0.5; tokens],
                if is_complete { End::Text } else { End::Length },
            ),
            old: None,
            values: None,
            reward,
            scores: vec![reward.map(|reward| reward / 2.0)],
        };
        let groups = [
            vec![completion(Some(1.0), 2, true), completion(Some(1.0), 4, true)],
            vec![completion(Some(0.0), 6, false), completion(None, 8, true)],
            vec![completion(Some(3.0), 1, true), completion(Some(1.0), 3, true)],
        ];
        let found = metrics(&groups, &["math".into()]);
        let expected = [
            ("reward", 6.0 / 5.0),
            ("reward_std", 2f64.sqrt() / 3.0),
            ("frac_reward_zero_std", 2.0 / 3.0),
            ("rewards/math/mean", 0.6),
            ("rewards/math/scored", 5.0 / 6.0),
            ("completions/mean_length", 4.0),
            ("completions/mean_terminated_length", 18.0 / 5.0),
            ("completions/clipped_ratio", 1.0 / 6.0),
        ];
        for (name, value) in expected {
            // A mean of a few numbers is off by some units of 2⁻⁵³.
            assert!((found.get(name).unwrap() - value).abs() < 1e-12, "{name}: {found:?}");
        }
        assert_eq!(metrics(&[vec![completion(None, 1, true)]], &["math".into()]).get("reward"), None);
    }
}
