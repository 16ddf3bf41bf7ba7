use super::ColumnRuns;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("move_columns");

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
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(from.dtype())?, entry: "move_columns" };
    let mut args = vec![Arg::Ptr(to.device_ptr_mut()), Arg::Ptr(from.device_ptr())];
    let sizes = [columns, from.shape()[1], b.first, b.step, a.first, a.step, count, width];
    args.extend(sizes.map(|size| Arg::I32(size as i32)));
    // SAFETY: both matrices have `rows` rows of the type in the defines, and the contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn sum_columns(gpu: &CudaDevice, x: &Tensor, runs: ColumnRuns, count: usize, y: &mut Tensor) -> Result<()> {
    let [rows, width] = y.dims("sum_columns: y")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "sum_columns" };
    let mut args = vec![Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr())];
    args.extend([x.shape()[1], runs.first, runs.step, count, width].map(|size| Arg::I32(size as i32)));
    // SAFETY: `y` has a row for each of `x`, and the contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0, &args) }
}
