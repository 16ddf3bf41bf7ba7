use crate::cuda::CudaDevice;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::launch::{BLOCK, UNTYPED, readers};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "checksum", variants: UNTYPED };
    kernel checksum(sum: *mut u64, x: *const u8, bytes: u64);
}

/// Adds the checksum of `x` to element `i` of `sums`.
pub(super) fn checksum(gpu: &CudaDevice, x: &Tensor, sums: &mut Tensor, i: usize) -> Result<()> {
    let sum = sums.device_ptr_mut() + (i * DType::I64.size()) as u64;
    let kernel = SOURCE.kernel(&[], kernel::checksum(AddressMut(sum), x, x.bytes()));
    // SAFETY: `x` has the given number of bytes, and `sums` has more than `i` elements.
    unsafe { gpu.launch(&kernel, readers(gpu, x.bytes().div_ceil(size_of::<u64>())), BLOCK, 0) }
}
