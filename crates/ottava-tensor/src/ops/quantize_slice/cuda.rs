use super::{BLOCK, MatrixSlice};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, Defines, kernel_source};
use crate::ops::quantize::destination;
use crate::quantized::QuantizedTensor;
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "quantize_slice", "destination.cuh");

/// Defines of `destination.cuh`, by the type that is cast.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
    &[("X", "f16"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
    &[("X", "bf16"), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
];

/// The kernel that rounds values of the type of `x` to `dtype`: the first of `entries` if they have it.
fn kernel(x: &Tensor, dtype: DType, entries: [&'static str; 2]) -> Result<Kernel> {
    let storage = launch::storage(dtype)?[0];
    let defines = VARIANTS.iter().find(|variant| variant[0] == storage).expect("all are listed");
    Ok(Kernel { source: &SOURCE, defines, entry: entries[usize::from(x.dtype() != dtype)] })
}

/// A block of threads for each block of the whole matrix.
fn grid(slice: MatrixSlice) -> [u32; 3] {
    [(slice.columns / BLOCK) as u32, (slice.rows / BLOCK) as u32, 1]
}

fn inputs(x: &Tensor, slice: MatrixSlice, amaxes: u64) -> [Arg; 4] {
    [Arg::Ptr(amaxes), Arg::Ptr(x.device_ptr()), Arg::U64(slice.start as u64), Arg::U64(x.len() as u64)]
}

pub(super) fn amaxes(
    gpu: &CudaDevice,
    x: &Tensor,
    dtype: DType,
    slice: MatrixSlice,
    amaxes: &mut Tensor,
) -> Result<()> {
    let kernel = kernel(x, dtype, ["slice_amaxes", "slice_amaxes_rounded"])?;
    // SAFETY: `x` is `x.len()` elements of the kernel's type, of the slice, and `amaxes` one for each block of the grid.
    unsafe { gpu.launch(&kernel, grid(slice), launch::BLOCK, 0, &inputs(x, slice, amaxes.device_ptr_mut())) }
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
    let kernel = kernel(x, dtype, ["quantize_slice", "quantize_slice_rounded"])?;
    let args = [&inputs(x, slice, amaxes.device_ptr())[..], &destination(into, to, [0; 2], dtype)].concat();
    // SAFETY: as above; the caller has checked that `into` has a code for each element and the scales of all blocks.
    unsafe { gpu.launch(&kernel, grid(slice), launch::BLOCK, 0, &args) }
}
