//! The losses of a classifier: of scores of labels, for tokens whose labels are known.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::IGNORE_INDEX;
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// A loss of the scores `x` `[L]` of a token with labels `y` `[L]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelLoss {
    /// The cross entropy `-Σ y · log softmax(x)`. The labels are a distribution.
    SingleLabel,
    /// The mean over the labels of the binary cross entropy `-y · log σ(x) - (1 - y) · log σ(-x)`. Labels are from 0 to 1.
    MultiLabel,
    /// The mean over the labels of the squared error `(x - y)²`.
    Regression,
}

/// Returns the losses `[T]` of the scores `[T, L]`, and replaces the scores by the gradient of `scale · Σ losses`.
///
/// `targets` `[T]` in I32 are the rows of `labels` `[R, L]`. The loss and the gradient of a token are 0 if its target is [`IGNORE_INDEX`]. `scores`,
/// `labels` and `scale` `[1]` are F32 or F64, all of one type. The losses are the losses of `transformers` for the problem types of the same names.
pub fn label_loss(
    loss: LabelLoss,
    scores: &mut Tensor,
    targets: &Tensor,
    labels: &Tensor,
    scale: &Tensor,
) -> Result<Tensor> {
    let [tokens, count] = scores.dims("label_loss: scores")?;
    let [rows, _] = labels.dims("label_loss: labels")?;
    scores.expect_dtype("label_loss: scores", &[DType::F32, DType::F64])?;
    targets.expect("label_loss: targets", &[tokens])?;
    targets.expect_dtype("label_loss: targets", &[DType::I32])?;
    targets.expect_device("label_loss: targets", scores.device())?;
    labels.expect("label_loss: labels", &[rows, count])?;
    scale.expect("label_loss: scale", &[1])?;
    for (what, tensor) in [("label_loss: labels", labels), ("label_loss: scale", scale)] {
        tensor.expect_dtype(what, &[scores.dtype()])?;
        tensor.expect_device(what, scores.device())?;
    }
    let mut losses = Tensor::empty(scores.device(), &[tokens], scores.dtype())?;
    dispatch! { targets.device(),
        cpu => cpu::label_loss(loss, scores, targets, labels, scale, &mut losses),
        gpu => cuda::label_loss(gpu, loss, scores, targets, labels, scale, &mut losses)?,
    }
    Ok(losses)
}
