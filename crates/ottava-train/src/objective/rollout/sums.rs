//! Sums of a step of reinforcement learning over its tokens, and the metrics of these sums.

use super::policy::Policy;
use crate::step::Metrics;

/// A token whose loss counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownToken {
    /// Its place in the micro-batch.
    pub(super) at: usize,
    /// The number of its completion.
    pub(super) sample: usize,
    pub(super) drawn: f64,
    pub(super) old: f64,
    pub(super) reference: f64,
    pub(super) advantage: f64,
    pub(super) correction: f64,
    pub(super) weight: f64,
    pub(super) value: f64,
    pub(super) returns: f64,
}

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
    pub(super) value: ValueSums,
}

impl Sums {
    pub(super) fn numbers(&self) -> Vec<f64> {
        let Sums {
            losses,
            tokens,
            entropy,
            kl,
            clipped_low,
            clipped_high,
            difference,
            mult_error,
            correction,
            value,
            ..
        } = *self;
        let largest = self.largest_difference;
        let own = [losses, tokens, entropy, kl, clipped_low, clipped_high, difference, largest, mult_error, correction];
        own.into_iter().chain(value.numbers()).collect()
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
            value: ValueSums::from_numbers(numbers.get(10..).unwrap_or_default()),
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
        let correction = how.correction().map(|_| ("sampling/importance_sampling_ratio/mean", mean(self.correction)));
        let named = [
            ("entropy", mean(self.entropy)),
            ("clip_ratio/low_mean", mean(self.clipped_low)),
            ("clip_ratio/high_mean", mean(self.clipped_high)),
            ("sampling/sampling_logp_difference/mean", mean(self.difference)),
            ("sampling/sampling_logp_difference/max", self.largest_difference),
            ("token_mult_prob_error", mean(self.mult_error)),
        ];
        let of_values = how.value.map(|_| self.value.metrics(self.tokens)).into_iter().flatten();
        let named = named.into_iter().chain(kl).chain(correction).chain(of_values);
        Metrics::new(named, format!("entropy {:.3}", mean(self.entropy)))
    }
}

/// Sums over the tokens of a value head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ValueSums {
    /// The losses of values, each times the weight of its token.
    pub(super) losses: f64,
    weights: f64,
    /// Values at the draw.
    values: f64,
    returns: f64,
    squared_returns: f64,
    /// Returns minus values at the draw.
    errors: f64,
    squared_errors: f64,
}

impl ValueSums {
    /// The sums over `tokens`, with the losses of the values of all places of a micro-batch.
    pub(super) fn of(losses: &[f64], tokens: &[KnownToken]) -> ValueSums {
        let mut sums = ValueSums { losses: losses.iter().sum(), ..ValueSums::default() };
        for KnownToken { weight, value, returns, .. } in tokens {
            let error = returns - value;
            sums.weights += weight;
            sums.values += value;
            sums.returns += returns;
            sums.squared_returns += returns * returns;
            sums.errors += error;
            sums.squared_errors += error * error;
        }
        sums
    }

    fn numbers(self) -> [f64; 7] {
        let ValueSums { losses, weights, values, returns, squared_returns, errors, squared_errors } = self;
        [losses, weights, values, returns, squared_returns, errors, squared_errors]
    }

    /// Zeros where there are no numbers yet.
    fn from_numbers(numbers: &[f64]) -> ValueSums {
        let at = |i: usize| numbers.get(i).copied().unwrap_or(0.0);
        ValueSums {
            losses: at(0),
            weights: at(1),
            values: at(2),
            returns: at(3),
            squared_returns: at(4),
            errors: at(5),
            squared_errors: at(6),
        }
    }

    /// The metrics of a step with so many `tokens`. The explained variance is `1 - Var(R - V) / (Var(R) + 1e-5)`, as in verl.
    fn metrics(&self, tokens: f64) -> [(&'static str, f64); 4] {
        let mean = |sum: f64| sum / tokens.max(1.0);
        let variance = |sum: f64, squares: f64| (mean(squares) - mean(sum).powi(2)).max(0.0);
        let unexplained = variance(self.errors, self.squared_errors);
        let all = variance(self.returns, self.squared_returns);
        [
            ("value_loss", self.losses / self.weights.max(f64::MIN_POSITIVE)),
            ("explained_variance", 1.0 - unexplained / (all + 1e-5)),
            ("values/mean", mean(self.values)),
            ("returns/mean", mean(self.returns)),
        ]
    }
}
