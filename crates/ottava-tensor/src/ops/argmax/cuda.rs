use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::kernel_source;
use crate::{Result, Tensor};

kernel_source!("argmax"; BLOCKS);

/// Blocks of a row, and their threads.
const BLOCKS: u32 = 8;
const THREADS: u32 = 512;

pub(super) fn argmax(gpu: &CudaDevice, x: &Tensor, at: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("argmax: x")?;
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "argmax" };
    let args = [Arg::Ptr(at.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::I32(columns as i32)];
    // SAFETY: `x` is `rows · columns`, `at` is `rows`.
    unsafe { gpu.launch_early(&kernel, [BLOCKS, rows as u32, 1], THREADS, 0, &args) }
}
