use super::SUMS;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source, readers};
use crate::{DType, Result, Tensor};

kernel_source!("compare");

/// The types of tensors.
pub(crate) const VARIANTS: &[Defines] = &[&[("X", "f32")], &[("X", "bf16")]];

pub(super) fn compare(gpu: &CudaDevice, x: &Tensor, reference: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    // Checks that the type exists on a GPU.
    launch::storage(x.dtype())?;
    let defines = VARIANTS[usize::from(x.dtype() == DType::BF16)];
    let grid = readers(gpu, x.len().div_ceil(8 * BLOCK as usize));
    let mut partial = Tensor::empty(x.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let (x, reference, n) = (x.device_ptr(), reference.device_ptr(), x.len());
    let args = [Arg::Ptr(partial.device_ptr_mut()), Arg::Ptr(x), Arg::Ptr(reference), Arg::U64(n as u64)];
    // SAFETY: both tensors have `n` elements, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&Kernel { source: &SOURCE, defines, entry: "compare" }, grid, BLOCK, 0, &args)? };
    let into = sums.device_ptr_mut() + (at * SUMS * DType::F64.size()) as u64;
    let args = [Arg::Ptr(into), Arg::Ptr(partial.device_ptr()), Arg::I32(grid[0] as i32)];
    // SAFETY: `partial` has as many rows as the count says, and `sums` more than `at`.
    unsafe { gpu.launch(&Kernel { source: &SOURCE, defines, entry: "total" }, [1, 1, 1], BLOCK, 0, &args) }
}
