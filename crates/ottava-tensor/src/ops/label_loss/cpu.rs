use super::{IGNORE_INDEX, LabelLoss};
use crate::element::{Element, Real};
use crate::{DType, Tensor};

pub(super) fn label_loss(
    loss: LabelLoss,
    scores: &mut Tensor,
    targets: &Tensor,
    labels: &Tensor,
    scale: &Tensor,
    losses: &mut Tensor,
) {
    match scores.dtype() {
        DType::F64 => all::<f64>(loss, scores, targets, labels, scale, losses.host_mut()),
        _ => all::<f32>(loss, scores, targets, labels, scale, losses.host_mut()),
    }
}

fn all<R: Real + Element>(
    loss: LabelLoss,
    scores: &mut Tensor,
    targets: &Tensor,
    labels: &Tensor,
    scale: &Tensor,
    losses: &mut [R],
) {
    let (count, labels, factor) = (labels.shape()[1], labels.host::<R>(), scale.host::<R>()[0].to_f64());
    let rows = scores.host_mut::<R>().chunks_exact_mut(count);
    for ((scores, &target), value) in rows.zip(targets.host::<i32>()).zip(losses) {
        if target == IGNORE_INDEX {
            scores.fill(R::default());
            *value = R::default();
        } else {
            *value = R::of(row(loss, scores, &labels[target as usize * count..][..count], factor));
        }
    }
}

/// Returns the loss of a token, and replaces its scores by the gradient. All arithmetic runs in F64.
fn row<R: Real>(loss: LabelLoss, scores: &mut [R], labels: &[R], factor: f64) -> f64 {
    let count = scores.len() as f64;
    let (lse, mass) = match loss {
        LabelLoss::SingleLabel => {
            let largest = scores.iter().map(|x| x.to_f64()).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|x| (x.to_f64() - largest).exp()).sum();
            (largest + sum.ln(), labels.iter().map(|y| y.to_f64()).sum())
        }
        LabelLoss::MultiLabel | LabelLoss::Regression => (0.0, 0.0),
    };
    let mut total = 0.0;
    for (x, y) in scores.iter_mut().zip(labels) {
        let (score, label) = (x.to_f64(), y.to_f64());
        let (of_label, slope) = match loss {
            // A label of 0 has no part of the loss, even if its score is minus infinity.
            LabelLoss::SingleLabel => {
                (if label == 0.0 { 0.0 } else { label * (lse - score) }, mass * (score - lse).exp() - label)
            }
            LabelLoss::MultiLabel => {
                let (tail, share) = ((-score.abs()).exp(), 1.0 / (1.0 + (-score).exp()));
                ((score.max(0.0) - score * label + tail.ln_1p()) / count, (share - label) / count)
            }
            LabelLoss::Regression => ((score - label) * (score - label) / count, 2.0 * (score - label) / count),
        };
        total += of_label;
        *x = R::of(factor * slope);
    }
    total
}
