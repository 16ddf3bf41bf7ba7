use super::{CodingError, GROUP, SUMS, gradient_code_bytes};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "gradient_codes", constants: [GROUP], variants: launch::STORAGE };
    kernel encode_gradients(codes: *mut e4m3, feedback: *mut bf16, x: *const X, sums: *mut f64, groups: u32, stride: u64);
    kernel decode_gradients(codes: *const e4m3, y: *mut X, groups: u32, stride: u64, parts: i32);
    kernel relative_error(error: *mut f32, sums: *const f64, pairs: i32);
}

/// The number of blocks that keep a GPU busy. A slice has at least one block.
const BLOCKS: usize = 1024;

pub(super) fn encode(
    gpu: &CudaDevice,
    x: &Tensor,
    feedback: Option<&mut Tensor>,
    codes: &mut Tensor,
    error: Option<&mut CodingError>,
) -> Result<()> {
    let slices = codes.shape()[0];
    let slice = x.len() / slices;
    let blocks = (slice / GROUP).div_ceil(BLOCK as usize * 8 / GROUP).clamp(1, (BLOCKS / slices).max(1));
    let sums = error.map(|error| &mut error.sums);
    let entry = kernel::encode_gradients(codes, feedback, x, sums, slice / GROUP, gradient_code_bytes(slice));
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `codes` has the bytes of each slice, `feedback` (if given) has the elements of `x`, and `error` has two sums for each block.
    unsafe { gpu.launch(&kernel, [blocks as u32, slices as u32, 1], BLOCK, 0) }
}

pub(super) fn decode(
    gpu: &CudaDevice,
    codes: &Tensor,
    [slices, parts]: [usize; 2],
    elements: usize,
    y: &mut Tensor,
) -> Result<()> {
    let defines = launch::storage(y.dtype())?;
    let entry = kernel::decode_gradients(codes, y, elements / GROUP, gradient_code_bytes(elements), parts);
    let kernel = SOURCE.kernel(defines, entry);
    let [blocks, ..] = launch::elements(gpu, elements / 16);
    // SAFETY: `codes` has the bytes of `slices · parts` slices of `elements` elements, a multiple of 256; `y` has room for their sums.
    unsafe { gpu.launch(&kernel, [blocks, slices as u32, 1], BLOCK, 0) }
}

pub(super) fn relative(gpu: &CudaDevice, sums: &Tensor, error: &mut Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(launch::storage(crate::DType::F32)?, kernel::relative_error(error, sums, SUMS / 2));
    // SAFETY: `sums` has the given number of pairs, and `error` has one element.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1024, 0) }
}
