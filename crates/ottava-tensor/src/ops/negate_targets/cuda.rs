use super::IGNORE_INDEX;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("negate_targets"; IGNORE_INDEX);

pub(super) fn negate_targets(gpu: &CudaDevice, x: &Tensor, targets: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(y.dtype())?, entry: "negate_targets" };
    let tokens = y.len();
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(i32::from(x.len() > 1)),
    ];
    // SAFETY: `y` and `targets` have `tokens` elements, and `x` as many, or one if the last argument, its stride, is 0.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, tokens), BLOCK, 0, &args) }
}
