use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("random");

pub(super) fn normal(gpu: &CudaDevice, x: &mut Tensor, std: f32, seed: u64, first: u64) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "normal" };
    let n = x.len();
    let args = [Arg::Ptr(x.device_ptr_mut()), Arg::U64(n as u64), Arg::F32(std), Arg::U64(seed), Arg::U64(first)];
    // SAFETY: `x` has `n` elements.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, n), BLOCK, 0, &args) }
}
