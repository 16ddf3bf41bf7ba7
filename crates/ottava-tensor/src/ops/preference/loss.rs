//! The losses of preference tuning, and the values that they compare.

use crate::element::Real;

/// A loss of pairs or of sequences with labels. The chosen sequence of pair `i` is `2i`, the rejected sequence is `2i + 1`. `x` is the
/// log-probability of a sequence minus its log-probability by the reference model, `h = x_chosen - x_rejected`, and `σ` is the logistic function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PreferenceLoss {
    /// DPO: `-(1 - label_smoothing) · ln σ(β · h) - label_smoothing · ln σ(-β · h)`. Rafailov et al. 2023, arXiv:2305.18290. With
    /// smoothing, this is conservative DPO, Mitchell 2023.
    Sigmoid {
        /// The share of pairs whose preference is assumed to be wrong.
        label_smoothing: f64,
    },
    /// Robust DPO, whose expectation does not depend on flipped preferences: the loss `Sigmoid` with the sign of its second term changed, divided by
    /// `1 - 2 · label_smoothing`. Chowdhury et al. 2024, arXiv:2403.00409.
    Robust {
        /// The share of pairs whose preference is assumed to be flipped, below 0.5.
        label_smoothing: f64,
    },
    /// The hinge loss `max(0, 1 - β · h)`. Zhao et al. 2023, arXiv:2305.10425.
    Hinge,
    /// IPO: `(h' - 1 / 2β)²`. `h'` is `h` computed from log-probabilities divided by numbers of tokens. Azar et al. 2023, arXiv:2310.12036.
    Ipo,
    /// DPO with the `h'` of IPO: `-ln σ(β · h')`. Lambert et al. 2024, arXiv:2411.15124.
    SigmoidNorm,
    /// EXO: the divergence of `[q, 1 - q]`, with `q = σ(β · h)`, from `[1 - label_smoothing, label_smoothing]`. Ji et al. 2024, arXiv:2402.00856,
    /// equation 16.
    ExoPair {
        /// The probability that the rejected sequence is better, above 0.
        label_smoothing: f64,
    },
    /// NCA: `-ln σ(β · x_c) - ln σ(-β · x_c) / 2 - ln σ(-β · x_r) / 2`. Chen et al. 2024, arXiv:2402.05369.
    NcaPair,
    /// BCO without a shift of rewards, as in TRL 1.16: `-ln σ(β · x_c) - ln σ(-β · x_r)`. Jung et al. 2024, arXiv:2404.04656.
    BcoPair,
    /// SPPO with certain preferences: `(x_c - 1 / 2β)² + (x_r + 1 / 2β)²`. Wu et al. 2024, arXiv:2405.00675.
    SppoHard,
    /// AOT: conservative DPO of `h = (π_c - π_r)₍ₖ₎ - (ρ_c - ρ_r)₍ₖ₎`. `₍ₖ₎` is the k-th smallest value among all pairs of the call. Melnyk et al.
    /// 2024, arXiv:2406.05882.
    Aot {
        /// The share of pairs whose preference is assumed to be wrong.
        label_smoothing: f64,
    },
    /// AOT without pairs: conservative DPO of `h = x_c₍ₖ₎ - x_r₍ₖ₎`, with `₍ₖ₎` as in `Aot`. Melnyk et al. 2024, arXiv:2406.05882.
    AotUnpaired {
        /// The share of pairs whose preference is assumed to be wrong.
        label_smoothing: f64,
    },
    /// APO-zero: `1 - σ(β · x_c) + σ(β · x_r)`. D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7.
    ApoZero,
    /// APO-down: `σ(β · x_c) + 1 - σ(β · h)`. D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8.
    ApoDown,
    /// DiscoPOP: `-(1 - m) · ln σ(β · h) + m · e^(-β · h)` with `m = σ(β · h / tau)`. Lu et al. 2024, arXiv:2406.08414, equation 5.
    Discopop {
        /// The temperature of the mixture, above 0.
        tau: f64,
    },
    /// SimPO: the loss of `Sigmoid` of `β · h' - gamma` in the place of `β · h`, with the `h'` of IPO and a reference of 0. Meng et al. 2024,
    /// arXiv:2405.14734, equation 6.
    Simpo {
        /// The margin by which the chosen reward should exceed the rejected reward.
        gamma: f64,
        /// As for `Sigmoid`.
        label_smoothing: f64,
    },
    /// The second term of ORPO: `-β · ln σ(o_chosen - o_rejected)`, where `o` is the logarithm of the odds of [`log_odds`] of a sequence and the
    /// reference is 0. Hong et al. 2024, arXiv:2403.07691, equations 4 and 7.
    OddsRatio,
    /// The negative log-likelihood of the chosen sequences. The sum over all pairs of the call is divided by the number of their tokens and
    /// multiplied by the number of pairs.
    Sft,
    /// The loss of a reward model: `-ln σ(β · h) + centering · (r_chosen + r_rejected)²`. The rewards `r` of sequences replace
    /// log-probabilities. The margin by which the chosen sequence should be better replaces the reference. Bradley and Terry 1952; the
    /// second term is equation 2 of Eisenstein et al. 2023, arXiv:2312.09244.
    BradleyTerry {
        /// The factor of the term that draws the mean of rewards to 0.
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
    /// `ApoZero` for sequences with labels: KTO with a divergence of 0.
    ApoZeroUnpaired {
        /// The factor of sequences whose label is 1.
        desirable_weight: f64,
        /// The factor of sequences whose label is 0.
        undesirable_weight: f64,
    },
}

/// A loss in a weighted sum of losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreferenceTerm {
    /// The loss.
    pub loss: PreferenceLoss,
    /// The factor of the loss.
    pub weight: f64,
}

impl PreferenceLoss {
    /// Returns the number of sequences that share a loss: 2 for losses of pairs, otherwise 1.
    pub fn sequences(self) -> usize {
        if self.compares() == Comparison::Label { 1 } else { 2 }
    }

    /// Returns whether the loss needs an estimate of the divergence from the reference model.
    pub fn needs_divergence(self) -> bool {
        matches!(self, PreferenceLoss::Kto { .. })
    }

    /// Whether the log-probability of a sequence is its mean over tokens in every formula of the method, so that rewards are means too.
    pub fn has_rewards_of_means(self) -> bool {
        matches!(self, PreferenceLoss::Simpo { .. } | PreferenceLoss::OddsRatio)
    }

    /// What is subtracted from `β · h`.
    pub(super) fn target_margin(self) -> f64 {
        match self {
            PreferenceLoss::Simpo { gamma, .. } => gamma,
            _ => 0.0,
        }
    }

    pub(super) fn compares(self) -> Comparison {
        match self {
            PreferenceLoss::Ipo
            | PreferenceLoss::SigmoidNorm
            | PreferenceLoss::Simpo { .. }
            | PreferenceLoss::OddsRatio => Comparison::PerToken,
            PreferenceLoss::Aot { .. } => Comparison::RankedMargins,
            PreferenceLoss::AotUnpaired { .. } => Comparison::RankedSides,
            PreferenceLoss::Sft => Comparison::Chosen,
            PreferenceLoss::Kto { .. } | PreferenceLoss::ApoZeroUnpaired { .. } => Comparison::Label,
            _ => Comparison::Pair,
        }
    }
}

/// The largest mean log-probability whose odds are computed: the odds of a probability of 1 are infinite.
pub(super) const MOST_CERTAIN: f64 = -1e-6;

/// `ln(p / (1 - p))` of the probability `p` with this mean log-probability of a token, which is at most -1e-6.
pub fn log_odds(mean_log_prob: f64) -> f64 {
    let bounded = mean_log_prob.min(MOST_CERTAIN);
    bounded - Real::ln(1.0 - Real::exp(bounded))
}

/// The two values from which the loss of a sequence is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Comparison {
    /// `x` of both sequences of the pair.
    Pair,
    /// `x` of both sequences of the pair, each divided by the sequence's number of tokens.
    PerToken,
    /// `π_chosen - π_rejected` of the pair, and the `ρ_chosen - ρ_rejected` that has the same rank among all pairs.
    RankedMargins,
    /// `x` of the sequence, and the `x` of the other side that has the same rank among all pairs.
    RankedSides,
    /// The log-probability of the chosen sequence, divided by the mean number of tokens of chosen sequences. There is no second value.
    Chosen,
    /// `x` of the sequence, and its label.
    Label,
}
