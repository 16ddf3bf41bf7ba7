use super::ColumnRuns;
use crate::cuda::CudaDevice;
use crate::ops::declaration::{Address, AddressMut, kernels};
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "move_columns", variants: launch::STORAGE };
    kernel move_columns, move_wide_columns(
        to: *mut void, from: *const void, to_columns: i32, from_columns: i32, to_first: i32, to_step: i32, from_first: i32, from_step: i32,
        count: i32, width: i32
    );
    kernel sum_columns(y: *mut X, x: *const X, rows: i32, columns: i32, first: i32, step: i32, count: i32, width: i32);
}

/// The number of bytes that a thread moves at once, if all runs consist of whole words of this size.
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
    let entry = if is_wide { kernel::move_wide_columns } else { kernel::move_columns };
    let unit = if is_wide { elements } else { 1 };
    let [columns, of_from, to_first, to_step, from_first, from_step, width] = sizes.map(|size| size / unit);
    let [to, at] = pointers;
    let entry =
        entry(AddressMut(to), Address(at), columns, of_from, to_first, to_step, from_first, from_step, count, width);
    let kernel = SOURCE.kernel(launch::storage(from.dtype())?, entry);
    // SAFETY: both matrices have `rows` rows of the type in the defines. The contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn sum_columns(gpu: &CudaDevice, x: &Tensor, runs: ColumnRuns, count: usize, y: &mut Tensor) -> Result<()> {
    let [rows, width] = y.dims("sum_columns: y")?;
    let entry = kernel::sum_columns(y, x, rows, x.shape()[1], runs.first, runs.step, count, width);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    let blocks = (rows * width.div_ceil(8)).div_ceil(BLOCK as usize);
    // SAFETY: `y` has a row for each row of `x`. The contract has checked that all runs lie within them.
    unsafe { gpu.launch(&kernel, [blocks as u32, 1, 1], BLOCK, 0) }
}
