//! Norms of groups of any size, with a gate before or after the norm.

use super::{GateOrder, GatedNorm};
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::bias;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{DType, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "wide_gated_norm", headers: ["sigmoid.cuh"], variants: VARIANTS };
    kernel wide_gated_norm(y: *mut X, x: *const X, z: *const X, weight: *const X, rows: i32, size: i32, weights: i32, eps: f32);
    kernel wide_gated_norm_backward(
        dx: *mut X, dz: *mut X, partial: *mut f32, dy: *const X, x: *const X, z: *const X, weight: *const X, rows: i32, size: i32,
        weights: i32, eps: f32
    );
}

/// The kernels by storage type and by the place of the gate.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("BEFORE", "0")],
    &[("X", "f16"), ("BEFORE", "0")],
    &[("X", "bf16"), ("BEFORE", "0")],
    &[("X", "f32"), ("BEFORE", "1")],
    &[("X", "f16"), ("BEFORE", "1")],
    &[("X", "bf16"), ("BEFORE", "1")],
];

/// The largest group whose sums of the weight gradient fit shared memory, with the memory of the sums of a block.
const LARGEST: usize = 56 << 10;

fn variant(x: &Tensor, how: GatedNorm, entry: Entry) -> Result<Kernel> {
    let order = match how.order {
        GateOrder::AfterNorm => "0",
        GateOrder::BeforeNorm => "1",
    };
    Ok(SOURCE.kernel(launch::variant(VARIANTS, x.dtype(), order)?, entry))
}

/// Returns the grid for rows of `width` elements: about as many blocks as run at once.
///
/// Errors if a group is too large.
fn grid(gpu: &CudaDevice, x: &Tensor, size: usize) -> Result<[u32; 3]> {
    if size > LARGEST {
        return Err(Error::Value(format!("gated_norm: groups of {size} elements, {LARGEST} are the most on a GPU")));
    }
    let (rows, groups) = (x.shape()[0], x.shape()[1] / size);
    let blocks = launch::readers(gpu, rows * groups)[0] as usize;
    Ok([blocks.div_ceil(groups) as u32, groups as u32, 1])
}

pub(super) fn forward(
    gpu: &CudaDevice,
    [x, z]: [&Tensor; 2],
    weight: &Tensor,
    how: GatedNorm,
    y: &mut Tensor,
) -> Result<()> {
    let grid = grid(gpu, x, how.size)?;
    let entry = kernel::wide_gated_norm(y, x, z, weight, x.shape()[0], how.size, weight.len(), how.eps);
    // SAFETY: the op has checked that `x`, `z` and `y` have rows of whole groups, and that `weight` fits a group or a row.
    unsafe { gpu.launch_early(&variant(x, how, entry)?, grid, BLOCK, 0) }
}

pub(super) fn backward(
    gpu: &CudaDevice,
    [dy, x, z]: [&Tensor; 3],
    weight: &Tensor,
    how: GatedNorm,
    [dx, dz]: [&mut Tensor; 2],
    dweight: &mut Tensor,
) -> Result<()> {
    let grid = grid(gpu, x, how.size)?;
    let sums = grid[0] as usize * x.shape()[1];
    let mut partial = Tensor::empty(x.device(), &[sums / weight.len(), weight.len()], DType::F32)?;
    let entry = kernel::wide_gated_norm_backward(
        dx,
        dz,
        &mut partial,
        dy,
        x,
        z,
        weight,
        x.shape()[0],
        how.size,
        weight.len(),
        how.eps,
    );
    // SAFETY: as in `forward`, also for `dy`, `dx` and `dz`; the partial sums have a row of sums per block of the grid's first axis, and shared memory has
    // the sums of all pieces of a group.
    unsafe { gpu.launch(&variant(x, how, entry)?, grid, BLOCK, 4 * how.size.next_multiple_of(8) as u32)? };
    bias::cuda::add_partial_sums(gpu, &partial, dweight)
}
