//! The loss of a value head: of the values of tokens, whose returns are known.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::IGNORE_INDEX;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// A loss of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueLoss {
    /// The factor of the loss in the gradient.
    pub coefficient: f64,
    /// How far a value may move from the value before the update and still reduce the loss, above 0; infinity for no bound.
    pub range: f64,
}

/// What is known of the tokens of a micro-batch before forward, each `[T]` in F32 (F64 for F64).
#[derive(Clone, Copy, Debug)]
pub struct ValueTargets<'a> {
    /// The values by the weights that drew the tokens.
    pub old: &'a Tensor,
    /// The returns.
    pub returns: &'a Tensor,
    /// The weight of the token in the sum of all losses; 0 leaves it out.
    pub weights: &'a Tensor,
}

/// Returns the losses `weight · ½ · max((v - R)², (clip(v, old - range, old + range) - R)²)` `[T]` of `values` `[T]` with returns `R`, and the gradient
/// of `coefficient · scale · Σ` of them by `values`. Both are 0 where a target is [`IGNORE_INDEX`] or a weight 0.
///
/// `values` are F32 or F64, `targets` I32 `[T]`, and `scale` `[1]` of the type of `values` on the device. Schulman et al. 2017, arXiv:1707.06347, with
/// the bound of values in OpenAI's baselines.
///
/// Errors with [`Error::Value`] unless the coefficient is finite and the range above 0.
pub fn value_loss(
    how: &ValueLoss,
    values: &Tensor,
    targets: &Tensor,
    known: ValueTargets,
    scale: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let [tokens] = values.dims("value_loss: values")?;
    values.expect_dtype("value_loss: values", &[DType::F32, DType::F64])?;
    targets.expect("value_loss: targets", &[tokens])?;
    targets.expect_dtype("value_loss: targets", &[DType::I32])?;
    targets.expect_device("value_loss: targets", values.device())?;
    for (what, tensor, len) in [
        ("value_loss: old", known.old, tokens),
        ("value_loss: returns", known.returns, tokens),
        ("value_loss: weights", known.weights, tokens),
        ("value_loss: scale", scale, 1),
    ] {
        tensor.expect(what, &[len])?;
        tensor.expect_dtype(what, &[values.dtype()])?;
        tensor.expect_device(what, values.device())?;
    }
    let ValueLoss { coefficient, range } = *how;
    if !(coefficient.is_finite() && range > 0.0) {
        return Err(Error::Value(format!(
            "value_loss: the coefficient is {coefficient} and the range {range}; they are finite, and above 0"
        )));
    }
    let (mut losses, mut gradient) = (values.empty_like()?, values.empty_like()?);
    dispatch! { values.device(),
        cpu => cpu::value_loss(how, values, targets, known, scale, &mut losses, &mut gradient),
        gpu => cuda::value_loss(gpu, how, values, targets, known, scale, &mut losses, &mut gradient)?,
    }
    Ok((losses, gradient))
}
