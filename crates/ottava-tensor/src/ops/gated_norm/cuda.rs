use super::{GateOrder, GatedNorm, wide_gated_norm};
use crate::cuda::CudaDevice;
use crate::ops::bias;
use crate::ops::declaration::kernels;
use crate::ops::head_norm::cuda::{LARGEST_HEAD, lanes};
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "gated_norm", headers: ["heads.cuh", "sigmoid.cuh"], variants: launch::STORAGE };
    kernel gated_norm(y: *mut X, x: *const X, z: *const X, weight: *const X, heads: u64, dim: i32, lanes: i32, eps: f32);
    kernel gated_norm_backward(
        dx: *mut X, dz: *mut X, partial: *mut f32, dy: *const X, x: *const X, z: *const X, weight: *const X, heads: u64, dim: i32,
        lanes: i32, eps: f32
    );
}

/// Returns whether a few threads have a whole group in registers.
fn is_small(how: &GatedNorm, weight: &Tensor) -> bool {
    how.order == GateOrder::AfterNorm && how.size <= LARGEST_HEAD && weight.len() == how.size
}

/// Returns the grid for heads that `lanes` threads share.
fn grid(gpu: &CudaDevice, heads: usize, lanes: usize) -> [u32; 3] {
    launch::readers(gpu, (heads * lanes).div_ceil(BLOCK as usize))
}

pub(super) fn gated_norm(
    gpu: &CudaDevice,
    [x, z]: [&Tensor; 2],
    weight: &Tensor,
    how: GatedNorm,
    y: &mut Tensor,
) -> Result<()> {
    if !is_small(&how, weight) {
        return wide_gated_norm::forward(gpu, [x, z], weight, how, y);
    }
    let (dim, eps) = (how.size, how.eps);
    let (heads, lanes) = (x.len() / dim, lanes(dim, &[x, z, weight, y]));
    let kernel =
        SOURCE.kernel(launch::storage(x.dtype())?, kernel::gated_norm(y, x, z, weight, heads, dim, lanes, eps));
    // SAFETY: the op has checked that `x`, `z` and `y` have `heads` heads of the size of `weight`.
    unsafe { gpu.launch_early(&kernel, grid(gpu, heads, lanes), BLOCK, 0) }
}

pub(super) fn gated_norm_backward(
    gpu: &CudaDevice,
    [dy, x, z]: [&Tensor; 3],
    weight: &Tensor,
    how: GatedNorm,
    [dx, dz]: [&mut Tensor; 2],
    dweight: &mut Tensor,
) -> Result<()> {
    if !is_small(&how, weight) {
        return wide_gated_norm::backward(gpu, [dy, x, z], weight, how, [dx, dz], dweight);
    }
    let (dim, eps) = (how.size, how.eps);
    let (heads, lanes) = (x.len() / dim, lanes(dim, &[dy, x, z, weight, dx, dz]));
    let grid = grid(gpu, heads, lanes);
    let mut partial = Tensor::empty(x.device(), &[grid[0] as usize, dim], DType::F32)?;
    let entry = kernel::gated_norm_backward(dx, dz, &mut partial, dy, x, z, weight, heads, dim, lanes, eps);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: as in `gated_norm`, also for `dy`, `dx` and `dz`; the partial sums have a row per block.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0)? };
    bias::add_partial_sums(gpu, &partial, dweight)
}
