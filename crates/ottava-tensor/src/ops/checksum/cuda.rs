use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source, readers};
use crate::{DType, Result, Tensor};

kernel_source!("checksum");

/// Adds the checksum of `x` to number `i` of `sums`.
pub(super) fn checksum(gpu: &CudaDevice, x: &Tensor, sums: &mut Tensor, i: usize) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "checksum" };
    let sum = sums.device_ptr_mut() + (i * DType::I64.size()) as u64;
    let args = [Arg::Ptr(sum), Arg::Ptr(x.device_ptr()), Arg::U64(x.bytes() as u64)];
    // SAFETY: `x` has as many bytes, and `sums` more than `i` elements.
    unsafe { gpu.launch(&kernel, readers(gpu, x.bytes().div_ceil(size_of::<u64>())), BLOCK, 0, &args) }
}
