use super::IGNORE_INDEX;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "negate_targets", constants: [IGNORE_INDEX], variants: launch::STORAGE };
    kernel negate_targets(y: *mut X, x: *const f32, targets: *const i32, tokens: i32, stride: i32);
}

pub(super) fn negate_targets(gpu: &CudaDevice, x: &Tensor, targets: &Tensor, y: &mut Tensor) -> Result<()> {
    let (tokens, defines) = (y.len(), launch::storage(y.dtype())?);
    let kernel = SOURCE.kernel(defines, kernel::negate_targets(y, x, targets, tokens, x.len() > 1));
    // SAFETY: `y` and `targets` have `tokens` elements. `x` has `tokens` elements, or one element if its stride, the last argument, is 0.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, tokens), BLOCK, 0) }
}
