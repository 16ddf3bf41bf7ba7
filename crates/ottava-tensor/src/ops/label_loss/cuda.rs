use super::{IGNORE_INDEX, LabelLoss};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::UNTYPED;
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "label_loss", constants: [IGNORE_INDEX, SINGLE_LABEL, MULTI_LABEL, REGRESSION], variants: UNTYPED };
    kernel label_loss(losses: *mut f32, scores: *mut f32, targets: *const i32, labels: *const f32, scale: *const f32, count: i32, loss: i32);
}

/// The losses that the kernel distinguishes.
const SINGLE_LABEL: i32 = LabelLoss::SingleLabel as i32;
const MULTI_LABEL: i32 = LabelLoss::MultiLabel as i32;
const REGRESSION: i32 = LabelLoss::Regression as i32;

/// Most tokens are ignored, and most classifiers have few labels, so a block is small.
const THREADS: u32 = 64;

pub(super) fn label_loss(
    gpu: &CudaDevice,
    loss: LabelLoss,
    scores: &mut Tensor,
    targets: &Tensor,
    labels: &Tensor,
    scale: &Tensor,
    losses: &mut Tensor,
) -> Result<()> {
    let (tokens, count) = (losses.len(), labels.shape()[1]);
    let kernel = SOURCE.kernel(&[], kernel::label_loss(losses, scores, targets, labels, scale, count, loss as i32));
    // SAFETY: `losses` and `targets` have one element per block, and `scores` `count` per block. Each target that is not ignored is a row of `labels`,
    // which has `count` elements per row. `scale` has one element.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0) }
}
