//! The entropy of the distribution of each token, and the gradient of a loss that rewards entropy by the logits.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{IGNORE_INDEX, expect_compute, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// The loss `Σ_t factors[t] · CE[t] - coefficient · scale · weights[t] · H[t]` of tokens with cross entropy `CE` and entropy `H`.
#[derive(Clone, Copy, Debug)]
pub struct EntropyBonus<'a> {
    /// The factor of each token's cross entropy, `[T]`.
    pub factors: &'a Tensor,
    /// The weight of each token's entropy, `[T]`.
    pub weights: &'a Tensor,
    /// The factor of all entropies on the device, `[1]`.
    pub scale: &'a Tensor,
    /// The constant factor of all entropies, finite.
    pub coefficient: f64,
}

/// Returns the entropies `H[t] = -Σ_v p_v ln p_v` `[T]` of `p = softmax(logits[t])` in F32 (F64 for F64), and replaces `logits` by the gradient of the
/// loss of `bonus`: `factors · (p - onehot(target)) + coefficient · scale · weights · p · (ln p + H)`. Entropy and gradient are 0 where the target is
/// [`IGNORE_INDEX`]. A token of the vocabulary with a probability of 0 adds nothing to the entropy.
///
/// The logits are the first `vocabulary` columns of `[T, P]`; further columns are padding, which does not change. `targets` are I32 `[T]` in
/// `0..vocabulary`; the tensors of `bonus` are F32 (F64 for F64). Mnih et al. 2016, arXiv:1602.01783, section 4.
///
/// Errors with [`Error::Value`] unless the vocabulary has columns and the coefficient is finite.
pub fn entropy_gradient(
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    bonus: EntropyBonus,
) -> Result<Tensor> {
    let [tokens, columns] = logits.dims("entropy_gradient: logits")?;
    expect_compute("entropy_gradient: logits", logits)?;
    targets.expect("entropy_gradient: targets", &[tokens])?;
    targets.expect_dtype("entropy_gradient: targets", &[DType::I32])?;
    targets.expect_device("entropy_gradient: targets", logits.device())?;
    for (what, tensor, len) in [
        ("entropy_gradient: factors", bonus.factors, tokens),
        ("entropy_gradient: weights", bonus.weights, tokens),
        ("entropy_gradient: scale", bonus.scale, 1),
    ] {
        tensor.expect(what, &[len])?;
        tensor.expect_dtype(what, &[real_type(logits.dtype())])?;
        tensor.expect_device(what, logits.device())?;
    }
    if !(1..=columns).contains(&vocabulary) {
        return Err(Error::Value(format!("entropy_gradient: a vocabulary of {vocabulary} in {columns} columns")));
    }
    if !bonus.coefficient.is_finite() {
        return Err(Error::Value(format!("entropy_gradient: the coefficient is {}; it is finite", bonus.coefficient)));
    }
    let mut entropies = Tensor::empty(logits.device(), &[tokens], real_type(logits.dtype()))?;
    dispatch! { logits.device().clone(),
        cpu => cpu::entropy_gradient(logits, vocabulary, targets, bonus, &mut entropies),
        gpu => cuda::entropy_gradient(&gpu, logits, vocabulary, targets, bonus, &mut entropies)?,
    }
    Ok(entropies)
}
