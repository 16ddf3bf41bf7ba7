//! The weighted sum of several rewards.

use crate::deadline::Deadline;
use crate::reward::{Reward, Scores};
use crate::sample::Sample;
use ottava_common::{Error, Result};
use std::collections::BTreeMap;

/// A reward in a sum.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) weight: f64,
    pub(crate) reward: Box<dyn Reward>,
}

/// Several rewards, added by weight.
pub struct Rewards {
    parts: Vec<Part>,
}

/// The scores of a batch by all rewards.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The weighted sum of each sample's scores; a reward without an opinion adds nothing. `None` if no reward has an opinion.
    pub totals: Vec<Option<f64>>,
    /// The scores of each reward, without its weight, in the order of the settings.
    pub by_reward: Vec<(String, Vec<Option<f64>>)>,
    /// Of each reward NAME: `rewards/NAME/mean` and `rewards/NAME/std` over the samples that it scored, `rewards/NAME/scored`, their share, and
    /// `rewards/NAME/metrics/METRIC` for each metric that it returned. The standard deviation divides by n - 1, and is 0 for one sample. Without a
    /// scored sample, there is neither mean nor standard deviation.
    pub metrics: BTreeMap<String, f64>,
}

impl Rewards {
    pub(crate) fn new(parts: Vec<Part>) -> Rewards {
        Rewards { parts }
    }

    /// Scores a batch by every reward, one after another.
    ///
    /// Errors with the name and the error of the first reward that fails (see [`Reward::score`]), and with [`Error::NonFinite`] if a sum is too large.
    pub fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scored> {
        let mut scored = Scored { totals: vec![None; samples.len()], by_reward: Vec::new(), metrics: BTreeMap::new() };
        for Part { name, weight, reward } in &mut self.parts {
            let Scores { rewards, metrics } = reward.score(samples, deadline).map_err(|error| named(name, error))?;
            assert_eq!(rewards.len(), samples.len(), "a reward scores each sample");
            for (total, reward) in scored.totals.iter_mut().zip(&rewards) {
                if let Some(reward) = reward {
                    *total.get_or_insert(0.0) += *weight * reward;
                }
            }
            scored.metrics.extend(statistics(&rewards).map(|(what, value)| (format!("rewards/{name}/{what}"), value)));
            let own = metrics.into_iter().map(|(metric, value)| (format!("rewards/{name}/metrics/{metric}"), value));
            scored.metrics.extend(own);
            scored.by_reward.push((name.clone(), rewards));
        }
        match scored.totals.iter().position(|total| total.is_some_and(|total| !total.is_finite())) {
            Some(at) => {
                let place = samples[at].place();
                Err(Error::NonFinite(format!("the sum of the rewards of {place} is too large; lower their weights")))
            }
            None => Ok(scored),
        }
    }
}

/// `error` with the name of its reward; a request to stop is not the reward's.
fn named(name: &str, error: Error) -> Error {
    match error {
        Error::External(words) => Error::External(format!("reward `{name}`: {words}")),
        Error::Data(words) => Error::Data(format!("reward `{name}`: {words}")),
        error => error,
    }
}

/// Share of scored samples, mean and standard deviation.
fn statistics(rewards: &[Option<f64>]) -> impl Iterator<Item = (&'static str, f64)> {
    let scored: Vec<f64> = rewards.iter().copied().flatten().collect();
    let count = scored.len() as f64;
    let mean = scored.iter().sum::<f64>() / count;
    let squares: f64 = scored.iter().map(|reward| (reward - mean).powi(2)).sum();
    let share = ("scored", count / rewards.len().max(1) as f64);
    let moments = [("mean", mean), ("std", (squares / (count - 1.0).max(1.0)).sqrt())];
    std::iter::once(share).chain(moments.into_iter().filter(move |_| count > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Prompt;
    use serde_json::Map;

    struct Fixed(Vec<Option<f64>>);

    impl Reward for Fixed {
        fn score(&mut self, _: &[Sample], _: Deadline) -> Result<Scores> {
            Ok(Scores { rewards: self.0.clone(), metrics: BTreeMap::from([("depth".into(), 2.0)]) })
        }
    }

    struct Failing(fn() -> Error);

    impl Reward for Failing {
        fn score(&mut self, _: &[Sample], _: Deadline) -> Result<Scores> {
            Err(self.0())
        }
    }

    fn score(parts: Vec<(&str, f64, Box<dyn Reward>)>) -> Result<Scored> {
        let (prompt, record) = (Prompt::Text("p".into()), Map::new());
        let sample = Sample {
            prompt: &prompt,
            completion: "c",
            completion_ids: &[],
            model_scores: &[],
            truncated: false,
            group: 0,
            index: 0,
            step: 0,
            environment: None,
            record: &record,
        };
        let parts = parts.into_iter().map(|(name, weight, reward)| Part { name: name.into(), weight, reward });
        Rewards::new(parts.collect()).score(&[sample; 3], Deadline::never())
    }

    #[test]
    fn sums_leave_out_what_has_no_opinion() {
        let parts: Vec<(_, _, Box<dyn Reward>)> = vec![
            ("a", 2.0, Box::new(Fixed(vec![Some(1.0), Some(0.0), None]))),
            ("b", -0.5, Box::new(Fixed(vec![Some(4.0), None, None]))),
            ("c", 1.0, Box::new(Fixed(vec![None; 3]))),
        ];
        let scored = score(parts).unwrap();
        assert_eq!(scored.totals, [Some(0.0), Some(0.0), None]);
        assert_eq!(scored.by_reward[1], ("b".to_string(), vec![Some(4.0), None, None]));
        let metric = |name: &str| scored.metrics.get(name).copied();
        assert_eq!((metric("rewards/a/mean"), metric("rewards/a/scored")), (Some(0.5), Some(2.0 / 3.0)));
        assert_eq!((metric("rewards/a/std"), metric("rewards/b/std")), (Some(0.5f64.sqrt()), Some(0.0)));
        assert_eq!((metric("rewards/c/scored"), metric("rewards/c/mean")), (Some(0.0), None));
        assert_eq!(metric("rewards/a/metrics/depth"), Some(2.0));
    }

    #[test]
    fn a_sum_that_is_too_large_is_an_error() {
        let huge = || Box::new(Fixed(vec![None, Some(f64::MAX), None]));
        let error = score(vec![("a", 1.0, huge()), ("b", 1.0, huge())]).unwrap_err();
        assert!(matches!(&error, Error::NonFinite(words) if words.contains("completion 0 of prompt 0")), "{error}");
    }

    #[test]
    fn errors_name_the_reward_and_keep_their_kind() {
        let failing = |error| score(vec![("style", 1.0, Box::new(Failing(error)))]).unwrap_err();
        assert_eq!(failing(|| Error::External("it fell".into())).to_string(), "reward `style`: it fell");
        assert!(matches!(failing(|| Error::Cancelled("stop".into())), Error::Cancelled(words) if words == "stop"));
    }
}
