//! Sums over the sequences of preferences, from which metrics are computed.

use super::how::Preference;
use crate::step::Metrics;
use ottava_tensor::ops::{PreferenceLoss, log_odds};

/// What is known of the sequences of a micro-batch besides their log-probabilities.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// Whether each is chosen, or desirable.
    pub chosen: &'a [bool],
    /// Their numbers of target tokens.
    pub lengths: &'a [f64],
    /// The estimate of the divergence from the reference model.
    pub kl: f64,
}

/// Sums over sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PreferenceSums {
    /// Losses, and their number: pairs, or sequences with labels.
    pub losses: [f64; 2],
    /// Chosen and rejected sequences.
    pub sequences: [f64; 2],
    /// Rewards of chosen and of rejected sequences.
    pub rewards: [f64; 2],
    /// Log-probabilities of chosen and of rejected sequences, or the means of their tokens, as rewards are; of a reward model its scores, which no
    /// metric reads.
    pub log_probs: [f64; 2],
    /// Pairs whose chosen sequence has the higher reward, and all pairs.
    pub pairs: [f64; 2],
    /// Estimates of the divergence from the reference model, and their number, of sequences with labels.
    pub kl: [f64; 2],
    /// Negative log-likelihoods of the chosen tokens of micro-batches, each times its pairs, and the pairs of the losses that have them.
    pub nll: [f64; 2],
    /// Logarithms of the odds ratios of pairs, and of their logistic function.
    pub odds: [f64; 2],
    /// The lowest and the highest reward of a reward model.
    pub range: Option<[f64; 2]>,
}

impl PreferenceSums {
    /// The sums over one micro-batch: `values` as [`MicroBatchPreference`](super::MicroBatchPreference) returns them.
    pub fn of(how: &Preference, values: &[f64], Sequences { chosen, lengths, kl }: &Sequences) -> PreferenceSums {
        let (losses, rest) = values.split_at(chosen.len());
        let (policy, reference) = rest.split_at(chosen.len());
        let (each, is_score) = (how.sequences(), how.trains_reward_model());
        let divisor = |s: usize| if how.has_rewards_of_means() { lengths[s] } else { 1.0 };
        let reward = |s: usize| match is_score {
            true => policy[s],
            false => how.beta * (policy[s] - reference[s]) / divisor(s),
        };
        let mut sums = PreferenceSums { losses: [0.0, (chosen.len() / each) as f64], ..PreferenceSums::none(how) };
        for (s, is_chosen) in chosen.iter().enumerate() {
            let side = usize::from(!is_chosen);
            sums.losses[0] += losses[s];
            sums.sequences[side] += 1.0;
            sums.rewards[side] += reward(s);
            sums.log_probs[side] += policy[s] / divisor(s);
            if each == 2 && *is_chosen {
                sums.pairs[0] += f64::from(reward(s) > reward(s + 1));
                sums.pairs[1] += 1.0;
            }
        }
        if each == 1 {
            sums.kl = [*kl, 1.0];
        }
        let pairs = || (0..chosen.len()).step_by(2);
        if how.has(PreferenceLoss::Sft) {
            let nll = -pairs().map(|s| policy[s]).sum::<f64>() / pairs().map(|s| lengths[s]).sum::<f64>();
            sums.nll = [nll * sums.pairs[1], sums.pairs[1]];
        }
        if how.has(PreferenceLoss::OddsRatio) {
            for s in pairs() {
                let apart = log_odds(policy[s] / lengths[s]) - log_odds(policy[s + 1] / lengths[s + 1]);
                sums.odds[0] += apart;
                sums.odds[1] -= (-apart).max(0.0) + (-apart.abs()).exp().ln_1p();
            }
        }
        if is_score {
            let range = |[low, high]: [f64; 2]| {
                policy.iter().fold([low, high], |[low, high], &score| [low.min(score), high.max(score)])
            };
            sums.range = sums.range.map(range);
        }
        sums
    }

    /// The sums over no sequences.
    pub fn none(how: &Preference) -> PreferenceSums {
        let range = how.trains_reward_model().then_some([f64::INFINITY, f64::NEG_INFINITY]);
        PreferenceSums { range, ..PreferenceSums::default() }
    }

    /// All numbers, for [`PreferenceSums::from_numbers`].
    pub fn numbers(&self) -> Vec<f64> {
        let PreferenceSums { losses, sequences, rewards, log_probs, pairs, kl, nll, odds, .. } = *self;
        let sums = [losses, sequences, rewards, log_probs, pairs, kl, nll, odds];
        sums.into_iter().chain(self.range).flatten().collect()
    }

    /// The sums with these numbers; zeros where they are missing.
    pub fn from_numbers(numbers: &[f64]) -> PreferenceSums {
        let pair = |i: usize| Some([*numbers.get(2 * i)?, *numbers.get(2 * i + 1)?]);
        let [losses, sequences, rewards, log_probs, pairs, kl, nll, odds] =
            [0, 1, 2, 3, 4, 5, 6, 7].map(|i| pair(i).unwrap_or_default());
        PreferenceSums { losses, sequences, rewards, log_probs, pairs, kl, nll, odds, range: pair(8) }
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
        "nll_loss",
        "log_odds_chosen",
        "log_odds_ratio",
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
                let [kl, nll] = [self.kl, self.nll].map(|[sum, count]| sum / count);
                // The logarithm of a logistic function is below 0: a sum of 0 has no terms.
                let [apart, ratio] =
                    self.odds.map(|sum| if self.odds[1] == 0.0 { f64::NAN } else { sum / self.pairs[1] });
                let [of_chosen, of_rejected] = log_probs;
                let values = [chosen, rejected, accuracy, margin, of_chosen, of_rejected, kl, nll, apart, ratio];
                (PreferenceSums::TUNING, values.to_vec())
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
