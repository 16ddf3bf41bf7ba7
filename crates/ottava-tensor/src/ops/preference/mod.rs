//! The losses of preference tuning: of the log-probabilities of whole sequences by the model and by a reference model, or of the rewards that a
//! reward model gives.

mod cpu;
pub(super) mod cuda;
mod loss;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

pub use loss::{PreferenceLoss, PreferenceTerm, log_odds};

/// What is known of the sequences of a micro-batch before forward, each `[S]` in F32 (F64 for F64).
#[derive(Clone, Debug)]
pub struct PreferenceTargets {
    /// Their log-probabilities by the reference model; for `BradleyTerry`, the margin at the chosen sequence of a pair, and 0 at the other.
    pub reference: Tensor,
    /// Their numbers of target tokens, at least 1; read by losses of means over tokens.
    pub lengths: Tensor,
    /// 1 for a desirable sequence, else 0; read by losses of labels.
    pub labels: Tensor,
    /// The estimate of the divergence from the reference model, `[1]`; only `Kto` reads it.
    pub kl: Tensor,
}

/// `-Σ losses` of each of `sequences` equal parts of `losses` `[T]`: the log-probability of the targets of a sequence, `[S]`.
///
/// Errors with [`Error::Value`] unless the parts are equal.
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

/// The weighted sum of the losses `terms` of sequences with log-probabilities `policy` `[S]`, and the gradient of `scale · Σ losses` by the
/// negative log-probability of each of the `tokens` of all sequences: the factors with which
/// [`cross_entropy_gradient`](super::cross_entropy_gradient()) continues.
///
/// `scale` is `[1]`, of the type of `policy`. Returns losses `[S]`, where the loss of a pair stands at its chosen sequence and 0 at the other,
/// and factors `[tokens]`.
///
/// Errors with [`Error::Value`] unless sequences have equal numbers of tokens, pairs two sequences, and all terms are of pairs or all of
/// sequences.
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
