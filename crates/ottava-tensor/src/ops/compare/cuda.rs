use super::SUMS;
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::dequantize::Layout;
use crate::ops::launch::{self, BLOCK, Defines, readers};
use crate::{DType, Result, Tensor};

/// The side of the tiles in which transposed codes are compared.
const SIDE: usize = 64;

kernels! {
    static SOURCE = { file: "compare", constants: [SIDE], variants: VARIANTS };
    kernel compare_rows(partial: *mut f64, x: *const X, reference: *const X, rows: u64, columns: u64, every: u64);
    kernel compare_along(partial: *mut f64, x: *const X, reference: *const X, direction: *const X, rows: u64, columns: u64);
    kernel compare_codes, compare_transposed(
        partial: *mut f64, codes: *const CODE, scales: *const f32, x: *const X, rows: u64, columns: u64, pitch: u64, rows_shared: u64,
        columns_shared: u64, row_scales: u64, column_scales: u64
    );
    kernel total(sums: *mut f64, partial: *const f64, n: i32);
}

/// The types of tensors and the types of codes.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("CODE", "e4m3")],
    &[("X", "f32"), ("CODE", "e5m2")],
    &[("X", "bf16"), ("CODE", "e4m3")],
    &[("X", "bf16"), ("CODE", "e5m2")],
    &[("X", "f16"), ("CODE", "e4m3")],
    &[("X", "f16"), ("CODE", "e5m2")],
];

fn variant(x: DType, codes: DType, entry: Entry) -> Kernel {
    let of_tensor = match x {
        DType::F16 => 2,
        DType::BF16 => 1,
        _ => 0,
    };
    SOURCE.kernel(VARIANTS[2 * of_tensor + usize::from(codes == DType::E5M2)], entry)
}

pub(super) fn compare_rows(
    gpu: &CudaDevice,
    x: &Tensor,
    every: usize,
    reference: &Tensor,
    sums: &mut Tensor,
    at: usize,
) -> Result<()> {
    // Errors if the type does not exist on a GPU.
    launch::storage(x.dtype())?;
    let [rows, columns] = reference.dims("compare: reference")?;
    let grid = readers(gpu, (rows * columns.div_ceil(8)).div_ceil(BLOCK as usize));
    let mut partial = Tensor::empty(x.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let entry = kernel::compare_rows(&mut partial, x, reference, rows, columns, every);
    // SAFETY: `reference` has `rows` rows, `x` has the rows up to `every · (rows − 1)`, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&variant(x.dtype(), DType::E4M3, entry), grid, BLOCK, 0)? };
    total(gpu, x.dtype(), &partial, sums, at)
}

pub(super) fn compare_along(
    gpu: &CudaDevice,
    x: &Tensor,
    reference: &Tensor,
    direction: &Tensor,
    sums: &mut Tensor,
    at: usize,
) -> Result<()> {
    launch::storage(x.dtype())?;
    let [rows, columns] = x.dims("compare: x")?;
    let grid = readers(gpu, rows);
    let mut partial = Tensor::empty(x.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let entry = kernel::compare_along(&mut partial, x, reference, direction, rows, columns);
    // SAFETY: the three matrices have `rows · columns` elements, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&variant(x.dtype(), DType::E4M3, entry), grid, BLOCK, 0)? };
    total(gpu, x.dtype(), &partial, sums, at)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn compare_codes(
    gpu: &CudaDevice,
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    is_transposed: bool,
    matrix: &Tensor,
    sums: &mut Tensor,
    at: usize,
) -> Result<()> {
    let Layout { rows, columns, pitch, shared, scale_steps } = *layout;
    let entry = if is_transposed { kernel::compare_transposed } else { kernel::compare_codes };
    let pieces = match is_transposed {
        true => rows.div_ceil(SIDE) * columns.div_ceil(SIDE),
        false => (rows * columns.div_ceil(8)).div_ceil(BLOCK as usize),
    };
    let grid = readers(gpu, pieces);
    let mut partial = Tensor::empty(matrix.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let ([rows_shared, columns_shared], [row_scales, column_scales]) = (shared, scale_steps);
    let entry = entry(
        &mut partial,
        codes,
        scale_inv,
        matrix,
        rows,
        columns,
        pitch,
        rows_shared,
        columns_shared,
        row_scales,
        column_scales,
    );
    // SAFETY: `layout` describes the codes and scales of as many elements as `matrix` has; `partial` has room for the sums of each block.
    unsafe { gpu.launch(&variant(matrix.dtype(), codes.dtype(), entry), grid, BLOCK, 0)? };
    total(gpu, matrix.dtype(), &partial, sums, at)
}

fn total(gpu: &CudaDevice, dtype: DType, partial: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    let into = sums.device_ptr_mut() + (at * SUMS * DType::F64.size()) as u64;
    let blocks = partial.shape()[0];
    let entry = kernel::total(AddressMut(into), partial, blocks);
    // SAFETY: `partial` has the given number of rows, and `sums` has more than `at` rows.
    unsafe { gpu.launch(&variant(dtype, DType::E4M3, entry), [1, 1, 1], BLOCK, 0) }
}
