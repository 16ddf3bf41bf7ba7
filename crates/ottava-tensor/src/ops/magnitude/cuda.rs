use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::bias::add_column_sums;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("magnitude");

pub(super) fn squares(gpu: &CudaDevice, w: &Tensor, change: Option<&Tensor>, squares: &mut Tensor) -> Result<()> {
    let [rows, columns] = w.dims("row_squares: w")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(w.dtype())?, entry: "row_squares" };
    let args = [
        Arg::Ptr(squares.device_ptr_mut()),
        Arg::Ptr(w.device_ptr()),
        Arg::Ptr(change.map_or(0, Tensor::device_ptr)),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
    ];
    // SAFETY: `w` and the change, if there is one, are `rows · columns` elements of one type; the squares are `rows`, F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn finish(
    gpu: &CudaDevice,
    squares: &Tensor,
    magnitude: Option<&Tensor>,
    result: &mut Tensor,
) -> Result<()> {
    let rows = squares.len();
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(squares.dtype())?, entry: "magnitude_factors" };
    let args = [
        Arg::Ptr(result.device_ptr_mut()),
        Arg::Ptr(squares.device_ptr()),
        Arg::Ptr(magnitude.map_or(0, Tensor::device_ptr)),
        Arg::I32(rows as i32),
    ];
    // SAFETY: the result, the squares and the magnitudes, if there are any, are `rows` elements, F32.
    unsafe { gpu.launch(&kernel, [(rows as u32).div_ceil(BLOCK).max(1), 1, 1], BLOCK, 0, &args) }
}

pub(super) fn gradient(
    gpu: &CudaDevice,
    dy: &Tensor,
    x: &Tensor,
    magnitude: &Tensor,
    dmagnitude: &mut Tensor,
) -> Result<()> {
    let shape = dy.dims("magnitude_gradient: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "partial_gradients" };
    // SAFETY: `dy` and `x` are `rows · columns` elements of one type and `magnitude` `columns`, F32.
    unsafe { add_column_sums(gpu, &kernel, &[dy, x, magnitude], shape, dmagnitude) }
}
