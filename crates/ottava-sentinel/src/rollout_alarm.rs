//! Alarms about the completions of reinforcement learning.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::fmt::{self, Display};

/// The bounds of the metrics of completions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RolloutBounds {
    /// The maximum `token_mult_prob_error`.
    pub mult_prob_error: f64,
    /// The minimum entropy, in nats per token.
    pub entropy: f64,
    /// The maximum share of completions that reach their greatest length.
    pub clipped_ratio: f64,
    /// The maximum share of groups whose rewards are all equal.
    pub zero_std_ratio: f64,
    /// The number of steps whose mean reward must be above the mean reward of as many earlier steps; 0 disables this alarm.
    pub plateau_steps: usize,
}

/// The memory of the alarms about completions between steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RolloutHistory {
    /// The alarms that were raised and whose metric has been beyond its bound since then.
    raised: BTreeSet<RolloutAlarm>,
    /// The mean rewards of the last steps. It has at most twice `plateau_steps` entries.
    rewards: VecDeque<f64>,
}

/// An alarm about completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutAlarm {
    /// Draws and training steps compute different probabilities.
    RolloutMismatch,
    /// Almost all draws are the same.
    EntropyCollapse,
    /// Completions do not end by themselves.
    LengthGrowth,
    /// Rewards do not differ within groups.
    NoSignal,
    /// The reward no longer grows.
    RewardPlateau,
}

impl RolloutAlarm {
    /// Returns the name under which the alarm is recorded.
    pub fn as_str(self) -> &'static str {
        match self {
            RolloutAlarm::RolloutMismatch => "rollout_mismatch",
            RolloutAlarm::EntropyCollapse => "entropy_collapse",
            RolloutAlarm::LengthGrowth => "length_growth",
            RolloutAlarm::NoSignal => "no_signal",
            RolloutAlarm::RewardPlateau => "reward_plateau",
        }
    }
}

/// A metric beyond its bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RolloutFinding {
    /// The alarm that was raised.
    pub alarm: RolloutAlarm,
    /// The value of the metric.
    pub value: f64,
    /// The bound of the metric.
    pub bound: f64,
}

impl Display for RolloutFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RolloutFinding { alarm, value, bound } = self;
        match alarm {
            RolloutAlarm::RolloutMismatch => write!(
                f,
                "the probabilities of draws and of steps differ by a factor of {value:.3} in the mean, more than {bound}: steps learn \
                 from completions of another policy; `reinforcement.correction.mode` limits the effect, and a recipe with less difference removes it"
            ),
            RolloutAlarm::EntropyCollapse => write!(
                f,
                "the entropy is {value:.4} nats per token, less than {bound}: almost all completions of a prompt are the same"
            ),
            RolloutAlarm::LengthGrowth => write!(
                f,
                "{:.1} % of the completions reach `max_completion_length`, more than {:.1} %: raise it, or reward shorter completions",
                100.0 * value,
                100.0 * bound
            ),
            RolloutAlarm::NoSignal => write!(
                f,
                "in {:.1} % of the groups all rewards are equal, more than {:.1} %: nothing is learned from them; the prompts are too easy or too hard",
                100.0 * value,
                100.0 * bound
            ),
            RolloutAlarm::RewardPlateau => {
                write!(
                    f,
                    "the mean reward is {value:.4}, and was {bound:.4} in as many steps before: it no longer grows"
                )
            }
        }
    }
}

/// A detector of metrics of completions that are beyond their bounds.
#[derive(Clone, Debug)]
pub struct RolloutDetector {
    bounds: RolloutBounds,
    history: RolloutHistory,
}

impl RolloutDetector {
    /// Makes a detector that continues from `history`.
    pub fn new(bounds: RolloutBounds, history: RolloutHistory) -> RolloutDetector {
        RolloutDetector { bounds, history }
    }

    /// Returns the memory of the detector.
    pub fn history(&self) -> &RolloutHistory {
        &self.history
    }

    /// Returns the alarms that a step raises. Metrics have the names of TRL and NeMo-RL, and `metric` returns `None` for a metric that the step does
    /// not report. An alarm is raised when its metric leaves the bound. It is raised again only after the metric has returned.
    pub fn see(&mut self, metric: impl Fn(&str) -> Option<f64>) -> Vec<RolloutFinding> {
        let RolloutBounds { mult_prob_error, entropy, clipped_ratio, zero_std_ratio, .. } = self.bounds;
        let above = |alarm, name: &str, bound: f64| metric(name).map(|value| (alarm, value, bound, value > bound));
        let below = |alarm, name: &str, bound: f64| metric(name).map(|value| (alarm, value, bound, value < bound));
        let seen = [
            above(RolloutAlarm::RolloutMismatch, "token_mult_prob_error", mult_prob_error),
            below(RolloutAlarm::EntropyCollapse, "entropy", entropy),
            above(RolloutAlarm::LengthGrowth, "completions/clipped_ratio", clipped_ratio),
            above(RolloutAlarm::NoSignal, "frac_reward_zero_std", zero_std_ratio),
            metric("reward").and_then(|reward| self.plateau(reward)),
        ];
        let mut found = Vec::new();
        for (alarm, value, bound, is_out) in seen.into_iter().flatten() {
            match is_out {
                true if self.history.raised.insert(alarm) => found.push(RolloutFinding { alarm, value, bound }),
                true => {}
                false => drop(self.history.raised.remove(&alarm)),
            }
        }
        found
    }

    /// Compares the mean of the last rewards with the mean of the rewards before them, if there are enough rewards.
    fn plateau(&mut self, reward: f64) -> Option<(RolloutAlarm, f64, f64, bool)> {
        let steps = self.bounds.plateau_steps;
        let rewards = &mut self.history.rewards;
        rewards.push_back(reward);
        rewards.drain(..rewards.len().saturating_sub(2 * steps));
        if steps == 0 || rewards.len() < 2 * steps {
            return None;
        }
        let mean = |of: std::ops::Range<usize>| rewards.range(of).sum::<f64>() / steps as f64;
        let (before, now) = (mean(0..steps), mean(steps..2 * steps));
        Some((RolloutAlarm::RewardPlateau, now, before, now <= before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: RolloutBounds = RolloutBounds {
        mult_prob_error: 1.2,
        entropy: 0.01,
        clipped_ratio: 0.9,
        zero_std_ratio: 0.95,
        plateau_steps: 2,
    };

    fn names(found: &[RolloutFinding]) -> Vec<&'static str> {
        found.iter().map(|finding| finding.alarm.as_str()).collect()
    }

    #[test]
    fn a_metric_out_of_its_bound_is_named_once() {
        let mut detector = RolloutDetector::new(BOUNDS, RolloutHistory::default());
        let mut see = |metrics: &[(&str, f64)]| {
            names(&detector.see(|name| metrics.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)))
        };
        assert!(see(&[("token_mult_prob_error", 1.2), ("entropy", 0.01), ("frac_reward_zero_std", 0.95)]).is_empty());
        let bad = [
            ("token_mult_prob_error", 1.3),
            ("entropy", 0.001),
            ("completions/clipped_ratio", 1.0),
            ("frac_reward_zero_std", 1.0),
        ];
        assert_eq!(see(&bad), ["rollout_mismatch", "entropy_collapse", "length_growth", "no_signal"]);
        assert!(see(&bad).is_empty(), "each alarm is raised once");
        assert!(see(&[("entropy", 0.5)]).is_empty());
        assert_eq!(see(&bad), ["entropy_collapse"], "the entropy had come back");
    }

    #[test]
    fn a_reward_that_no_longer_grows_is_named() {
        let mut detector = RolloutDetector::new(BOUNDS, RolloutHistory::default());
        let rewards = [0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.3];
        let found: Vec<_> =
            rewards.iter().map(|reward| names(&detector.see(|name| (name == "reward").then_some(*reward)))).collect();
        // The means of two steps are 0.15 and 0.35, then 0.25 and 0.4, then 0.35 and 0.35, and then the later mean is smaller.
        assert_eq!(found.iter().position(|names| !names.is_empty()), Some(5));
        assert_eq!(found[5], ["reward_plateau"]);
        assert!(found[6].is_empty());
        // A resumed run continues from the saved history.
        let saved = serde_json::to_value(detector.history()).unwrap();
        let mut resumed = RolloutDetector::new(BOUNDS, serde_json::from_value(saved).unwrap());
        assert!(resumed.see(|name| (name == "reward").then_some(0.2)).is_empty());
    }
}
