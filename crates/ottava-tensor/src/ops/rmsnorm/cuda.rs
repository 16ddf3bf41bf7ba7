use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::{bias, quantize};
use crate::{DType, QuantizedTensor, Result, Tensor};

kernel_source!("rmsnorm");
kernel_source!(FP8_SOURCE, "rmsnorm", "destination.cuh");

/// Blocks of the backward pass, each with its part of dweight: two for each of the 132 multiprocessors of a Hopper GPU.
const PARTS: usize = 264;

/// The row that is normalised: `x`, or the sum of `x` and `residual`, which goes to `sum`.
pub(super) struct Row<'a> {
    pub x: &'a Tensor,
    pub residual: Option<(&'a Tensor, &'a mut Tensor)>,
}

/// Without `y`, only `rstd` and the sum are written.
pub(super) fn rmsnorm(
    gpu: &CudaDevice,
    row: Row,
    weight: &Tensor,
    eps: f64,
    y: Option<&mut Tensor>,
    rstd: &mut Tensor,
    amax: Option<&mut Tensor>,
) -> Result<()> {
    let [tokens, channels] = row.x.dims("rmsnorm: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(row.x.dtype())?, entry: "rmsnorm" };
    let (residual, sum) = row.residual.map_or((0, 0), |(residual, sum)| (residual.device_ptr(), sum.device_ptr_mut()));
    let args = [
        Arg::Ptr(y.map_or(0, Tensor::device_ptr_mut)),
        Arg::Ptr(rstd.device_ptr_mut()),
        Arg::Ptr(sum),
        Arg::Ptr(amax.map_or(0, Tensor::device_ptr_mut)),
        Arg::Ptr(row.x.device_ptr()),
        Arg::Ptr(residual),
        Arg::Ptr(weight.device_ptr()),
        Arg::I32(channels as i32),
        Arg::F32(eps as f32),
    ];
    // SAFETY: all matrices are `tokens · channels`, `weight` `channels`, `rstd` `tokens`, `amax` 1; one block per token.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], launch::row_threads(channels, 16), 0, &args) }
}

/// Casts the normalised `x`, whose `rstd` is known.
pub(super) fn rmsnorm_codes(
    gpu: &CudaDevice,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let defines = quantize::fp8_variant(x, to.format)?;
    let kernel = Kernel { source: &FP8_SOURCE, defines, entry: "rmsnorm_codes" };
    let more = [Arg::Ptr(x.device_ptr()), Arg::Ptr(weight.device_ptr()), Arg::Ptr(rstd.device_ptr())];
    let (grid, args) = (quantize::tiles(out.rows, out.columns, 1), quantize::destination(out, to, &more));
    // SAFETY: `x` is `out.rows · out.columns`, `rstd` has a value per row and `weight` one per column.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}

/// The tensors that backward reads.
pub(super) struct Backward<'a> {
    pub dy: &'a Tensor,
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub rstd: &'a Tensor,
    pub residual: Option<&'a Tensor>,
}

pub(super) fn rmsnorm_backward(gpu: &CudaDevice, from: Backward, dx: &mut Tensor, dweight: &mut Tensor) -> Result<()> {
    let [tokens, channels] = from.x.dims("rmsnorm_backward: x")?;
    let parts = tokens.min(PARTS);
    let mut partial = Tensor::empty(from.x.device(), &[parts, channels], DType::F32)?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(from.x.dtype())?, entry: "rmsnorm_backward" };
    let args = [
        Arg::Ptr(dx.device_ptr_mut()),
        Arg::Ptr(partial.device_ptr_mut()),
        Arg::Ptr(from.dy.device_ptr()),
        Arg::Ptr(from.x.device_ptr()),
        Arg::Ptr(from.weight.device_ptr()),
        Arg::Ptr(from.rstd.device_ptr()),
        Arg::Ptr(from.residual.map_or(0, Tensor::device_ptr)),
        Arg::I32(tokens as i32),
        Arg::I32(channels as i32),
    ];
    // SAFETY: all matrices are `tokens · channels`, `weight` `channels`, `rstd` `tokens`; `partial` has a row per block.
    unsafe { gpu.launch(&kernel, [parts as u32, 1, 1], launch::row_threads(channels, 8), 0, &args)? };
    bias::add_partial_sums(gpu, &partial, dweight)
}
