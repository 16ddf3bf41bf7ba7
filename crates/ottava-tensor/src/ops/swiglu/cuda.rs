use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("swiglu");

pub(super) fn swiglu(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::U64(y.len() as u64),
        Arg::I32(y.shape()[1] as i32),
    ];
    // SAFETY: `x` has rows of twice the width of those of `y`, and as many.
    unsafe { gpu.launch(&kernel, launch::elements(y.len()), BLOCK, 0, &args) }
}

pub(super) fn swiglu_backward(gpu: &CudaDevice, dy: &Tensor, x: &Tensor, dx: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu_backward" };
    let args = [
        Arg::Ptr(dx.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(x.device_ptr()),
        Arg::U64(dy.len() as u64),
        Arg::I32(dy.shape()[1] as i32),
    ];
    // SAFETY: `x` and `dx` have rows of twice the width of those of `dy`, and as many.
    unsafe { gpu.launch(&kernel, launch::elements(dy.len()), BLOCK, 0, &args) }
}
