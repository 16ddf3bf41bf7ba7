//! The losses of reinforcement learning: of the log-probabilities of the tokens of sampled sequences, whose advantages are known.
//!
//! Symbols of one token: `lp` its log-probability now, `old` the one when it was drawn, `ref` the one by the reference model, `A` its advantage,
//! `w = e^(lp - old)`. With a ratio of sequences, `w` is `e^mean(lp - old)` of the sequence (Zheng et al. 2025, arXiv:2507.18071).

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::cross_entropy::IGNORE_INDEX;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// How far one update may take the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyBound {
    /// `-min(w · A, clip(w, 1 - low, 1 + high) · A)` (Schulman et al. 2017, arXiv:1707.06347). `most` first bounds `w`, which matters for a
    /// negative advantage only (Ye et al. 2019, arXiv:1912.09729); infinity for no such bound.
    Clip {
        /// ε of ratios below 1.
        low: f64,
        /// ε of ratios above 1.
        high: f64,
        /// The bound of `w`, above 1.
        most: f64,
    },
    /// `-clip(w, 1 - low, 1 + high) · A · lp` with a constant `w` (MiniMax 2025, arXiv:2506.13585).
    Weight {
        /// ε of ratios below 1.
        low: f64,
        /// ε of ratios above 1.
        high: f64,
    },
    /// `-A · lp` (Williams 1992): no bound.
    None,
}

/// How the divergence from the reference model is estimated from one token, with `d = ref - lp` between -20 and 20. Schulman 2020, "Approximating KL
/// divergence".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlEstimator {
    /// `w · -d`, whose expected gradient is the one of KL(policy, reference).
    K1,
    /// `d² / 2`, whose expected gradient is the one of KL(policy, reference) while the policy is the sampler.
    K2,
    /// `e^d - 1 - d`, whose expected gradient is the one of KL(reference, policy).
    K3,
    /// `w · (e^d - 1 - d)`, whose expected gradient is the one of KL(policy, reference).
    WeightedK3,
}

/// The factor that corrects the loss of a token for draws by another model than the model of steps (Yao et al. 2025, "Your efficient RL framework secretly
/// brings you off-policy RL training"). A ratio is the probability of a token, or of its sequence, in the step before the first update, divided by its
/// probability at the draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Correction {
    /// Whether the ratio is the ratio of the sequence instead of the token's.
    pub of_sequence: bool,
    /// Whether a ratio below `min` or above `max` gives the factor 0. Otherwise a ratio above `max` gives the factor `max`.
    pub is_mask: bool,
    /// The smallest ratio that a mask keeps.
    pub min: f64,
    /// The largest ratio.
    pub max: f64,
}

impl Correction {
    /// Returns the factor of a token, from the logarithm of the ratio.
    pub fn factor(&self, log_ratio: f64) -> f64 {
        let ratio = log_ratio.exp();
        match self.is_mask {
            true if (self.min..=self.max).contains(&ratio) => ratio,
            true => 0.0,
            false => ratio.min(self.max),
        }
    }
}

/// A loss of policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// The bound.
    pub bound: PolicyBound,
    /// Whether `w` is the ratio of the sequence instead of the token's.
    pub of_sequence: bool,
    /// The factor of the divergence from the reference model.
    pub beta: f64,
    /// The estimator of that divergence.
    pub kl: KlEstimator,
    /// The correction, if `old` holds log-probabilities of draws, and the policy of the draw is the policy of the step. Then `old` is replaced by `lp` after
    /// the correction is computed from both, so `w` is 1; the gradient regards `old` and the correction as constant.
    pub correction: Option<Correction>,
}

/// What is known of the tokens of a micro-batch before forward, each `[T]` in F32 (F64 for F64).
#[derive(Clone, Debug)]
pub struct PolicyTargets {
    /// `old`.
    pub old: Tensor,
    /// `ref`; not read if `beta` is 0.
    pub reference: Tensor,
    /// `A`.
    pub advantages: Tensor,
    /// The factor of the policy's loss that corrects for another sampler; 1 for none. Not read if the loss has a [`PolicyLoss::correction`].
    pub corrections: Tensor,
    /// The weight of the token in the sum of all losses; 0 leaves it out, also from its sequence's ratio.
    pub weights: Tensor,
    /// The offsets at which sequences begin, in ascending order from 0, and the number of tokens behind them: I32 `[S + 1]`. Equal offsets are an empty
    /// sequence.
    pub sequences: Tensor,
}

/// The losses `weight · (correction · bounded + β · kl)` `[T]` of tokens whose cross entropies are `losses` `[T]`, and the gradient of
/// `scale · Σ` of them by `losses`: the factors with which [`cross_entropy_gradient`](super::cross_entropy_gradient()) continues. Both are 0 where
/// a target is [`IGNORE_INDEX`] or a weight 0.
///
/// `targets` is I32 `[T]`, `scale` `[1]` of the type of `losses`.
///
/// Errors with [`Error::Value`](crate::Error::Value) if there is no sequence.
pub fn policy_loss(
    how: &PolicyLoss,
    losses: &Tensor,
    targets: &Tensor,
    known: &PolicyTargets,
    scale: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let [tokens] = losses.dims("policy_loss: losses")?;
    losses.expect_dtype("policy_loss: losses", &[DType::F32, DType::F64])?;
    targets.expect("policy_loss: targets", &[tokens])?;
    targets.expect_dtype("policy_loss: targets", &[DType::I32])?;
    targets.expect_device("policy_loss: targets", losses.device())?;
    let PolicyTargets { old, reference, advantages, corrections, weights, sequences } = known;
    for (what, tensor, len) in [
        ("policy_loss: old", old, tokens),
        ("policy_loss: reference", reference, tokens),
        ("policy_loss: advantages", advantages, tokens),
        ("policy_loss: corrections", corrections, tokens),
        ("policy_loss: weights", weights, tokens),
        ("policy_loss: scale", scale, 1),
    ] {
        tensor.expect(what, &[len])?;
        tensor.expect_dtype(what, &[losses.dtype()])?;
        tensor.expect_device(what, losses.device())?;
    }
    sequences.expect_dtype("policy_loss: sequences", &[DType::I32])?;
    sequences.expect_device("policy_loss: sequences", losses.device())?;
    if sequences.len() < 2 {
        return Err(Error::Value(format!("policy_loss: {} offsets are no sequence", sequences.len())));
    }
    let (mut bounded, mut factors) = (losses.empty_like()?, losses.empty_like()?);
    let of = Inputs { losses, targets, known, scale };
    dispatch! { losses.device(),
        cpu => cpu::policy_loss(how, of, &mut bounded, &mut factors),
        gpu => cuda::policy_loss(gpu, how, of, &mut bounded, &mut factors)?,
    }
    Ok((bounded, factors))
}

/// What the op reads.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    losses: &'a Tensor,
    targets: &'a Tensor,
    known: &'a PolicyTargets,
    scale: &'a Tensor,
}

/// The bound of log-ratios, beyond which their exponential is constant.
const FARTHEST: f64 = 20.0;
