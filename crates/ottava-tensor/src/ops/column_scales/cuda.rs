use super::Factor;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("column_scales");

/// Rows per block.
const CHUNK: usize = 128;

pub(super) fn column_scales(gpu: &CudaDevice, x: &Tensor, scales: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("column_scales: x")?;
    let defines = launch::storage(x.dtype())?;
    let kernel = Kernel { source: &SOURCE, defines, entry: "column_amaxes" };
    let column_blocks = columns.div_ceil(BLOCK as usize).max(1) as u32;
    let args = [
        Arg::Ptr(scales.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::I32(CHUNK as i32),
    ];
    // SAFETY: `x` is `rows · columns` elements and `scales` `columns`, which are zero.
    unsafe { gpu.launch(&kernel, [column_blocks, rows.div_ceil(CHUNK).max(1) as u32, 1], BLOCK, 0, &args)? };
    let kernel = Kernel { source: &SOURCE, defines, entry: "scales_of_amaxes" };
    let args = [Arg::Ptr(scales.device_ptr_mut()), Arg::I32(columns as i32)];
    // SAFETY: `scales` is `columns` elements.
    unsafe { gpu.launch(&kernel, [column_blocks, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn multiply(gpu: &CudaDevice, x: &Tensor, scales: &Tensor, factor: Factor, y: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("scale_columns: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "multiply_columns" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(scales.device_ptr()),
        Arg::I32(columns as i32),
        Arg::I32((factor == Factor::Inverse) as i32),
    ];
    // SAFETY: `x` and `y` are `rows · columns` elements of one type and `scales` `columns`, F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn add_unscaled_columns(gpu: &CudaDevice, sum: &mut Tensor, x: &Tensor, scales: &Tensor) -> Result<()> {
    let [rows, columns] = x.dims("add_unscaled_columns: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(sum.dtype())?, entry: "add_unscaled_columns" };
    let args = [
        Arg::Ptr(sum.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(scales.device_ptr()),
        Arg::I32(columns as i32),
    ];
    // SAFETY: `sum` and `x` are `rows · columns` elements, `x` and the `columns` scales in F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}
