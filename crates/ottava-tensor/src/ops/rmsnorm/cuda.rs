use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("rmsnorm");

/// Rows whose weight gradients one thread adds up; as in cpu.rs.
const ROWS: usize = 64;

pub(super) fn rmsnorm(
    gpu: &CudaDevice,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    y: &mut Tensor,
    rstd: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = x.dims("rmsnorm: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "rmsnorm" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(rstd.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(weight.device_ptr()),
        Arg::I32(channels as i32),
        Arg::F32(eps as f32),
    ];
    // SAFETY: `x` and `y` are `tokens · channels`, `weight` `channels`, `rstd` `tokens`; one block per token.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn rmsnorm_backward(
    gpu: &CudaDevice,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = x.dims("rmsnorm_backward: x")?;
    let defines = launch::storage(x.dtype())?;
    let kernel = |entry| Kernel { source: &SOURCE, defines, entry };
    let args = [
        Arg::Ptr(dx.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(weight.device_ptr()),
        Arg::Ptr(rstd.device_ptr()),
        Arg::I32(channels as i32),
    ];
    // SAFETY: `dx`, `dy` and `x` are `tokens · channels`, `weight` `channels`, `rstd` `tokens`; one block per token.
    unsafe { gpu.launch(&kernel("rmsnorm_dx"), [tokens as u32, 1, 1], BLOCK, 0, &args)? };

    let chunks = tokens.div_ceil(ROWS);
    let mut partial = Tensor::empty(x.device(), &[chunks, channels], DType::F32)?;
    let column_blocks = channels.div_ceil(BLOCK as usize) as u32;
    let args = [
        Arg::Ptr(partial.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(rstd.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(channels as i32),
        Arg::I32(ROWS as i32),
    ];
    // SAFETY: as above; the grid has one row of blocks per row of `partial`.
    unsafe { gpu.launch(&kernel("rmsnorm_dweight"), [column_blocks, chunks as u32, 1], BLOCK, 0, &args)? };
    let args = [
        Arg::Ptr(dweight.device_ptr_mut()),
        Arg::Ptr(partial.device_ptr()),
        Arg::I32(channels as i32),
        Arg::I32(chunks as i32),
    ];
    // SAFETY: `partial` is `chunks · channels` and `dweight` `channels`, F32.
    unsafe { gpu.launch(&kernel("add_partial_sums"), [column_blocks, 1, 1], BLOCK, 0, &args) }
}
