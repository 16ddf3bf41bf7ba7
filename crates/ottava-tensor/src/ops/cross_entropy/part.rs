//! The loss of logits that ranks divide by tokens of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

use super::{cpu, cuda, expect_scale, prepare};
use crate::ops::real_type;
use crate::{DType, Device, Result, Tensor};

/// For each row of `logits` `[T, V']` of the tokens `first..first + V'`: `ln Σ_v e^logits[t, v]`, and the logit of the target, or 0 if the
/// part does not have it. Returns F32 `[T, 2]` (F64 for F64); `targets` I32 `[T]` count in the whole vocabulary. A `soft_cap` as in
/// [`cross_entropy`](super::cross_entropy()).
pub fn partial_losses(logits: &Tensor, targets: &Tensor, first: usize, soft_cap: Option<f64>) -> Result<Tensor> {
    let losses = prepare(logits, targets, soft_cap)?;
    let mut partial = Tensor::empty(logits.device(), &[targets.len(), 2], losses.dtype())?;
    match logits.device() {
        Device::Cpu => cpu::partial_losses(logits, targets, first, soft_cap, &mut partial),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::partial_losses(gpu, logits, targets, first, soft_cap, &mut partial)?,
    }
    Ok(partial)
}

/// The losses `[T]` and the log-sum-exp `[T]` of rows whose parts have the results `partial` `[P, T, 2]` of [`partial_losses`]. As
/// [`cross_entropy`](super::cross_entropy()), the loss is 0 for ignored targets.
pub fn merge_losses(partial: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    let [parts, tokens, _] = partial.dims("merge_losses: partial")?;
    partial.expect("merge_losses: partial", &[parts.max(1), tokens, 2])?;
    partial.expect_dtype("merge_losses: partial", &[DType::F32, DType::F64])?;
    targets.expect("merge_losses: targets", &[tokens])?;
    targets.expect_dtype("merge_losses: targets", &[DType::I32])?;
    targets.expect_device("merge_losses: targets", partial.device())?;
    let empty = || Tensor::empty(partial.device(), &[tokens], partial.dtype());
    let (mut losses, mut lse) = (empty()?, empty()?);
    match partial.device() {
        Device::Cpu => cpu::merge_losses(partial, targets, &mut losses, &mut lse),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::merge_losses(gpu, partial, targets, &mut losses, &mut lse)?,
    }
    Ok((losses, lse))
}

/// Replaces `logits` of a part by the gradient of `scale · Σ losses`, as [`cross_entropy_gradient`](super::cross_entropy_gradient()), from
/// the `lse` `[T]` of [`merge_losses`].
pub fn partial_gradient(
    logits: &mut Tensor,
    targets: &Tensor,
    first: usize,
    lse: &Tensor,
    scale: &Tensor,
    soft_cap: Option<f64>,
) -> Result<()> {
    let losses = prepare(logits, targets, soft_cap)?;
    expect_scale("partial_gradient: scale", scale, logits)?;
    lse.expect("partial_gradient: lse", &[losses.len()])?;
    lse.expect_dtype("partial_gradient: lse", &[real_type(logits.dtype())])?;
    lse.expect_device("partial_gradient: lse", logits.device())?;
    match logits.device().clone() {
        Device::Cpu => cpu::partial_gradient(logits, targets, first, lse, scale, soft_cap),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::partial_gradient(&gpu, logits, targets, first, lse, scale, soft_cap)?,
    }
    Ok(())
}
