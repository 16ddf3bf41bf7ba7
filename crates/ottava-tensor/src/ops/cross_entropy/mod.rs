//! Negative log-likelihood of the next token, and its gradient by the logits.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::{DType, Device, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// Targets with this value are ignored by the loss, as in PyTorch.
pub const IGNORE_INDEX: i32 = -100;

/// `losses[t] = log Σ_v e^logits[t, v] - logits[t, targets[t]]`, and 0 where the target is [`IGNORE_INDEX`].
///
/// `logits` `[T, V]`, `targets` I32 `[T]` in `0..V`; returns F32 `[T]` (F64 for F64).
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let mut losses = prepare(logits, targets)?;
    match logits.device() {
        Device::Cpu => cpu::cross_entropy(logits, targets, &mut losses),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::cross_entropy(gpu, logits, targets, &mut losses)?,
    }
    Ok(losses)
}

/// [`cross_entropy`], and replaces `logits` by `scale · (softmax(logits) - onehot(target))`, zero for ignored targets.
///
/// `scale` F32 `[1]` (F64 for F64) lies on the device, so that a captured step reads the present one.
pub fn cross_entropy_gradient(logits: &mut Tensor, targets: &Tensor, scale: &Tensor) -> Result<Tensor> {
    let mut losses = prepare(logits, targets)?;
    scale.expect("cross_entropy: scale", &[1])?;
    scale.expect_dtype("cross_entropy: scale", &[real_type(logits.dtype())])?;
    scale.expect_device("cross_entropy: scale", logits.device())?;
    match logits.device().clone() {
        Device::Cpu => cpu::cross_entropy_gradient(logits, targets, scale, &mut losses),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::cross_entropy_gradient(&gpu, logits, targets, scale, &mut losses)?,
    }
    Ok(losses)
}

fn prepare(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let [tokens, _] = logits.dims("cross_entropy: logits")?;
    expect_compute("cross_entropy: logits", logits)?;
    targets.expect("cross_entropy: targets", &[tokens])?;
    targets.expect_dtype("cross_entropy: targets", &[DType::I32])?;
    targets.expect_device("cross_entropy: targets", logits.device())?;
    Tensor::empty(logits.device(), &[tokens], real_type(logits.dtype()))
}
