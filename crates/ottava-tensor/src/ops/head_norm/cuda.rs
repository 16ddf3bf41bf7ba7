use super::{HeadNormLayout, HeadNormWeights};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::{NormKind, bias};
use crate::{DType, Result, Tensor};

kernel_source!(RMS, "head_norm");
kernel_source!(PLUS_ONE, "head_norm" + ADDS_ONE);
kernel_source!(LAYER, "head_norm" + CENTERED);

/// The kernels of each [`NormKind`].
pub(crate) static SOURCES: [&Source; 3] = [&RMS, &PLUS_ONE, &LAYER];

fn source(layout: HeadNormLayout) -> &'static Source {
    match layout.kind {
        NormKind::Rms => &RMS,
        NormKind::RmsPlusOne => &PLUS_ONE,
        NormKind::Layer => &LAYER,
    }
}

/// Eight elements for each thread of a warp.
pub(super) const LARGEST_HEAD: usize = 256;

/// Threads that share a head, and the blocks for all heads of `rows`; for LayerNorm as many as leave each group one head of all rows.
fn shape(gpu: &CudaDevice, tensors: &[&Tensor], rows: usize, layout: HeadNormLayout) -> (usize, [u32; 3]) {
    let wide = [8, 16, 32, 64, 128, 256].contains(&layout.head_dim) && launch::aligned(tensors);
    let lanes = if wide { layout.head_dim / 8 } else { 32 };
    let [blocks, ..] = launch::readers(gpu, (rows * layout.all() * lanes).div_ceil(BLOCK as usize));
    let whole = |blocks: &usize| (blocks * groups(lanes)).is_multiple_of(layout.all());
    match layout.kind {
        NormKind::Rms | NormKind::RmsPlusOne => (lanes, [blocks, 1, 1]),
        NormKind::Layer => (lanes, [(blocks as usize..).find(whole).expect("a multiple") as u32, 1, 1]),
    }
}

/// Groups of `lanes` threads in a block.
fn groups(lanes: usize) -> usize {
    BLOCK as usize / lanes
}

fn sizes(rows: usize, layout: HeadNormLayout, lanes: usize, eps: f64) -> [Arg; 6] {
    let HeadNormLayout { heads, kv_heads, head_dim, .. } = layout;
    let [rows, heads, kv_heads, head_dim, lanes] = [rows, heads, kv_heads, head_dim, lanes].map(|n| Arg::I32(n as i32));
    [rows, heads, kv_heads, head_dim, lanes, Arg::F32(eps as f32)]
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
    let kernel = Kernel { source: source(layout), defines: launch::storage(x.dtype())?, entry: "head_norm" };
    let pointers = [y.device_ptr_mut(), x.device_ptr(), weights.q.device_ptr(), weights.k.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &sizes(rows, layout, lanes, eps)].concat();
    // SAFETY: `x` and `y` have `rows` rows of all heads and the weights are as `layout` says, checked by the op.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
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
    let kernel = Kernel { source: source(layout), defines: launch::storage(x.dtype())?, entry: "head_norm_backward" };
    let pointers = [
        dx.device_ptr_mut(),
        partial_q.device_ptr_mut(),
        partial_k.device_ptr_mut(),
        dy.device_ptr(),
        x.device_ptr(),
        weights.q.device_ptr(),
        weights.k.device_ptr(),
    ]
    .map(Arg::Ptr);
    let args = [pointers.as_slice(), &sizes(rows, layout, lanes, eps)].concat();
    // SAFETY: as in `head_norm`, for `dy` and `dx` as well; the partial sums have a row per block, or for each group of threads of a head.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args)? };
    bias::add_partial_sums(gpu, &partial_q, dq)?;
    bias::add_partial_sums(gpu, &partial_k, dk)
}
