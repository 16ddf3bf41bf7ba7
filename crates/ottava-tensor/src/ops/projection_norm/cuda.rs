use super::{HeadNormWeights, ProjectionNormLayout, ProjectionSums};
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::ops::{NormKind, bias};
use crate::{DType, Result, Tensor};

kernels! {
    // The key tells whether the norm adds one to its weight.
    table source(bool) = {
        file: "projection_norm", headers: [], constants: [], variants: launch::STORAGE,
        (false) => [],
        (true) => [ADDS_ONE],
    };
    kernel projection_squares(squares: *mut f32, x: *const X, queries: i32, keys: i32, values: i32);
    kernel projection_norm(
        y: *mut X, x: *const X, wq: *const X, wk: *const X, squares: *const f32, queries: i32, keys: i32, values: i32, ranks: i32, eps: f32
    );
    kernel projection_dots(
        dots: *mut f32, dy: *const X, x: *const X, wq: *const X, wk: *const X, squares: *const f32, queries: i32, keys: i32, values: i32,
        ranks: i32, eps: f32
    );
    kernel projection_norm_backward(
        dx: *mut X, partial_q: *mut f32, partial_k: *mut f32, dy: *const X, x: *const X, wq: *const X, wk: *const X, squares: *const f32,
        dots: *const f32, rows: i32, queries: i32, keys: i32, values: i32, ranks: i32, eps: f32
    );
}

fn variant(x: &Tensor, layout: ProjectionNormLayout, entry: Entry) -> Result<Kernel> {
    Ok(source(layout.kind == NormKind::RmsPlusOne).kernel(launch::storage(x.dtype())?, entry))
}

/// Returns a grid with one block per row.
fn by_row(x: &Tensor) -> [u32; 3] {
    [x.shape()[0] as u32, 1, 1]
}

pub(super) fn projection_squares(
    gpu: &CudaDevice,
    x: &Tensor,
    layout: ProjectionNormLayout,
    squares: &mut Tensor,
) -> Result<()> {
    let ProjectionNormLayout { queries, keys, .. } = layout;
    let kernel = variant(x, layout, kernel::projection_squares(squares, x, queries, keys, keys))?;
    // SAFETY: the op has checked that the rows of `x` fit `layout`, and has allocated two sums per row in `squares`.
    unsafe { gpu.launch_early(&kernel, by_row(x), BLOCK, 0) }
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
    let ProjectionNormLayout { queries, keys, ranks, eps, .. } = layout;
    let entry = kernel::projection_norm(y, x, q, k, squares, queries, keys, keys, ranks, eps);
    let kernel = variant(x, layout, entry)?;
    // SAFETY: the op has checked that `x`, `y`, the weights and the sums fit `layout`.
    unsafe { gpu.launch_early(&kernel, by_row(x), BLOCK, 0) }
}

pub(super) fn projection_dots(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
    dots: &mut Tensor,
) -> Result<()> {
    let HeadNormWeights { q, k } = weights;
    let ProjectionNormLayout { queries, keys, ranks, eps, .. } = layout;
    let entry = kernel::projection_dots(dots, dy, x, q, k, squares, queries, keys, keys, ranks, eps);
    let kernel = variant(x, layout, entry)?;
    // SAFETY: as in `projection_norm`; the op has allocated two sums per row in `dots`.
    unsafe { gpu.launch(&kernel, by_row(x), BLOCK, 0) }
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
    let HeadNormWeights { q, k } = weights;
    let ProjectionNormLayout { queries, keys, ranks, eps, .. } = layout;
    let ProjectionSums { squares, dots, .. } = sums;
    let entry = kernel::projection_norm_backward(
        dx,
        &mut partial_q,
        &mut partial_k,
        dy,
        x,
        q,
        k,
        squares,
        dots,
        rows,
        queries,
        keys,
        keys,
        ranks,
        eps,
    );
    let kernel = variant(x, layout, entry)?;
    // SAFETY: as in `projection_norm`, also for `dy` and `dx`; the partial sums have a row per block.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0)? };
    bias::add_partial_sums(gpu, &partial_q, dq)?;
    bias::add_partial_sums(gpu, &partial_k, dk)
}
