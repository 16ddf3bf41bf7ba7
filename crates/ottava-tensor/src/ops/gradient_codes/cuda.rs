use super::{CodingError, GROUP, SUMS, gradient_code_bytes};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("gradient_codes"; GROUP);

/// Blocks that keep a GPU busy. A slice takes one at least.
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
    let args = [
        Arg::Ptr(codes.device_ptr_mut()),
        Arg::Ptr(feedback.map_or(0, Tensor::device_ptr_mut)),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(error.map_or(0, |error| error.sums.device_ptr_mut())),
        Arg::U32((slice / GROUP) as u32),
        Arg::U64(gradient_code_bytes(slice) as u64),
    ];
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "encode_gradients" };
    // SAFETY: `codes` has the bytes of each slice, `feedback` the elements of `x` where it is given, and `error` two sums for each block.
    unsafe { gpu.launch(&kernel, [blocks as u32, slices as u32, 1], BLOCK, 0, &args) }
}

pub(super) fn decode(
    gpu: &CudaDevice,
    codes: &Tensor,
    [slices, parts]: [usize; 2],
    elements: usize,
    y: &mut Tensor,
) -> Result<()> {
    let args = [
        Arg::Ptr(codes.device_ptr()),
        Arg::Ptr(y.device_ptr_mut()),
        Arg::U32((elements / GROUP) as u32),
        Arg::U64(gradient_code_bytes(elements) as u64),
        Arg::I32(parts as i32),
    ];
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(y.dtype())?, entry: "decode_gradients" };
    let [blocks, ..] = launch::elements(gpu, elements / 16);
    // SAFETY: there are the bytes of `slices · parts` slices of `elements`, each a multiple of 256, and `y` has their sums.
    unsafe { gpu.launch(&kernel, [blocks, slices as u32, 1], BLOCK, 0, &args) }
}

pub(super) fn relative(gpu: &CudaDevice, sums: &Tensor, error: &mut Tensor) -> Result<()> {
    let args = [Arg::Ptr(error.device_ptr_mut()), Arg::Ptr(sums.device_ptr()), Arg::I32((SUMS / 2) as i32)];
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(crate::DType::F32)?, entry: "relative_error" };
    // SAFETY: there are as many pairs of sums as the count says, and one error.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1024, 0, &args) }
}
