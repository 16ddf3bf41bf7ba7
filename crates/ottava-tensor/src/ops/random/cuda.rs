use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "random", variants: UNTYPED };
    kernel normal(x: *mut f32, n: u64, std: f32, seed: u64, first: u64);
}

pub(super) fn normal(gpu: &CudaDevice, x: &mut Tensor, std: f32, seed: u64, first: u64) -> Result<()> {
    let n = x.len();
    let kernel = SOURCE.kernel(&[], kernel::normal(x, n, std, seed, first));
    // SAFETY: `x` has `n` elements.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, n), BLOCK, 0) }
}
