//! The loss of logits whose vocabulary is divided among ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

use super::{CrossEntropy, cpu, cuda, expect_scale, prepare};
use crate::ops::dispatch::dispatch;
use crate::ops::real_type;
use crate::{DType, Result, Tensor};

/// The part of a vocabulary for which a rank has logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyPart {
    /// The first token of the part.
    pub first: usize,
    /// The number `V` of tokens of the whole vocabulary.
    pub vocabulary: usize,
}

/// Returns two sums for each row of `logits` `[T, V']`, which are the logits of the tokens `first..first + V'` of `part`: F32 `[T, 2]` (F64 for F64).
///
/// The first sum is `ln Σ_v e^logits[t, v]`. The second is the sum of the logits times their weights in the loss: `1 - ε` for the target, if the part
/// has it, and additionally `ε / V` for each logit. `targets` I32 `[T]` are tokens of the whole vocabulary.
pub fn partial_losses(logits: &Tensor, targets: &Tensor, part: VocabularyPart, how: CrossEntropy) -> Result<Tensor> {
    let losses = prepare(logits, targets, how)?;
    let mut partial = Tensor::empty(logits.device(), &[targets.len(), 2], losses.dtype())?;
    dispatch! { logits.device(),
        cpu => cpu::partial_losses(logits, targets, part, how, &mut partial),
        gpu => cuda::partial_losses(gpu, logits, targets, part, how, &mut partial)?,
    }
    Ok(partial)
}

/// Returns the losses `[T]` and the log-sum-exp `[T]` of rows, from the results `partial` `[P, T, 2]` of [`partial_losses`] for all parts. The loss
/// of an ignored target is 0, as in [`cross_entropy`](super::cross_entropy()).
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

/// Replaces the `logits` of a part by the gradient of `scale · Σ losses`, as [`cross_entropy_gradient`](super::cross_entropy_gradient()) does. `lse`
/// `[T]` is a result of [`merge_losses`].
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
