//! Sums over the sequences of preferences, from which metrics are computed.

use super::how::Preference;
use crate::step::Metrics;

/// Sums over sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PreferenceSums {
    /// Losses, and their number: pairs, or sequences with labels.
    pub losses: [f64; 2],
    /// Chosen and rejected sequences.
    pub sequences: [f64; 2],
    /// Rewards of chosen and of rejected sequences.
    pub rewards: [f64; 2],
    /// Log-probabilities of chosen and of rejected sequences; of a reward model its scores, which no metric reads.
    pub log_probs: [f64; 2],
    /// Pairs whose chosen sequence has the higher reward, and all pairs.
    pub pairs: [f64; 2],
    /// Estimates of the divergence from the reference model, and their number, of sequences with labels.
    pub kl: [f64; 2],
    /// The lowest and the highest reward of a reward model.
    pub range: Option<[f64; 2]>,
}

impl PreferenceSums {
    /// The sums over one micro-batch: `values` as [`MicroBatchPreference`](super::MicroBatchPreference) returns them, whether each sequence is
    /// `chosen`, and `kl`, the estimate of the divergence from the reference model.
    pub fn of(how: &Preference, values: &[f64], chosen: &[bool], kl: f64) -> PreferenceSums {
        let (losses, rest) = values.split_at(chosen.len());
        let (policy, reference) = rest.split_at(chosen.len());
        let (each, is_score) = (how.sequences(), how.trains_reward_model());
        let reward = |s: usize| if is_score { policy[s] } else { how.beta * (policy[s] - reference[s]) };
        let mut sums = PreferenceSums { losses: [0.0, (chosen.len() / each) as f64], ..PreferenceSums::default() };
        for (s, is_chosen) in chosen.iter().enumerate() {
            let side = usize::from(!is_chosen);
            sums.losses[0] += losses[s];
            sums.sequences[side] += 1.0;
            sums.rewards[side] += reward(s);
            sums.log_probs[side] += policy[s];
            if each == 2 && *is_chosen {
                sums.pairs[0] += f64::from(reward(s) > reward(s + 1));
                sums.pairs[1] += 1.0;
            }
        }
        if each == 1 {
            sums.kl = [kl, 1.0];
        }
        if is_score {
            let all = [f64::INFINITY, f64::NEG_INFINITY];
            sums.range = Some(policy.iter().fold(all, |[low, high], &score| [low.min(score), high.max(score)]));
        }
        sums
    }

    /// All numbers, for [`PreferenceSums::from_numbers`].
    pub fn numbers(&self) -> Vec<f64> {
        let sums = [self.losses, self.sequences, self.rewards, self.log_probs, self.pairs, self.kl];
        sums.into_iter().chain(self.range).flatten().collect()
    }

    /// The sums with these numbers; zeros where they are missing.
    pub fn from_numbers(numbers: &[f64]) -> PreferenceSums {
        let pair = |i: usize| Some([*numbers.get(2 * i)?, *numbers.get(2 * i + 1)?]);
        let [losses, sequences, rewards, log_probs, pairs, kl] =
            [0, 1, 2, 3, 4, 5].map(|i| pair(i).unwrap_or_default());
        PreferenceSums { losses, sequences, rewards, log_probs, pairs, kl, range: pair(6) }
    }

    /// The sums over the sequences of both.
    pub fn merge(self, other: PreferenceSums) -> PreferenceSums {
        let sums: Vec<f64> = self.numbers().into_iter().zip(other.numbers()).map(|(a, b)| a + b).collect();
        let both = self.range.zip(other.range).map(|([a, b], [c, d])| [a.min(c), b.max(d)]);
        PreferenceSums { range: both.or(self.range).or(other.range), ..PreferenceSums::from_numbers(&sums) }
    }

    /// The names of the metrics of tuning by preferences, as in TRL.
    const TUNING: &[&str] = &[
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "kl",
    ];

    /// The names of the metrics of a reward model, as in TRL.
    const REWARDS: &[&str] = &["accuracy", "margin", "mean_reward", "min_reward", "max_reward"];

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.losses[0] / self.losses[1]
    }

    /// The metrics under TRL's names. A mean of zero sequences is left out. `words` has margin and accuracy.
    pub fn metrics(&self) -> Metrics {
        let mean = |sums: [f64; 2], side: usize| sums[side] / self.sequences[side];
        let [chosen, rejected] = [0, 1].map(|side| mean(self.rewards, side));
        let (accuracy, margin) = (self.pairs[0] / self.pairs[1], chosen - rejected);
        let rewards = (self.rewards[0] + self.rewards[1]) / (self.sequences[0] + self.sequences[1]);
        let log_probs = [0, 1].map(|side| mean(self.log_probs, side));
        let (names, values) = match self.range {
            None => {
                let kl = self.kl[0] / self.kl[1];
                let [of_chosen, of_rejected] = log_probs;
                (PreferenceSums::TUNING, vec![chosen, rejected, accuracy, margin, of_chosen, of_rejected, kl])
            }
            Some([low, high]) => (PreferenceSums::REWARDS, vec![accuracy, margin, rewards, low, high]),
        };
        let named = names.iter().copied().zip(values).filter(|(_, value)| value.is_finite());
        let metrics = Metrics::new(named, "");
        let shown = [
            ("reward margin", metrics.get("rewards/margins").or(metrics.get("margin"))),
            ("accuracy", metrics.get("rewards/accuracies").or(metrics.get("accuracy"))),
        ];
        let words = shown.into_iter().filter_map(|(name, value)| Some(format!("{name} {:.4}", value?)));
        Metrics { words: words.collect::<Vec<_>>().join("  "), ..metrics }
    }
}
