//! Metrics over the items of a task.

use crate::kind::TaskType;
use serde::{Deserialize, Serialize};

/// A metric, with the name and the definition of lm-evaluation-harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricName {
    /// The share of items with a right likeliest choice.
    Acc,
    /// Like `acc`, with log-likelihoods divided by the number of characters of the choice.
    AccNorm,
    /// Like `acc`, with log-likelihoods divided by the number of bytes of the choice.
    AccBytes,
    /// The share of texts that equal a right answer.
    ExactMatch,
    /// `e` to the negative log-likelihood per word, where words are separated by white space.
    WordPerplexity,
    /// `e` to the negative log-likelihood per byte.
    BytePerplexity,
    /// The negative log-likelihood per byte, in bits.
    BitsPerByte,
}

/// How the numbers of items become a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aggregation {
    /// The mean.
    Mean,
    /// `e` to the negative quotient of the sums.
    Perplexity,
    /// The negative quotient of the sums, in bits.
    Bits,
}

/// The number of an item for a metric: a value and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OfItem {
    /// A score, or a log-likelihood in nats.
    pub(crate) value: f64,
    /// 1, or the number of words or bytes.
    pub(crate) weight: f64,
}

/// The value of a metric over all items.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The name of the metric.
    pub name: &'static str,
    /// The value.
    pub value: f64,
    /// The standard error of the mean over items; `None` for a metric that is no mean, and for a single item.
    pub stderr: Option<f64>,
    /// Whether a higher value is better.
    pub higher_is_better: bool,
}

impl MetricName {
    /// All metrics.
    pub const ALL: [MetricName; 7] = [
        MetricName::Acc,
        MetricName::AccNorm,
        MetricName::AccBytes,
        MetricName::ExactMatch,
        MetricName::WordPerplexity,
        MetricName::BytePerplexity,
        MetricName::BitsPerByte,
    ];

    /// Returns the name, the type of tasks that have the metric, and the aggregation.
    const fn properties(self) -> (&'static str, TaskType, Aggregation) {
        use TaskType::{GenerateUntil, LoglikelihoodRolling, MultipleChoice};
        match self {
            MetricName::Acc => ("acc", MultipleChoice, Aggregation::Mean),
            MetricName::AccNorm => ("acc_norm", MultipleChoice, Aggregation::Mean),
            MetricName::AccBytes => ("acc_bytes", MultipleChoice, Aggregation::Mean),
            MetricName::ExactMatch => ("exact_match", GenerateUntil, Aggregation::Mean),
            MetricName::WordPerplexity => ("word_perplexity", LoglikelihoodRolling, Aggregation::Perplexity),
            MetricName::BytePerplexity => ("byte_perplexity", LoglikelihoodRolling, Aggregation::Perplexity),
            MetricName::BitsPerByte => ("bits_per_byte", LoglikelihoodRolling, Aggregation::Bits),
        }
    }

    /// Returns the name of the metric.
    pub const fn as_str(self) -> &'static str {
        self.properties().0
    }

    /// Returns the type of tasks that have the metric.
    pub const fn kind(self) -> TaskType {
        self.properties().1
    }

    /// Returns whether a higher value is better.
    pub fn higher_is_better(self) -> bool {
        self.properties().2 == Aggregation::Mean
    }

    /// Returns the value of the metric over one or more items.
    pub(crate) fn over(self, items: &[OfItem]) -> Measured {
        let (name, _, aggregation) = self.properties();
        let sum = |of: fn(&OfItem) -> f64| items.iter().map(of).sum::<f64>();
        let mean = sum(|item| item.value) / sum(|item| item.weight);
        let (value, stderr) = match aggregation {
            Aggregation::Mean => (mean, standard_error(items, mean)),
            Aggregation::Perplexity => ((-mean).exp(), None),
            Aggregation::Bits => (-mean / std::f64::consts::LN_2, None),
        };
        Measured { name, value, stderr, higher_is_better: self.higher_is_better() }
    }
}

/// Returns the sample standard deviation divided by the root of the number of items.
fn standard_error(items: &[OfItem], mean: f64) -> Option<f64> {
    let count = items.len() as f64;
    let squares: f64 = items.iter().map(|item| (item.value - mean).powi(2)).sum();
    (items.len() > 1).then(|| (squares / (count - 1.0)).sqrt() / count.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_have_standard_errors_and_perplexities_have_weights() {
        let items: Vec<_> = [1.0, 0.0, 0.0, 1.0, 1.0].map(|value| OfItem { value, weight: 1.0 }).to_vec();
        let acc = MetricName::Acc.over(&items);
        // statistics.stdev([1, 0, 0, 1, 1]) / math.sqrt(5)
        assert!((acc.stderr.unwrap() - 0.244_948_974_278_317_8).abs() < 1e-15, "{acc:?}");
        assert_eq!((acc.value, MetricName::Acc.over(&items[..1]).stderr), (0.6, None));
        let texts = [OfItem { value: -8.0, weight: 3.0 }, OfItem { value: -2.0, weight: 7.0 }];
        assert_eq!(MetricName::WordPerplexity.over(&texts).value, 1f64.exp());
        assert_eq!(MetricName::BitsPerByte.over(&texts).value, std::f64::consts::LOG2_E);
    }
}
