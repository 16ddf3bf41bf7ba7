//! The losses of preference tuning. They compare the log-probabilities of whole sequences by the model and by a reference model, or the rewards of a
//! reward model.

mod cpu;
pub(super) mod cuda;
mod loss;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

pub use loss::{PreferenceLoss, PreferenceTerm, log_odds};

/// The inputs of the losses that are known before forward. Tensors of the `S` sequences of a micro-batch are `[S]`, F32 (F64 for F64).
#[derive(Clone, Debug)]
pub struct PreferenceTargets {
    /// The log-probabilities of sequences by the reference model. For `BradleyTerry`, the margin of each pair, at its chosen sequence, and 0 at its
    /// rejected sequence.
    pub reference: Tensor,
    /// The numbers of target tokens of sequences, at least 1. Read by losses of means over tokens.
    pub lengths: Tensor,
    /// 1 for a desirable sequence, 0 for an undesirable sequence. Read by losses with labels.
    pub labels: Tensor,
    /// The estimate of the divergence from the reference model, `[1]`. Only `Kto` reads it.
    pub kl: Tensor,
}

/// Returns the log-probability of the targets of each sequence, `[S]`. It is `-Σ losses` over one of `sequences` equal parts of `losses` `[T]`.
///
/// Errors with [`Error::Value`] if `losses` cannot be divided into equal parts.
pub fn sequence_log_probs(losses: &Tensor, sequences: usize) -> Result<Tensor> {
    let [tokens] = losses.dims("sequence_log_probs: losses")?;
    losses.expect_dtype("sequence_log_probs: losses", SUMS)?;
    if sequences == 0 || !tokens.is_multiple_of(sequences) {
        return Err(Error::Value(format!(
            "sequence_log_probs: {tokens} losses cannot be divided into {sequences} sequences"
        )));
    }
    let mut sums = Tensor::empty(losses.device(), &[sequences], losses.dtype())?;
    dispatch! { losses.device(),
        cpu => cpu::sequence_log_probs(losses, &mut sums),
        gpu => cuda::sequence_log_probs(gpu, losses, &mut sums)?,
    }
    Ok(sums)
}

/// Returns the weighted sum of the losses `terms` for each sequence, and the gradient for each token, from the log-probabilities `policy` `[S]`.
///
/// The losses are `[S]`. The loss of a pair is at its chosen sequence, and 0 is at its rejected sequence. The gradient is `[tokens]`, for the
/// `tokens` tokens of all sequences. It is the gradient of `scale · Σ losses` by the negative log-probability of a token, and is passed to
/// [`cross_entropy_gradient`](super::cross_entropy_gradient()) as factors. `scale` is `[1]`, in the type of `policy`.
///
/// Errors with [`Error::Value`] if sequences have different numbers of tokens, if losses of pairs get an odd number of sequences, or if some terms
/// are losses of pairs and some are losses of sequences.
pub fn preference_loss(
    terms: &[PreferenceTerm],
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    tokens: usize,
) -> Result<(Tensor, Tensor)> {
    let [sequences] = policy.dims("preference_loss: policy")?;
    policy.expect_dtype("preference_loss: policy", SUMS)?;
    let PreferenceTargets { reference, lengths, labels, kl } = targets;
    for (what, tensor, len) in [
        ("preference_loss: reference", reference, sequences),
        ("preference_loss: lengths", lengths, sequences),
        ("preference_loss: labels", labels, sequences),
        ("preference_loss: kl", kl, 1),
        ("preference_loss: scale", scale, 1),
    ] {
        tensor.expect(what, &[len])?;
        tensor.expect_dtype(what, &[policy.dtype()])?;
        tensor.expect_device(what, policy.device())?;
    }
    let each = terms.first().map_or(1, |term| term.loss.sequences());
    if sequences == 0 || !sequences.is_multiple_of(each) || !tokens.is_multiple_of(sequences) {
        return Err(Error::Value(format!(
            "preference_loss: {sequences} sequences with {tokens} tokens; a loss has {each} sequences, all of one length"
        )));
    }
    if terms.is_empty() || terms.iter().any(|term| term.loss.sequences() != each) {
        return Err(Error::Value(format!("preference_loss: {terms:?} are no losses of sequences of one kind")));
    }
    let empty = |len| Tensor::empty(policy.device(), &[len], policy.dtype());
    let (mut losses, mut factors) = (empty(sequences)?, empty(tokens)?);
    dispatch! { policy.device(),
        cpu => cpu::preference_loss(terms, beta, policy, targets, scale, &mut losses, &mut factors),
        gpu => cuda::preference_loss(gpu, terms, beta, policy, targets, scale, &mut losses, &mut factors)?,
    }
    Ok((losses, factors))
}

/// The types of sums.
const SUMS: &[DType] = &[DType::F32, DType::F64];
