//! The metrics of a classifier, from scores and labels.

use crate::step::Metrics;
use crate::step::host::values;
use ottava_common::error::{Error, Result};
use ottava_settings::ProblemType;
use ottava_tensor::ops::label_loss;
use ottava_tensor::{Device, Tensor};

/// The metrics of texts.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelMetrics {
    /// The mean loss of a text.
    pub loss: f64,
    /// `accuracy` and macro `f1`, as scikit-learn computes them, or `mse` and `pearson`.
    pub metrics: Metrics,
}

impl LabelMetrics {
    /// Returns the metrics of texts with these `scores` and `labels`, `[L]` each.
    ///
    /// Errors with [`Error::NonFinite`] if the loss is infinite or NaN. Panics without texts, which the caller must exclude.
    pub fn of(problem: ProblemType, scores: &[Vec<f64>], labels: &[Vec<f64>]) -> Result<LabelMetrics> {
        let shape = [scores.len(), scores[0].len()];
        let tensor = |rows: &[Vec<f64>]| Tensor::from_slice(&Device::Cpu, &shape, &rows.concat());
        let rows: Vec<i32> = (0..scores.len() as i32).collect();
        let targets = Tensor::from_slice(&Device::Cpu, &[rows.len()], &rows)?;
        let one = Tensor::from_slice(&Device::Cpu, &[1], &[1.0])?;
        let losses = label_loss(problem.loss(), &mut tensor(scores)?, &targets, &tensor(labels)?, &one)?;
        let loss = values(&losses)?.iter().sum::<f64>() / scores.len() as f64;
        if !loss.is_finite() {
            return Err(Error::NonFinite(format!(
                "the loss of the labels is {loss}: the model's weights or activations are not finite"
            )));
        }
        let metrics = match problem {
            ProblemType::Regression => errors(scores, labels),
            _ => hits(problem, scores, labels),
        };
        Ok(LabelMetrics { loss, metrics })
    }
}

/// Returns the labels that the scores of a text predict: the label with the highest score, or each label with a probability above 1/2.
pub fn predicted(problem: ProblemType, scores: &[f64]) -> Vec<bool> {
    match problem {
        ProblemType::SingleLabelClassification => {
            let best = (0..scores.len()).fold(0, |best, label| if scores[label] > scores[best] { label } else { best });
            (0..scores.len()).map(|label| label == best).collect()
        }
        _ => scores.iter().map(|&score| score > 0.0).collect(),
    }
}

/// Returns the share of the texts whose labels are all right, and the mean of the F1 scores of labels. With one label per text, the mean is over the
/// labels that a text has or that are predicted.
fn hits(problem: ProblemType, scores: &[Vec<f64>], labels: &[Vec<f64>]) -> Metrics {
    let count = scores[0].len();
    // Predicted and right, predicted, and right.
    let mut counts = vec![[0.0; 3]; count];
    let mut exact = 0;
    for (scores, labels) in scores.iter().zip(labels) {
        let (predicted, true_labels) = (predicted(problem, scores), labels.iter().map(|&label| label > 0.5));
        let pairs: Vec<(bool, bool)> = predicted.into_iter().zip(true_labels).collect();
        exact += usize::from(pairs.iter().all(|(predicted, is_true)| predicted == is_true));
        for (counts, &(predicted, is_true)) in counts.iter_mut().zip(&pairs) {
            for (count, holds) in counts.iter_mut().zip([predicted && is_true, predicted, is_true]) {
                *count += f64::from(u8::from(holds));
            }
        }
    }
    let is_counted = |[_, predicted, is_true]: &&[f64; 3]| {
        problem == ProblemType::MultiLabelClassification || predicted + is_true > 0.0
    };
    let counted: Vec<_> = counts.iter().filter(is_counted).collect();
    let f1 = |&&[hits, predicted, is_true]: &&[f64; 3]| 2.0 * hits / (predicted + is_true).max(1.0);
    let f1 = counted.iter().map(f1).sum::<f64>() / counted.len().max(1) as f64;
    let accuracy = exact as f64 / scores.len() as f64;
    Metrics::new([("accuracy", accuracy), ("f1", f1)], format!("accuracy {accuracy:.4}  F1 {f1:.4}"))
}

/// Returns the mean squared error, and the mean of the correlations of each number. A correlation is NaN if all its labels or all its scores are equal.
fn errors(scores: &[Vec<f64>], labels: &[Vec<f64>]) -> Metrics {
    let count = scores[0].len();
    let squares = scores.iter().flatten().zip(labels.iter().flatten()).map(|(x, y)| (x - y) * (x - y));
    let mse = squares.sum::<f64>() / (scores.len() * count) as f64;
    let column = |rows: &[Vec<f64>], at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
    let each = (0..count).map(|at| correlation(&column(scores, at), &column(labels, at)));
    let pearson = each.sum::<f64>() / count as f64;
    Metrics::new([("mse", mse), ("pearson", pearson)], format!("MSE {mse:.4}  Pearson {pearson:.4}"))
}

fn correlation(x: &[f64], y: &[f64]) -> f64 {
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    let (of_x, of_y) = (mean(x), mean(y));
    let dot = |a: &[f64], mean_a: f64, b: &[f64], mean_b: f64| {
        a.iter().zip(b).map(|(a, b)| (a - mean_a) * (b - mean_b)).sum::<f64>()
    };
    dot(x, of_x, y, of_y) / (dot(x, of_x, x, of_x) * dot(y, of_y, y, of_y)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ProblemType::{MultiLabelClassification, Regression, SingleLabelClassification};

    fn numbers(problem: ProblemType, scores: &[&[f64]], labels: &[&[f64]]) -> Vec<f64> {
        let rows = |of: &[&[f64]]| of.iter().map(|row| row.to_vec()).collect::<Vec<_>>();
        let found = LabelMetrics::of(problem, &rows(scores), &rows(labels)).unwrap();
        std::iter::once(found.loss).chain(found.metrics.named.iter().map(|(_, value)| *value)).collect()
    }

    /// By hand, and as scikit-learn computes them: of labels 0 and 1 the F1 scores are 2/3 and 1/2, and label 3 is nowhere.
    #[test]
    fn metrics_are_those_of_their_formulas() {
        let hit = |label: usize| [0, 1, 2, 3].map(|other| f64::from(u8::from(other == label)));
        let scores = [hit(0), hit(1), hit(0), hit(1)];
        let labels = [hit(0), hit(1), hit(0), hit(2)];
        let found =
            numbers(SingleLabelClassification, &scores.each_ref().map(|x| &x[..]), &labels.each_ref().map(|x| &x[..]));
        assert_eq!(found[1..], [0.75, (1.0 + 2.0 / 3.0 + 0.0) / 3.0]);
        let found = numbers(
            MultiLabelClassification,
            &[&[1.0, -1.0, -1.0], &[1.0, 1.0, -1.0]],
            &[&[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0]],
        );
        assert_eq!(found[1..], [0.5, (2.0 / 3.0 + 1.0 + 0.0) / 3.0]);
        let found = numbers(Regression, &[&[1.0], &[2.0], &[6.0]], &[&[2.0], &[4.0], &[12.0]]);
        assert_eq!(found[..2], [(1.0 + 4.0 + 36.0) / 3.0; 2]);
        assert!((found[2] - 1.0).abs() < 1e-15, "{found:?}");
        let error = LabelMetrics::of(Regression, &[vec![f64::NAN]], &[vec![0.0]]).unwrap_err();
        assert!(matches!(error, Error::NonFinite(_)), "{error}");
    }
}
