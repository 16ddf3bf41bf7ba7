//! The loss of a micro-batch, in the form that the program of a step needs.

use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::param::Units;
use ottava_tensor::Tensor;
use ottava_tensor::ops::IGNORE_INDEX;
use std::any::Any;
use std::borrow::Cow;

/// The loss of a micro-batch, with the tensors that it reads besides token ids and targets.
///
/// Each replay of a captured step reads the same tensors, so [`TrainStep::loss_mut`](super::TrainStep::loss_mut) overwrites them in place.
pub trait Loss: Any {
    /// Returns the number of losses in a micro-batch of `tokens` tokens, including ignored losses. Backward divides by the total over micro-batches.
    fn units(&self, tokens: usize) -> usize;

    /// Returns the number of losses that are not ignored in a micro-batch with these `targets`, by default the number of targets that are not
    /// [`IGNORE_INDEX`]. The update multiplies by units / counted losses, so the step descends the mean of the counted losses.
    fn counted(&self, targets: &[i32]) -> usize {
        targets.iter().filter(|&&target| target != IGNORE_INDEX).count()
    }

    /// Returns the number of values that [`Loss::losses_and_gradient`] returns for `tokens` tokens, by default one per token.
    fn values(&self, tokens: usize) -> usize {
        tokens
    }

    /// Computes the [`values`](Loss::values) of the micro-batch, and the gradient `[T, C]` of `scale · Σ losses` by `normed`. `normed` `[T, C]` is
    /// the result of forward, `targets` is `[T]`, and `scale` `[1]` is on the device. Adds to the gradient of the head's weight.
    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)>;

    /// Computes what passes without gradients return for the micro-batch: by default the losses `[T]` of the tokens.
    fn evaluated(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        units: &mut dyn Units,
    ) -> Result<Tensor> {
        model.losses(normed, targets, units)
    }

    /// Adds the `values` of this micro-batch to `sums`, which is empty before the first micro-batch. The first sum is the sum of the losses.
    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>>;

    /// Merges the sums of a rank or of a micro-batch into `sums`, which is empty before the first merge. A loss overrides this method if one of its
    /// numbers is not a sum, such as a maximum.
    fn merge(&self, sums: Vec<f64>, others: &[f64]) -> Vec<f64> {
        others.iter().enumerate().map(|(i, other)| sums.get(i).copied().unwrap_or_default() + other).collect()
    }

    /// Returns the metrics of a step with these merged sums, without the loss. By default there are none.
    fn metrics(&self, _sums: &[f64]) -> Metrics {
        Metrics::default()
    }
}

/// The metrics that an objective reports for a step or an evaluation, besides the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// The numbers in their order, with the names under which they are recorded.
    pub named: Vec<(Cow<'static, str>, f64)>,
    /// The most important numbers in words, for a line of the log.
    pub words: String,
}

impl Metrics {
    /// Makes metrics from numbers by name, and the most important numbers in words.
    pub fn new<N: Into<Cow<'static, str>>>(
        named: impl IntoIterator<Item = (N, f64)>,
        words: impl Into<String>,
    ) -> Metrics {
        Metrics { named: named.into_iter().map(|(name, value)| (name.into(), value)).collect(), words: words.into() }
    }

    /// Returns the number of this name, if it exists.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.named.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    /// Returns these metrics, followed by `others`.
    pub fn and(mut self, others: Metrics) -> Metrics {
        self.named.extend(others.named);
        let words = [self.words, others.words].into_iter().filter(|words| !words.is_empty());
        Metrics { named: self.named, words: words.collect::<Vec<_>>().join("  ") }
    }
}

/// The loss of the next token: the cross entropy of each token, computed by the head of the model.
pub struct NextTokenLoss;

impl Loss for NextTokenLoss {
    fn units(&self, tokens: usize) -> usize {
        tokens
    }

    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        model.losses_and_gradient(normed, targets, scale, units)
    }

    /// Adds token by token, so the sum does not depend on how tokens are divided into micro-batches.
    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        let before = sums.first().copied().unwrap_or_default();
        Ok(vec![values.iter().fold(before, |sum, loss| sum + loss)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_rows_come_before_metrics_of_the_loss() {
        let of = |name: &'static str, words: &str| Metrics::new([(name, 1.0)], words);
        let both = of("reward", "reward 1").and(of("kl", "kl 1"));
        assert_eq!(both.named, [("reward".into(), 1.0), ("kl".into(), 1.0)]);
        assert_eq!(both.words, "reward 1  kl 1");
        assert_eq!(Metrics::default().and(of("kl", "kl 1")), of("kl", "kl 1"));
    }

    #[test]
    fn sums_of_ranks_add_up() {
        assert_eq!(NextTokenLoss.merge(Vec::new(), &[3.0, 1.0]), [3.0, 1.0]);
        assert_eq!(NextTokenLoss.merge(vec![3.0, 1.0], &[0.5, 2.0]), [3.5, 3.0]);
    }
}
