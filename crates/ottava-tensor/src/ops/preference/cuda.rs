use super::loss::{Comparison, MOST_CERTAIN};
use super::{PreferenceLoss, PreferenceTargets, PreferenceTerm};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = {
        file: "preference",
        constants: [
            SMOOTHED, HINGE, EXO, DISCOPOP, IPO, SPPO, NCA, BCO, APO_ZERO, APO_DOWN, SFT, ODDS, CENTERED, KTO, UNSHIFTED,
            PER_TOKEN, RANKED_MARGINS, RANKED_SIDES, CHOSEN
        ],
        variants: UNTYPED
    };
    kernel sequence_log_probs(sums: *mut f32, losses: *const f32, tokens: i32);
    kernel preference_loss(
        losses: *mut f32, factors: *mut f32, policy: *const f32, reference: *const f32, lengths: *const f32, labels: *const f32,
        kl: *const f32, scale: *const f32, beta: f32, first: f32, second: f32, margin: f32, weight: f32, formula: i32,
        compares: i32, adds: i32, tokens: i32
    );
}

/// The formulas of the kernel.
const SMOOTHED: i32 = 0;
const HINGE: i32 = 1;
const EXO: i32 = 2;
const DISCOPOP: i32 = 3;
const IPO: i32 = 4;
const SPPO: i32 = 5;
const NCA: i32 = 6;
const BCO: i32 = 7;
const APO_ZERO: i32 = 8;
const APO_DOWN: i32 = 9;
const SFT: i32 = 10;
const CENTERED: i32 = 11;
const KTO: i32 = 12;
const UNSHIFTED: i32 = 13;
const ODDS: i32 = 14;

/// The comparisons that the kernel distinguishes.
const PER_TOKEN: i32 = Comparison::PerToken as i32;
const RANKED_MARGINS: i32 = Comparison::RankedMargins as i32;
const RANKED_SIDES: i32 = Comparison::RankedSides as i32;
const CHOSEN: i32 = Comparison::Chosen as i32;

/// Returns the formula of a loss in the kernel, and its two constants.
fn formula(loss: PreferenceLoss, beta: f64) -> (i32, [f64; 2]) {
    match loss {
        PreferenceLoss::Sigmoid { label_smoothing }
        | PreferenceLoss::Simpo { label_smoothing, .. }
        | PreferenceLoss::Aot { label_smoothing }
        | PreferenceLoss::AotUnpaired { label_smoothing } => (SMOOTHED, [1.0 - label_smoothing, label_smoothing]),
        PreferenceLoss::Robust { label_smoothing } => {
            let all = 1.0 - 2.0 * label_smoothing;
            (SMOOTHED, [(1.0 - label_smoothing) / all, -label_smoothing / all])
        }
        PreferenceLoss::SigmoidNorm => (SMOOTHED, [1.0, 0.0]),
        PreferenceLoss::Hinge => (HINGE, [0.0; 2]),
        PreferenceLoss::ExoPair { label_smoothing } => (EXO, [(-label_smoothing).ln_1p(), label_smoothing.ln()]),
        PreferenceLoss::Discopop { tau } => (DISCOPOP, [tau, 0.0]),
        PreferenceLoss::Ipo => (IPO, [0.5 / beta, 0.0]),
        PreferenceLoss::SppoHard => (SPPO, [0.5 / beta, 0.0]),
        PreferenceLoss::NcaPair => (NCA, [0.0; 2]),
        PreferenceLoss::BcoPair => (BCO, [0.0; 2]),
        PreferenceLoss::ApoZero => (APO_ZERO, [0.0; 2]),
        PreferenceLoss::ApoDown => (APO_DOWN, [0.0; 2]),
        PreferenceLoss::Sft => (SFT, [0.0; 2]),
        PreferenceLoss::OddsRatio => (ODDS, [MOST_CERTAIN, 0.0]),
        PreferenceLoss::BradleyTerry { centering } => (CENTERED, [1.0, centering]),
        PreferenceLoss::Kto { desirable_weight, undesirable_weight } => (KTO, [desirable_weight, undesirable_weight]),
        PreferenceLoss::ApoZeroUnpaired { desirable_weight, undesirable_weight } => {
            (UNSHIFTED, [desirable_weight, undesirable_weight])
        }
    }
}

pub(super) fn sequence_log_probs(gpu: &CudaDevice, losses: &Tensor, sums: &mut Tensor) -> Result<()> {
    let (sequences, tokens) = (sums.len(), losses.len() / sums.len());
    let kernel = SOURCE.kernel(&[], kernel::sequence_log_probs(sums, losses, tokens));
    // SAFETY: `losses` has as many elements per element of `sums` as the last argument says.
    unsafe { gpu.launch(&kernel, [sequences as u32, 1, 1], BLOCK, 0) }
}

#[expect(clippy::too_many_arguments, reason = "the inputs and outputs of the op")]
pub(super) fn preference_loss(
    gpu: &CudaDevice,
    terms: &[PreferenceTerm],
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    factors: &mut Tensor,
) -> Result<()> {
    let PreferenceTargets { reference, lengths, labels, kl } = targets;
    let (sequences, tokens) = (losses.len(), factors.len() / losses.len());
    for (place, &PreferenceTerm { loss, weight }) in terms.iter().enumerate() {
        let (formula, [first, second]) = formula(loss, beta);
        let (losses, factors) = (&mut *losses, &mut *factors);
        let entry = kernel::preference_loss(
            losses,
            factors,
            policy,
            reference,
            lengths,
            labels,
            kl,
            scale,
            beta,
            first,
            second,
            loss.target_margin(),
            weight,
            formula,
            loss.compares() as i32,
            place > 0,
            tokens,
        );
        let kernel = SOURCE.kernel(&[], entry);
        // SAFETY: `losses` and the targets have one element per block, `kl` and `scale` have one, and `factors` has as many per block as the last
        // argument says. The op has checked that the number of blocks is even for losses of pairs.
        unsafe { gpu.launch(&kernel, [sequences as u32, 1, 1], BLOCK, 0)? }
    }
    Ok(())
}
