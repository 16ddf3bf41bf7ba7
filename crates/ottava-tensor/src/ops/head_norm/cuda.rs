use super::{HeadNormLayout, HeadNormWeights};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::bias;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("head_norm");

/// Eight elements for each thread of a warp.
pub(super) const LARGEST_HEAD: usize = 256;

/// Threads that share a head, and the blocks for all heads of `rows`.
fn shape(gpu: &CudaDevice, tensors: &[&Tensor], rows: usize, layout: HeadNormLayout) -> (usize, [u32; 3]) {
    let wide = [8, 16, 32, 64, 128, 256].contains(&layout.head_dim) && launch::aligned(tensors);
    let lanes = if wide { layout.head_dim / 8 } else { 32 };
    (lanes, launch::readers(gpu, (rows * layout.all() * lanes).div_ceil(BLOCK as usize)))
}

fn sizes(rows: usize, layout: HeadNormLayout, lanes: usize, eps: f64) -> [Arg; 6] {
    let HeadNormLayout { heads, kv_heads, head_dim } = layout;
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
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "head_norm" };
    let pointers = [y.device_ptr_mut(), x.device_ptr(), weights.q.device_ptr(), weights.k.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &sizes(rows, layout, lanes, eps)].concat();
    // SAFETY: `x` and `y` have `rows` rows of all heads and the weights `head_dim` elements, checked by the op.
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
    let partial = || Tensor::empty(x.device(), &[grid[0] as usize, layout.head_dim], DType::F32);
    let (mut partial_q, mut partial_k) = (partial()?, partial()?);
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "head_norm_backward" };
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
    // SAFETY: as in `head_norm`, for `dy` and `dx` as well; the partial sums have a row per block.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args)? };
    bias::add_partial_sums(gpu, &partial_q, dq)?;
    bias::add_partial_sums(gpu, &partial_k, dk)
}
