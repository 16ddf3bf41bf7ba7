use super::{HeadNormLayout, HeadNormWeights};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::ops::{NormKind, bias};
use crate::{DType, Result, Tensor};

kernels! {
    table source(NormKind) = {
        file: "head_norm", headers: ["heads.cuh"], constants: [], variants: launch::STORAGE,
        (NormKind::Rms) => [],
        (NormKind::RmsPlusOne) => [ADDS_ONE],
        (NormKind::Layer) => [CENTERED],
    };
    kernel head_norm(
        y: *mut X, x: *const X, wq: *const X, wk: *const X, rows: i32, heads: i32, kv_heads: i32, dim: i32, lanes: i32, eps: f32
    );
    kernel head_norm_backward(
        dx: *mut X, partial_q: *mut f32, partial_k: *mut f32, dy: *const X, x: *const X, wq: *const X, wk: *const X, rows: i32, heads: i32,
        kv_heads: i32, dim: i32, lanes: i32, eps: f32
    );
}

/// The largest head size: eight elements for each thread of a warp.
pub(in crate::ops) const LARGEST_HEAD: usize = 256;

/// Returns the number of threads that share a head in `heads.cuh`.
pub(in crate::ops) fn lanes(head_dim: usize, tensors: &[&Tensor]) -> usize {
    let wide = [8, 16, 32, 64, 128, LARGEST_HEAD].contains(&head_dim) && launch::aligned(tensors);
    if wide { head_dim / 8 } else { 32 }
}

/// Returns the number of threads that share a head, and the grid for all heads of `rows`. For LayerNorm, the grid is such that each group of threads
/// has one head of all rows.
fn shape(gpu: &CudaDevice, tensors: &[&Tensor], rows: usize, layout: HeadNormLayout) -> (usize, [u32; 3]) {
    let lanes = lanes(layout.head_dim, tensors);
    let [blocks, ..] = launch::readers(gpu, (rows * layout.all() * lanes).div_ceil(BLOCK as usize));
    let whole = |blocks: &usize| (blocks * groups(lanes)).is_multiple_of(layout.all());
    match layout.kind {
        NormKind::Rms | NormKind::RmsPlusOne => (lanes, [blocks, 1, 1]),
        NormKind::Layer => (lanes, [(blocks as usize..).find(whole).expect("a multiple") as u32, 1, 1]),
    }
}

/// Returns the number of groups of `lanes` threads in a block.
fn groups(lanes: usize) -> usize {
    BLOCK as usize / lanes
}

pub(super) fn head_norm(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: HeadNormLayout,
    eps: f64,
    y: &mut Tensor,
) -> Result<()> {
    let rows = x.shape()[0];
    let (lanes, grid) = shape(gpu, &[x, y, weights.q, weights.k], rows, layout);
    let (HeadNormLayout { heads, kv_heads, head_dim, .. }, HeadNormWeights { q, k, .. }) = (layout, weights);
    let entry = kernel::head_norm(y, x, q, k, rows, heads, kv_heads, head_dim, lanes, eps);
    let kernel = source(layout.kind).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: the op has checked that `x` and `y` have `rows` rows of all heads and that the weights fit `layout`.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}

pub(super) fn head_norm_backward(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: HeadNormLayout,
    eps: f64,
    dx: &mut Tensor,
    [dq, dk]: [&mut Tensor; 2],
) -> Result<()> {
    let rows = x.shape()[0];
    let (lanes, grid) = shape(gpu, &[dy, x, dx, weights.q, weights.k], rows, layout);
    let parts = match layout.kind {
        NormKind::Rms | NormKind::RmsPlusOne => grid[0] as usize,
        NormKind::Layer => grid[0] as usize * groups(lanes) / layout.all(),
    };
    let partial = |len| Tensor::empty(x.device(), &[parts, len], DType::F32);
    let [of_q, of_k] = layout.weights();
    let (mut partial_q, mut partial_k) = (partial(of_q)?, partial(of_k)?);
    let (HeadNormLayout { heads, kv_heads, head_dim, .. }, HeadNormWeights { q, k, .. }) = (layout, weights);
    let entry = kernel::head_norm_backward(
        dx,
        &mut partial_q,
        &mut partial_k,
        dy,
        x,
        q,
        k,
        rows,
        heads,
        kv_heads,
        head_dim,
        lanes,
        eps,
    );
    let kernel = source(layout.kind).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: as in `head_norm`, also for `dy` and `dx`; the partial sums have a row per block, or per group of threads with the same head.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0)? };
    bias::add_partial_sums(gpu, &partial_q, dq)?;
    bias::add_partial_sums(gpu, &partial_k, dk)
}
