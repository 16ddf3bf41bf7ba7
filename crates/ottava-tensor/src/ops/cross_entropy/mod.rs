//! Negative log-likelihood of the next token, and its gradient by the logits.

mod cpu;
mod cuda;
mod part;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCES;
pub use part::{merge_losses, partial_gradient, partial_losses};

/// Targets with this value are ignored by the loss, as in PyTorch.
pub const IGNORE_INDEX: i32 = -100;

/// `losses[t] = log Σ_v e^logits[t, v] - logits[t, targets[t]]`, and 0 where the target is [`IGNORE_INDEX`]. With a `soft_cap`, the logits
/// are first replaced by those of [`cap_logits`], which are not rounded.
///
/// `logits` are the first `vocabulary` columns `V` of `[T, P]`, the rest is padding; `targets` I32 `[T]` in `0..V`. Returns F32 `[T]` (F64 for
/// F64). Errors with [`Error::Value`] unless the cap is a finite number above 0.
pub fn cross_entropy(logits: &Tensor, vocabulary: usize, targets: &Tensor, soft_cap: Option<f64>) -> Result<Tensor> {
    let mut losses = prepare(logits, targets, soft_cap)?;
    expect_vocabulary(vocabulary, logits)?;
    match logits.device() {
        Device::Cpu => cpu::cross_entropy(logits, vocabulary, targets, soft_cap, &mut losses),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::cross_entropy(gpu, logits, vocabulary, targets, soft_cap, &mut losses)?,
    }
    Ok(losses)
}

/// [`cross_entropy`], and replaces `logits` by `scale · (softmax(logits) - onehot(target))`, zero for ignored targets. With a `soft_cap`,
/// the softmax is that of the capped logits, and each element is multiplied by the slope of the cap, `1 - tanh(logit / soft_cap)²`. Padding
/// stays as it is.
///
/// `scale` F32 (F64 for F64) is `[1]`, or `[T]` with a factor for each token. It lies on the device, so that a captured step reads the
/// present one.
pub fn cross_entropy_gradient(
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    soft_cap: Option<f64>,
) -> Result<Tensor> {
    let mut losses = prepare(logits, targets, soft_cap)?;
    expect_vocabulary(vocabulary, logits)?;
    expect_scale("cross_entropy: scale", scale, logits)?;
    match logits.device().clone() {
        Device::Cpu => cpu::cross_entropy_gradient(logits, vocabulary, targets, scale, soft_cap, &mut losses),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => {
            cuda::cross_entropy_gradient(&gpu, logits, vocabulary, targets, scale, soft_cap, &mut losses)?;
        }
    }
    Ok(losses)
}

/// Replaces each of `logits` `[T, V]` by `soft_cap · tanh(logit / soft_cap)`, whose absolute value is below `soft_cap`. Team Gemma 2024,
/// arXiv:2408.00118, section 2.
///
/// Errors with [`Error::Value`] unless the cap is a finite number above 0.
pub fn cap_logits(logits: &mut Tensor, soft_cap: f64) -> Result<()> {
    logits.dims::<2>("cap_logits: logits")?;
    expect_compute("cap_logits: logits", logits)?;
    expect_cap(Some(soft_cap))?;
    match logits.device().clone() {
        Device::Cpu => cpu::cap_logits(logits, soft_cap),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::cap_logits(&gpu, logits, soft_cap)?,
    }
    Ok(())
}

/// Checks the scale of the losses of `logits`: one for all tokens, or one for each.
fn expect_scale(what: &str, scale: &Tensor, logits: &Tensor) -> Result<()> {
    scale.expect(what, &[if scale.len() == 1 { 1 } else { logits.shape()[0] }])?;
    scale.expect_dtype(what, &[real_type(logits.dtype())])?;
    scale.expect_device(what, logits.device())
}

fn expect_cap(soft_cap: Option<f64>) -> Result<()> {
    match soft_cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
        Some(cap) => {
            Err(Error::Value(format!("cross_entropy: the soft cap of logits is {cap}; it is a finite number above 0")))
        }
        None => Ok(()),
    }
}

fn expect_vocabulary(vocabulary: usize, logits: &Tensor) -> Result<()> {
    let [_, columns] = logits.dims("cross_entropy: logits")?;
    match vocabulary <= columns {
        true => Ok(()),
        false => Err(Error::Value(format!("cross_entropy: logits of {vocabulary} tokens in {columns} columns"))),
    }
}

fn prepare(logits: &Tensor, targets: &Tensor, soft_cap: Option<f64>) -> Result<Tensor> {
    expect_cap(soft_cap)?;
    let [tokens, _] = logits.dims("cross_entropy: logits")?;
    expect_compute("cross_entropy: logits", logits)?;
    targets.expect("cross_entropy: targets", &[tokens])?;
    targets.expect_dtype("cross_entropy: targets", &[DType::I32])?;
    targets.expect_device("cross_entropy: targets", logits.device())?;
    Tensor::empty(logits.device(), &[tokens], real_type(logits.dtype()))
}
