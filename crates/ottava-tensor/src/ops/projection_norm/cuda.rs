use super::{HeadNormWeights, ProjectionNormLayout, ProjectionSums};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::{NormKind, bias};
use crate::{DType, Result, Tensor};

kernel_source!(RMS, "projection_norm");
kernel_source!(PLUS_ONE, "projection_norm" + ADDS_ONE);

/// The kernels of each [`NormKind`] that is implemented.
pub(crate) static SOURCES: [&Source; 2] = [&RMS, &PLUS_ONE];

fn kernel(entry: &'static str, x: &Tensor, layout: ProjectionNormLayout) -> Result<Kernel> {
    let source = if layout.kind == NormKind::RmsPlusOne { &PLUS_ONE } else { &RMS };
    Ok(Kernel { source, defines: launch::storage(x.dtype())?, entry })
}

/// A block for each row.
fn by_row(x: &Tensor) -> [u32; 3] {
    [x.shape()[0] as u32, 1, 1]
}

/// Elements of queries, of keys and of values of a row.
fn widths(layout: ProjectionNormLayout) -> [Arg; 3] {
    [layout.queries, layout.keys, layout.keys].map(|width| Arg::I32(width as i32))
}

/// The elements over which means are computed, and epsilon.
fn of_means(layout: ProjectionNormLayout) -> [Arg; 5] {
    let [queries, keys, values] = widths(layout);
    [queries, keys, values, Arg::I32(layout.ranks as i32), Arg::F32(layout.eps as f32)]
}

pub(super) fn projection_squares(
    gpu: &CudaDevice,
    x: &Tensor,
    layout: ProjectionNormLayout,
    squares: &mut Tensor,
) -> Result<()> {
    let pointers = [squares.device_ptr_mut(), x.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &widths(layout)].concat();
    // SAFETY: `x` has rows as `layout` says and `squares` two sums for each, checked and allocated by the op.
    unsafe { gpu.launch_early(&kernel("projection_squares", x, layout)?, by_row(x), BLOCK, 0, &args) }
}

pub(super) fn projection_norm(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let HeadNormWeights { q, k } = weights;
    let y = y.device_ptr_mut();
    let pointers = [y, x.device_ptr(), q.device_ptr(), k.device_ptr(), squares.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &of_means(layout)].concat();
    // SAFETY: `x`, `y`, the weights and the sums are as `layout` says, checked by the op.
    unsafe { gpu.launch_early(&kernel("projection_norm", x, layout)?, by_row(x), BLOCK, 0, &args) }
}

pub(super) fn projection_dots(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
    dots: &mut Tensor,
) -> Result<()> {
    let dots = dots.device_ptr_mut();
    let read = [dy, x, weights.q, weights.k, squares].map(Tensor::device_ptr);
    let args = [&[Arg::Ptr(dots)], read.map(Arg::Ptr).as_slice(), &of_means(layout)].concat();
    // SAFETY: as in `projection_norm`; `dots` has two sums for each row, allocated by the op.
    unsafe { gpu.launch(&kernel("projection_dots", x, layout)?, by_row(x), BLOCK, 0, &args) }
}

pub(super) fn projection_norm_backward(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    sums: ProjectionSums,
    dx: &mut Tensor,
    [dq, dk]: [&mut Tensor; 2],
) -> Result<()> {
    let rows = x.shape()[0];
    let grid = launch::readers(gpu, rows);
    let partial = |len| Tensor::empty(x.device(), &[grid[0] as usize, len], DType::F32);
    let (mut partial_q, mut partial_k) = (partial(layout.queries)?, partial(layout.keys)?);
    let written = [dx.device_ptr_mut(), partial_q.device_ptr_mut(), partial_k.device_ptr_mut()].map(Arg::Ptr);
    let read = [dy, x, weights.q, weights.k, sums.squares, sums.dots].map(Tensor::device_ptr).map(Arg::Ptr);
    let args = [written.as_slice(), &read, &[Arg::I32(rows as i32)], &of_means(layout)].concat();
    // SAFETY: as in `projection_norm`, for `dy` and `dx` as well; the partial sums have a row per block.
    unsafe { gpu.launch(&kernel("projection_norm_backward", x, layout)?, grid, BLOCK, 0, &args)? };
    bias::add_partial_sums(gpu, &partial_q, dq)?;
    bias::add_partial_sums(gpu, &partial_k, dk)
}
