use super::{Correction, IGNORE_INDEX, Inputs, KlEstimator, PolicyBound, PolicyLoss, PolicyTargets};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = {
        file: "policy", constants: [IGNORE_INDEX, CLIP, WEIGHT, K1, K2, K3], variants: UNTYPED
    };
    kernel policy_loss(
        bounded: *mut f32, factors: *mut f32, losses: *const f32, targets: *const i32, old: *const f32, reference: *const f32,
        advantages: *const f32, corrections: *const f32, weights: *const f32, starts: *const i32, scale: *const f32, lowest: f32, highest: f32, most: f32,
        beta: f32, least: f32, largest: f32, bound: i32, of_sequence: i32, kl: i32, corrects: i32, by_sequence: i32, is_mask: i32, tokens: i32
    );
}

/// The bounds that the kernel distinguishes; others bound nothing.
const CLIP: i32 = 0;
const WEIGHT: i32 = 1;
const UNBOUNDED: i32 = 2;

/// The estimators; others are the weighted k3.
const K1: i32 = 0;
const K2: i32 = 1;
const K3: i32 = 2;
const WEIGHTED_K3: i32 = 3;

pub(super) fn policy_loss(
    gpu: &CudaDevice,
    how: &PolicyLoss,
    of: Inputs,
    bounded: &mut Tensor,
    factors: &mut Tensor,
) -> Result<()> {
    let (bound, [lowest, highest, most]) = match how.bound {
        PolicyBound::Clip { low, high, most } => (CLIP, [1.0 - low, 1.0 + high, most.min(f64::from(f32::MAX))]),
        PolicyBound::Weight { low, high } => (WEIGHT, [1.0 - low, 1.0 + high, f64::from(f32::MAX)]),
        PolicyBound::None => (UNBOUNDED, [0.0; 3]),
    };
    let kl = match how.kl {
        KlEstimator::K1 => K1,
        KlEstimator::K2 => K2,
        KlEstimator::K3 => K3,
        KlEstimator::WeightedK3 => WEIGHTED_K3,
    };
    let Correction { of_sequence: by_sequence, is_mask, min, max } =
        how.correction.unwrap_or(Correction { of_sequence: false, is_mask: false, min: 0.0, max: 1.0 });
    let PolicyTargets { old, reference, advantages, corrections, weights, sequences } = of.known;
    let tokens = bounded.len();
    let entry = kernel::policy_loss(
        bounded,
        factors,
        of.losses,
        of.targets,
        old,
        reference,
        advantages,
        corrections,
        weights,
        sequences,
        of.scale,
        lowest,
        highest,
        most,
        how.beta,
        min,
        max.min(f64::from(f32::MAX)),
        bound,
        i32::from(how.of_sequence),
        kl,
        i32::from(how.correction.is_some()),
        i32::from(by_sequence),
        i32::from(is_mask),
        tokens,
    );
    let kernel = SOURCE.kernel(&[], entry);
    // SAFETY: each tensor has `tokens` elements, `scale` one, and `sequences` one more than there are blocks. The kernel bounds offsets by `tokens`.
    unsafe { gpu.launch(&kernel, [(sequences.len() - 1) as u32, 1, 1], BLOCK, 0) }
}
