use super::Factor;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "column_scales", variants: launch::STORAGE };
    kernel column_amaxes(amax: *mut f32, x: *const X, rows: i32, columns: i32, chunk: i32);
    kernel scales_of_amaxes(scales: *mut f32, columns: i32);
    kernel multiply_columns(y: *mut X, x: *const X, scales: *const f32, columns: i32, inverse: i32);
    kernel add_unscaled_columns(sum: *mut X, x: *const f32, scales: *const f32, columns: i32);
}

/// The number of rows per block.
const CHUNK: usize = 128;

pub(super) fn column_scales(gpu: &CudaDevice, x: &Tensor, scales: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("column_scales: x")?;
    let defines = launch::storage(x.dtype())?;
    let column_blocks = columns.div_ceil(BLOCK as usize).max(1) as u32;
    let kernel = SOURCE.kernel(defines, kernel::column_amaxes(&mut *scales, x, rows, columns, CHUNK));
    // SAFETY: `x` has `rows · columns` elements. `scales` has `columns` elements, which are zero.
    unsafe { gpu.launch(&kernel, [column_blocks, rows.div_ceil(CHUNK).max(1) as u32, 1], BLOCK, 0)? };
    let kernel = SOURCE.kernel(defines, kernel::scales_of_amaxes(scales, columns));
    // SAFETY: `scales` has `columns` elements.
    unsafe { gpu.launch(&kernel, [column_blocks, 1, 1], BLOCK, 0) }
}

pub(super) fn multiply(gpu: &CudaDevice, x: &Tensor, scales: &Tensor, factor: Factor, y: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("scale_columns: x")?;
    let entry = kernel::multiply_columns(y, x, scales, columns, factor == Factor::Inverse);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x` and `y` have `rows · columns` elements of one type; `scales` has `columns`, F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn add_unscaled_columns(gpu: &CudaDevice, sum: &mut Tensor, x: &Tensor, scales: &Tensor) -> Result<()> {
    let [rows, columns] = x.dims("add_unscaled_columns: x")?;
    let defines = launch::storage(sum.dtype())?;
    let kernel = SOURCE.kernel(defines, kernel::add_unscaled_columns(sum, x, scales, columns));
    // SAFETY: `sum` and `x` have `rows · columns` elements and `scales` has `columns`; `x` and `scales` are F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}
