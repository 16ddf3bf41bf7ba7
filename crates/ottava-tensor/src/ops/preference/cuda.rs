use super::{PreferenceLoss, PreferenceTargets};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("preference"; SMOOTHED, HINGE, IPO, KTO, CENTERED);

/// The formulas of the kernel.
const SMOOTHED: i32 = 0;
const HINGE: i32 = 1;
const IPO: i32 = 2;
const KTO: i32 = 3;
const CENTERED: i32 = 4;

pub(super) fn sequence_log_probs(gpu: &CudaDevice, losses: &Tensor, sums: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "sequence_log_probs" };
    let args =
        [Arg::Ptr(sums.device_ptr_mut()), Arg::Ptr(losses.device_ptr()), Arg::I32((losses.len() / sums.len()) as i32)];
    // SAFETY: `losses` has as many elements per element of `sums` as the last argument says.
    unsafe { gpu.launch(&kernel, [sums.len() as u32, 1, 1], BLOCK, 0, &args) }
}

#[expect(clippy::too_many_arguments, reason = "the inputs and outputs of the op")]
pub(super) fn preference_loss(
    gpu: &CudaDevice,
    loss: PreferenceLoss,
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    factors: &mut Tensor,
) -> Result<()> {
    // The factors of the terms of a loss, or of the two labels.
    let (formula, first, second) = match loss {
        PreferenceLoss::Sigmoid { label_smoothing } => (SMOOTHED, 1.0 - label_smoothing, label_smoothing),
        PreferenceLoss::Robust { label_smoothing } => {
            let all = 1.0 - 2.0 * label_smoothing;
            (SMOOTHED, (1.0 - label_smoothing) / all, -label_smoothing / all)
        }
        PreferenceLoss::Hinge => (HINGE, 0.0, 0.0),
        PreferenceLoss::Ipo => (IPO, 0.5 / beta, 0.0),
        PreferenceLoss::BradleyTerry { centering } => (CENTERED, 1.0, centering),
        PreferenceLoss::Kto { desirable_weight, undesirable_weight } => (KTO, desirable_weight, undesirable_weight),
    };
    let PreferenceTargets { reference, lengths, labels, kl } = targets;
    let written = [losses.device_ptr_mut(), factors.device_ptr_mut()].map(Arg::Ptr);
    let read = [policy, reference, lengths, labels, kl, scale].map(|tensor| Arg::Ptr(tensor.device_ptr()));
    let numbers = [beta, first, second].map(|number| Arg::F32(number as f32));
    let sizes = [formula, (factors.len() / losses.len()) as i32].map(Arg::I32);
    let args = [&written[..], &read, &numbers, &sizes].concat();
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "preference_loss" };
    // SAFETY: `losses` and the targets have an element per block, `kl` and `scale` one, and `factors` as many per block as the last argument
    // says; of pairs, the number of blocks is even, checked by the op.
    unsafe { gpu.launch(&kernel, [losses.len() as u32, 1, 1], BLOCK, 0, &args) }
}
