use super::{BLOCK, MatrixSlice};
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::kernels;
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, Defines};
use crate::ops::quantize::destination;
use crate::quantized::QuantizedTensor;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "quantize_slice", headers: ["destination.cuh"], variants: VARIANTS };
    kernel slice_amaxes(amaxes: *mut f32, x: *const X, start: u64, length: u64);
    kernel slice_amaxes_rounded(amaxes: *mut f32, x: *const f32, start: u64, length: u64);
    kernel quantize_slice(amaxes: *const f32, x: *const X, start: u64, length: u64, to: Destination);
    kernel quantize_slice_rounded(amaxes: *const f32, x: *const f32, start: u64, length: u64, to: Destination);
}

/// The variants of kernels that include `destination.cuh`, by the type that is cast.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
    &[("X", "f16"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
    &[("X", "bf16"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
];

/// Returns the kernel that rounds values to `dtype`.
fn variant(dtype: DType, entry: Entry) -> Result<Kernel> {
    let storage = launch::storage(dtype)?[0];
    let defines = VARIANTS.iter().find(|variant| variant[0] == storage).expect("all are listed");
    Ok(SOURCE.kernel(defines, entry))
}

/// Returns a grid with one block of threads for each 128x128 block of the whole matrix.
fn grid(slice: MatrixSlice) -> [u32; 3] {
    [(slice.columns / BLOCK) as u32, (slice.rows / BLOCK) as u32, 1]
}

pub(super) fn amaxes(
    gpu: &CudaDevice,
    x: &Tensor,
    dtype: DType,
    slice: MatrixSlice,
    amaxes: &mut Tensor,
) -> Result<()> {
    let entry = match x.dtype() == dtype {
        true => kernel::slice_amaxes(amaxes, x, slice.start, x.len()),
        false => kernel::slice_amaxes_rounded(amaxes, x, slice.start, x.len()),
    };
    let kernel = variant(dtype, entry)?;
    // SAFETY: `x` has `x.len()` elements of the slice, in the kernel's type, and `amaxes` has one element for each block of the grid.
    unsafe { gpu.launch(&kernel, grid(slice), launch::BLOCK, 0) }
}

pub(super) fn quantize(
    gpu: &CudaDevice,
    x: &Tensor,
    dtype: DType,
    slice: MatrixSlice,
    amaxes: &Tensor,
    into: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let to = destination(into, to, None, [0; 2], dtype).to_vec();
    let entry = match x.dtype() == dtype {
        true => kernel::quantize_slice(amaxes, x, slice.start, x.len(), to),
        false => kernel::quantize_slice_rounded(amaxes, x, slice.start, x.len(), to),
    };
    let kernel = variant(dtype, entry)?;
    // SAFETY: as above; the caller has checked that `into` has a code for each element and the scales of all blocks.
    unsafe { gpu.launch(&kernel, grid(slice), launch::BLOCK, 0) }
}
