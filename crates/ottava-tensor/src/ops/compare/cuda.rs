use super::SUMS;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::dequantize::Layout;
use crate::ops::launch::{self, BLOCK, Defines, kernel_source, readers};
use crate::{DType, Result, Tensor};

/// Side of the tiles in which transposed codes are compared.
const SIDE: usize = 64;

kernel_source!("compare"; SIDE);

/// The types of tensors, and of codes.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("CODE", "e4m3")],
    &[("X", "f32"), ("CODE", "e5m2")],
    &[("X", "bf16"), ("CODE", "e4m3")],
    &[("X", "bf16"), ("CODE", "e5m2")],
    &[("X", "f16"), ("CODE", "e4m3")],
    &[("X", "f16"), ("CODE", "e5m2")],
];

fn kernel(x: DType, codes: DType, entry: &'static str) -> Kernel {
    let of_tensor = match x {
        DType::F16 => 2,
        DType::BF16 => 1,
        _ => 0,
    };
    Kernel { source: &SOURCE, defines: VARIANTS[2 * of_tensor + usize::from(codes == DType::E5M2)], entry }
}

pub(super) fn compare_rows(
    gpu: &CudaDevice,
    x: &Tensor,
    every: usize,
    reference: &Tensor,
    sums: &mut Tensor,
    at: usize,
) -> Result<()> {
    // Checks that the type exists on a GPU.
    launch::storage(x.dtype())?;
    let [rows, columns] = reference.dims("compare: reference")?;
    let grid = readers(gpu, (rows * columns.div_ceil(8)).div_ceil(BLOCK as usize));
    let mut partial = Tensor::empty(x.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let pointers = [partial.device_ptr_mut(), x.device_ptr(), reference.device_ptr()].map(Arg::Ptr);
    let args = [&pointers[..], &[rows, columns, every].map(|size| Arg::U64(size as u64))].concat();
    // SAFETY: `reference` has `rows` rows, `x` has the rows up to `every · (rows − 1)`, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&kernel(x.dtype(), DType::E4M3, "compare_rows"), grid, BLOCK, 0, &args)? };
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
    let pointers = [partial.device_ptr_mut(), x.device_ptr(), reference.device_ptr(), direction.device_ptr()];
    let args = [&pointers.map(Arg::Ptr)[..], &[rows, columns].map(|size| Arg::U64(size as u64))].concat();
    // SAFETY: the three matrices have `rows · columns` elements, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&kernel(x.dtype(), DType::E4M3, "compare_along"), grid, BLOCK, 0, &args)? };
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
    let Layout { rows, columns, .. } = *layout;
    let (entry, pieces) = match is_transposed {
        true => ("compare_transposed", rows.div_ceil(SIDE) * columns.div_ceil(SIDE)),
        false => ("compare_codes", (rows * columns.div_ceil(8)).div_ceil(BLOCK as usize)),
    };
    let grid = readers(gpu, pieces);
    let mut partial = Tensor::empty(matrix.device(), &[grid[0] as usize, SUMS], DType::F64)?;
    let (to, codes_at, scales) = (partial.device_ptr_mut(), codes.device_ptr(), scale_inv.device_ptr());
    let mut args = [to, codes_at, scales, matrix.device_ptr()].map(Arg::Ptr).to_vec();
    args.extend(layout.args());
    // SAFETY: `layout` leads to the codes and scales of as many elements as `matrix` has, and `partial` has room for the sums of each block.
    unsafe { gpu.launch(&kernel(matrix.dtype(), codes.dtype(), entry), grid, BLOCK, 0, &args)? };
    total(gpu, matrix.dtype(), &partial, sums, at)
}

fn total(gpu: &CudaDevice, dtype: DType, partial: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    let into = sums.device_ptr_mut() + (at * SUMS * DType::F64.size()) as u64;
    let blocks = partial.shape()[0];
    let args = [Arg::Ptr(into), Arg::Ptr(partial.device_ptr()), Arg::I32(blocks as i32)];
    // SAFETY: `partial` has as many rows as the count says, and `sums` more than `at`.
    unsafe { gpu.launch(&kernel(dtype, DType::E4M3, "total"), [1, 1, 1], BLOCK, 0, &args) }
}
