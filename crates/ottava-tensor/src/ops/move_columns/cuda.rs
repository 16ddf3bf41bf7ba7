use super::ColumnRuns;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("move_columns");

/// Bytes that a thread moves at once where all runs consist of them.
const WORD: usize = 16;

pub(super) fn move_columns(
    gpu: &CudaDevice,
    from: &Tensor,
    a: ColumnRuns,
    to: &mut Tensor,
    b: ColumnRuns,
    count: usize,
    width: usize,
) -> Result<()> {
    let [rows, columns] = to.dims("move_columns: to")?;
    let sizes = [columns, from.shape()[1], b.first, b.step, a.first, a.step, width];
    let pointers = [to.device_ptr_mut(), from.device_ptr()];
    let elements = WORD / from.dtype().size();
    let is_wide = sizes.iter().all(|size| size.is_multiple_of(elements))
        && pointers.iter().all(|at| at.is_multiple_of(WORD as u64));
    let (unit, entry) = if is_wide { (elements, "move_wide_columns") } else { (1, "move_columns") };
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(from.dtype())?, entry };
    let [columns, of_from, to_first, to_step, from_first, from_step, width] = sizes.map(|size| size / unit);
    let sizes = [columns, of_from, to_first, to_step, from_first, from_step, count, width];
    let args = [&pointers.map(Arg::Ptr)[..], &sizes.map(|size| Arg::I32(size as i32))].concat();
    // SAFETY: both matrices have `rows` rows of the type in the defines, and the contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn sum_columns(gpu: &CudaDevice, x: &Tensor, runs: ColumnRuns, count: usize, y: &mut Tensor) -> Result<()> {
    let [rows, width] = y.dims("sum_columns: y")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "sum_columns" };
    let mut args = vec![Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr())];
    args.extend([rows, x.shape()[1], runs.first, runs.step, count, width].map(|size| Arg::I32(size as i32)));
    let blocks = (rows * width.div_ceil(8)).div_ceil(BLOCK as usize);
    // SAFETY: `y` has a row for each of `x`, and the contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [blocks as u32, 1, 1], BLOCK, 0, &args) }
}
