//! The loss of logits that ranks divide by tokens of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

use super::{CrossEntropy, cpu, cuda, expect_scale, prepare};
use crate::ops::dispatch::dispatch;
use crate::ops::real_type;
use crate::{DType, Result, Tensor};

/// The part of a vocabulary whose logits a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyPart {
    /// The first token of the part.
    pub first: usize,
    /// Tokens of the whole vocabulary `V`.
    pub vocabulary: usize,
}

/// For each row of `logits` `[T, V']` of the tokens `first..first + V'` of `part`: `ln Σ_v e^logits[t, v]`, and the sum over its logits of
/// their weights in the loss: `1 - ε` for the target, if the part has it, and `ε / V` for each logit. Returns F32 `[T, 2]` (F64 for F64);
/// `targets` I32 `[T]` count in the whole vocabulary.
pub fn partial_losses(logits: &Tensor, targets: &Tensor, part: VocabularyPart, how: CrossEntropy) -> Result<Tensor> {
    let losses = prepare(logits, targets, how)?;
    let mut partial = Tensor::empty(logits.device(), &[targets.len(), 2], losses.dtype())?;
    dispatch! { logits.device(),
        cpu => cpu::partial_losses(logits, targets, part, how, &mut partial),
        gpu => cuda::partial_losses(gpu, logits, targets, part, how, &mut partial)?,
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
    dispatch! { partial.device(),
        cpu => cpu::merge_losses(partial, targets, &mut losses, &mut lse),
        gpu => cuda::merge_losses(gpu, partial, targets, &mut losses, &mut lse)?,
    }
    Ok((losses, lse))
}

/// Replaces `logits` of a part by the gradient of `scale · Σ losses`, as [`cross_entropy_gradient`](super::cross_entropy_gradient()), from
/// the `lse` `[T]` of [`merge_losses`].
pub fn partial_gradient(
    logits: &mut Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    lse: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
) -> Result<()> {
    let losses = prepare(logits, targets, how)?;
    expect_scale("partial_gradient: scale", scale, logits)?;
    lse.expect("partial_gradient: lse", &[losses.len()])?;
    lse.expect_dtype("partial_gradient: lse", &[real_type(logits.dtype())])?;
    lse.expect_device("partial_gradient: lse", logits.device())?;
    dispatch! { logits.device().clone(),
        cpu => cpu::partial_gradient(logits, targets, part, lse, scale, how),
        gpu => cuda::partial_gradient(&gpu, logits, targets, part, lse, scale, how)?,
    }
    Ok(())
}
