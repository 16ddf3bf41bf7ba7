use super::{IGNORE_INDEX, ValueLoss, ValueTargets};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "value", constants: [IGNORE_INDEX], variants: UNTYPED };
    kernel value_loss(
        losses: *mut f32, gradient: *mut f32, values: *const f32, targets: *const i32, old: *const f32, returns: *const f32, weights: *const f32,
        scale: *const f32, coefficient: f32, range: f32, tokens: i32
    );
}

#[expect(clippy::too_many_arguments, reason = "the inputs and outputs of the op")]
pub(super) fn value_loss(
    gpu: &CudaDevice,
    how: &ValueLoss,
    values: &Tensor,
    targets: &Tensor,
    known: ValueTargets,
    scale: &Tensor,
    losses: &mut Tensor,
    gradient: &mut Tensor,
) -> Result<()> {
    let tokens = values.len();
    let entry = kernel::value_loss(
        losses,
        gradient,
        values,
        targets,
        known.old,
        known.returns,
        known.weights,
        scale,
        how.coefficient,
        how.range.min(f64::from(f32::MAX)),
        tokens,
    );
    let kernel = SOURCE.kernel(&[], entry);
    // SAFETY: each tensor has `tokens` elements, and `scale` one.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, tokens), BLOCK, 0) }
}
