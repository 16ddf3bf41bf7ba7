use super::{CastStatistics, Hadamard, SIGNS, TRANSFORMED};
use crate::cuda::CudaDevice;
use crate::granularity::Microscaling;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::launch::{BLOCK, Defines, variant};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "microscaling", variants: VARIANTS };
    kernel quantize_mx(
        codes: *mut CODE, scales: *mut f32, x: *const X, rows: u64, columns: u64, padded_rows: u64, pitch: u64, amax: *mut f32,
        saturated: *mut i64, underflowed: *mut i64, elements: *mut i64
    );
    kernel quantize_nvfp4(
        codes: *mut e4m3, scales: *mut f32, x: *const X, tensor_amax: *const f32, rows: u64, columns: u64, padded_rows: u64, pitch: u64,
        squares: i32, stochastic: i32, scales_rows: i32, amax: *mut f32, saturated: *mut i64, underflowed: *mut i64, elements: *mut i64
    );
    kernel hadamard(y: *mut X, x: *const X, rows: u64, columns: u64, signs: u32, inverse: i32);
}

/// The types of values, and the types of codes.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("CODE", "e4m3")],
    &[("X", "f32"), ("CODE", "e5m2")],
    &[("X", "f16"), ("CODE", "e4m3")],
    &[("X", "f16"), ("CODE", "e5m2")],
    &[("X", "bf16"), ("CODE", "e4m3")],
    &[("X", "bf16"), ("CODE", "e5m2")],
];

/// Returns the grid of as many threads as there are pieces.
fn grid(pieces: usize) -> [u32; 3] {
    [pieces.div_ceil(BLOCK as usize).max(1) as u32, 1, 1]
}

pub(super) fn cast(
    gpu: &CudaDevice,
    x: &Tensor,
    how: Microscaling,
    tensor_amax: Option<&Tensor>,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
    statistics: Option<(&mut CastStatistics, usize)>,
) -> Result<()> {
    let ([rows, columns], [padded, pitch]) = (x.dims("quantize: x")?, codes.dims("quantize: codes")?);
    let counts = statistics.map_or([0; 4], |(statistics, slot)| statistics.device_ptrs_mut(slot));
    let [amax, saturated, underflowed, elements] = counts.map(AddressMut);
    let name = if codes.dtype() == DType::E5M2 { "e5m2" } else { "e4m3" };
    let entry = match tensor_amax {
        None => kernel::quantize_mx(
            codes,
            scale_inv,
            x,
            rows,
            columns,
            padded,
            pitch,
            amax,
            saturated,
            underflowed,
            elements,
        ),
        Some(tensor_amax) => kernel::quantize_nvfp4(
            codes,
            scale_inv,
            x,
            tensor_amax,
            rows,
            columns,
            padded,
            pitch,
            how.rows > 1,
            how.stochastic,
            how.scales_rows,
            amax,
            saturated,
            underflowed,
            elements,
        ),
    };
    let kernel = SOURCE.kernel(variant(VARIANTS, x.dtype(), name)?, entry);
    // SAFETY: `x` is `[rows, columns]`, and `codes` `[padded, pitch]` with whole blocks. `scale_inv` has a row of `padded` scales for each block that
    // begins within the columns, and the padding of rows ends with the block of the last column. With `tensor_amax`, it has one more row.
    unsafe { gpu.launch(&kernel, grid(padded * (pitch / how.length())), BLOCK, 0) }
}

pub(super) fn hadamard(gpu: &CudaDevice, x: &Tensor, direction: Hadamard, y: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("hadamard: x")?;
    let entry = kernel::hadamard(y, x, rows, columns, SIGNS, direction == Hadamard::Inverse);
    let kernel = SOURCE.kernel(variant(VARIANTS, x.dtype(), "e4m3")?, entry);
    // SAFETY: `x` and `y` have `rows · columns` elements of one type.
    unsafe { gpu.launch(&kernel, grid(rows * columns.div_ceil(TRANSFORMED)), BLOCK, 0) }
}
