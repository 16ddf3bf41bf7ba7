//! The losses of preference tuning: of the log-probabilities of whole sequences and those by a reference model, or of the rewards that a
//! reward model gives.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// A loss of pairs, whose sequences `2i` and `2i + 1` are the chosen and the rejected one, or of sequences with labels. `x` is the
/// log-probability of a sequence less that of the reference, `h = x_chosen - x_rejected`, and `σ` the logistic function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PreferenceLoss {
    /// DPO: `-(1 - label_smoothing) · ln σ(β · h) - label_smoothing · ln σ(-β · h)`. Rafailov et al. 2023, arXiv:2305.18290; the smoothing is
    /// that of conservative DPO, Mitchell 2023.
    Sigmoid {
        /// The share of pairs whose preference is assumed to be wrong.
        label_smoothing: f64,
    },
    /// DPO whose expectation does not depend on flipped preferences: the loss above with the sign of its second term changed, divided by
    /// `1 - 2 · label_smoothing`. Chowdhury et al. 2024, arXiv:2403.00409.
    Robust {
        /// The share of pairs whose preference is assumed to be flipped, below 0.5.
        label_smoothing: f64,
    },
    /// `max(0, 1 - β · h)`. Zhao et al. 2023, arXiv:2305.10425.
    Hinge,
    /// `(h' - 1 / 2β)²`, where `h'` is `h` of log-probabilities divided by the number of tokens. Azar et al. 2023, arXiv:2310.12036.
    Ipo,
    /// Of a reward model, with the rewards `r` of sequences in the place of log-probabilities, and in that of the reference the margin by
    /// which the chosen sequence should be better: `-ln σ(β · h) + centering · (r_chosen + r_rejected)²`. Bradley and Terry 1952; the second
    /// term is that of Eisenstein et al. 2023, arXiv:2312.09244, equation 2.
    BradleyTerry {
        /// The factor of the term that draws rewards to a mean of 0.
        centering: f64,
    },
    /// KTO: `desirable_weight · (1 - σ(β · (x - kl)))`, or `undesirable_weight · (1 - σ(β · (kl - x)))`. Ethayarajh et al. 2024,
    /// arXiv:2402.01306.
    Kto {
        /// The factor of sequences whose label is 1.
        desirable_weight: f64,
        /// The factor of sequences whose label is 0.
        undesirable_weight: f64,
    },
}

impl PreferenceLoss {
    /// Sequences that have one loss: 2 for pairs.
    pub fn sequences(self) -> usize {
        if matches!(self, PreferenceLoss::Kto { .. }) { 1 } else { 2 }
    }
}

/// What is known of the sequences of a micro-batch before forward, each `[S]` in F32 (F64 for F64).
#[derive(Clone, Debug)]
pub struct PreferenceTargets {
    /// Their log-probabilities by the reference model; for `BradleyTerry`, the margin at the chosen sequence of a pair, and 0 at the other.
    pub reference: Tensor,
    /// Their numbers of target tokens, at least 1; only `Ipo` reads them.
    pub lengths: Tensor,
    /// 1 for a desirable sequence, else 0; only `Kto` reads them.
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
    match losses.device() {
        Device::Cpu => cpu::sequence_log_probs(losses, &mut sums),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::sequence_log_probs(gpu, losses, &mut sums)?,
    }
    Ok(sums)
}

/// The loss of sequences with log-probabilities `policy` `[S]`, and the gradient of `scale · Σ losses` by the negative log-probability of
/// each of the `tokens` of all sequences: the factors with which [`cross_entropy_gradient`](super::cross_entropy_gradient()) continues.
///
/// `scale` is `[1]`, of the type of `policy`. Returns losses `[S]`, where that of a pair stands at its chosen sequence and 0 at the other,
/// and factors `[tokens]`.
///
/// Errors with [`Error::Value`] unless sequences have equal numbers of tokens, and pairs two sequences.
pub fn preference_loss(
    loss: PreferenceLoss,
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
    if sequences == 0 || !sequences.is_multiple_of(loss.sequences()) || !tokens.is_multiple_of(sequences) {
        return Err(Error::Value(format!(
            "preference_loss: {sequences} sequences with {tokens} tokens; a loss has {} sequences, all of one length",
            loss.sequences()
        )));
    }
    let empty = |len| Tensor::empty(policy.device(), &[len], policy.dtype());
    let (mut losses, mut factors) = (empty(sequences)?, empty(tokens)?);
    match policy.device() {
        Device::Cpu => cpu::preference_loss(loss, beta, policy, targets, scale, &mut losses, &mut factors),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::preference_loss(gpu, loss, beta, policy, targets, scale, &mut losses, &mut factors)?,
    }
    Ok((losses, factors))
}

/// The types of sums.
const SUMS: &[DType] = &[DType::F32, DType::F64];
