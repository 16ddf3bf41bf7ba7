//! Sums of a step of reinforcement learning over its tokens, and the metrics of these sums.

use super::loss::Policy;
use crate::step::Metrics;

/// Sums over tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) losses: f64,
    pub(super) tokens: f64,
    /// Entropies of the distributions of tokens, or minus log-probabilities by the sampler, which are estimates of them.
    pub(super) entropy: f64,
    pub(super) kl: f64,
    pub(super) clipped_low: f64,
    pub(super) clipped_high: f64,
    /// Absolute differences between the log-probabilities of the step and of the draw.
    pub(super) difference: f64,
    pub(super) largest_difference: f64,
    pub(super) mult_error: f64,
    pub(super) correction: f64,
}

impl Sums {
    pub(super) fn numbers(&self) -> Vec<f64> {
        let Sums { losses, tokens, entropy, kl, clipped_low, clipped_high, difference, mult_error, correction, .. } =
            *self;
        let largest = self.largest_difference;
        vec![losses, tokens, entropy, kl, clipped_low, clipped_high, difference, largest, mult_error, correction]
    }

    /// Zeros where there are no numbers yet.
    pub(super) fn from_numbers(numbers: &[f64]) -> Sums {
        let at = |i: usize| numbers.get(i).copied().unwrap_or(0.0);
        Sums {
            losses: at(0),
            tokens: at(1),
            entropy: at(2),
            kl: at(3),
            clipped_low: at(4),
            clipped_high: at(5),
            difference: at(6),
            largest_difference: at(7),
            mult_error: at(8),
            correction: at(9),
        }
    }

    pub(super) fn merge(&self, other: &Sums) -> Sums {
        let largest_difference = self.largest_difference.max(other.largest_difference);
        let (mine, others) = (self.numbers(), other.numbers());
        let added: Vec<f64> = mine.iter().zip(others).map(|(a, b)| a + b).collect();
        Sums { largest_difference, ..Sums::from_numbers(&added) }
    }

    /// Under the names of TRL; `token_mult_prob_error` is NeMo-RL's.
    pub(super) fn metrics(&self, how: &Policy) -> Metrics {
        let mean = |sum: f64| sum / self.tokens.max(1.0);
        let kl = (how.loss.beta > 0.0).then(|| ("kl", mean(self.kl)));
        let correction =
            how.correction.is_on().then(|| ("sampling/importance_sampling_ratio/mean", mean(self.correction)));
        let named = [
            ("entropy", mean(self.entropy)),
            ("clip_ratio/low_mean", mean(self.clipped_low)),
            ("clip_ratio/high_mean", mean(self.clipped_high)),
            ("sampling/sampling_logp_difference/mean", mean(self.difference)),
            ("sampling/sampling_logp_difference/max", self.largest_difference),
            ("token_mult_prob_error", mean(self.mult_error)),
        ];
        Metrics::new(named.into_iter().chain(kl).chain(correction), format!("entropy {:.3}", mean(self.entropy)))
    }
}
