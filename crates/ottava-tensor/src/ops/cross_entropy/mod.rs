//! Negative log-likelihood of the next token, and its gradient by the logits.

mod cpu;
pub(super) mod cuda;
mod part;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

pub use part::{VocabularyPart, merge_losses, partial_gradient, partial_losses};

/// The value of targets that the loss ignores, as in PyTorch.
pub const IGNORE_INDEX: i32 = -100;

/// How the loss of a token is computed from its logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// The upper bound of the absolute values of logits, or `None`. Logits are first replaced as by [`cap_logits`], but not rounded.
    pub soft_cap: Option<f64>,
    /// The share `ε` of the target distribution that is spread evenly over the vocabulary: at least 0 and less than 1. Szegedy et al. 2016,
    /// arXiv:1512.00567, section 7; as `LabelSmoother` in transformers.
    pub label_smoothing: f64,
}

impl CrossEntropy {
    /// Returns two weights in the loss: the weight of the target's logit, and the weight of each logit of a `vocabulary`.
    fn weights(self, vocabulary: usize) -> [f64; 2] {
        [1.0 - self.label_smoothing, self.label_smoothing / vocabulary as f64]
    }

    fn check(self) -> Result<()> {
        expect_cap(self.soft_cap)?;
        match (0.0..1.0).contains(&self.label_smoothing) {
            true => Ok(()),
            false => Err(Error::Value(format!(
                "cross_entropy: the label smoothing is {}; it is a number from 0 to less than 1",
                self.label_smoothing
            ))),
        }
    }
}

/// Returns the loss of each token, `losses[t] = log Σ_v e^logits[t, v] - (1 - ε) · logits[t, targets[t]] - ε / V · Σ_v logits[t, v]`. It is 0 if the
/// target is [`IGNORE_INDEX`].
///
/// `logits` are the first `vocabulary` columns `V` of `[T, P]`; further columns are padding. `targets` I32 `[T]` are in `0..V`. Returns F32 `[T]`
/// (F64 for
/// F64). Errors with [`Error::Value`] unless the cap is a finite number above 0 and the smoothing is at least 0 and less than 1.
pub fn cross_entropy(logits: &Tensor, vocabulary: usize, targets: &Tensor, how: CrossEntropy) -> Result<Tensor> {
    let mut losses = prepare(logits, targets, how)?;
    expect_vocabulary(vocabulary, logits)?;
    dispatch! { logits.device(),
        cpu => cpu::cross_entropy(logits, vocabulary, targets, how, &mut losses),
        gpu => cuda::cross_entropy(gpu, logits, vocabulary, targets, how, &mut losses)?,
    }
    Ok(losses)
}

/// Returns the losses of [`cross_entropy`], and replaces `logits` by `scale · (softmax(logits) - (1 - ε) · onehot(target) - ε / V)`, which is 0 for
/// ignored targets. With a soft cap, the softmax is computed from the capped logits, and each element is multiplied by the slope of the cap,
/// `1 - tanh(logit / soft_cap)²`. Padding does not change.
///
/// `scale` F32 (F64 for F64) is `[1]`, or `[T]` with a factor for each token. It is in device memory, so a captured step reads its current value.
pub fn cross_entropy_gradient(
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
) -> Result<Tensor> {
    let mut losses = prepare(logits, targets, how)?;
    expect_vocabulary(vocabulary, logits)?;
    expect_scale("cross_entropy: scale", scale, logits)?;
    dispatch! { logits.device().clone(),
        cpu => cpu::cross_entropy_gradient(logits, vocabulary, targets, scale, how, &mut losses),
        gpu => {
            cuda::cross_entropy_gradient(&gpu, logits, vocabulary, targets, scale, how, &mut losses)?;
        },
    }
    Ok(losses)
}

/// Replaces each of `logits` `[T, V]` by `soft_cap · tanh(logit / soft_cap)`, whose absolute value is below `soft_cap`. Gemma Team 2024,
/// arXiv:2408.00118, section 2.
///
/// Errors with [`Error::Value`] unless the cap is a finite number above 0.
pub fn cap_logits(logits: &mut Tensor, soft_cap: f64) -> Result<()> {
    logits.dims::<2>("cap_logits: logits")?;
    expect_compute("cap_logits: logits", logits)?;
    expect_cap(Some(soft_cap))?;
    dispatch! { logits.device().clone(),
        cpu => cpu::cap_logits(logits, soft_cap),
        gpu => cuda::cap_logits(&gpu, logits, soft_cap)?,
    }
    Ok(())
}

/// Checks the scale of the losses of `logits`. It has one element for all tokens, or one per token.
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

fn prepare(logits: &Tensor, targets: &Tensor, how: CrossEntropy) -> Result<Tensor> {
    how.check()?;
    let [tokens, _] = logits.dims("cross_entropy: logits")?;
    expect_compute("cross_entropy: logits", logits)?;
    targets.expect("cross_entropy: targets", &[tokens])?;
    targets.expect_dtype("cross_entropy: targets", &[DType::I32])?;
    targets.expect_device("cross_entropy: targets", logits.device())?;
    Tensor::empty(logits.device(), &[tokens], real_type(logits.dtype()))
}
