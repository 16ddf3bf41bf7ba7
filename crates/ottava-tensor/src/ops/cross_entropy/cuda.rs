use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, kernel_source};
use crate::{Result, Tensor};

kernel_source!("cross_entropy");

/// Threads of a row that is read once.
const THREADS: u32 = 128;

/// Threads of a row that is read again: fewer rows are at work, so that the cache still holds them.
const GRADIENT_THREADS: u32 = 512;

pub(super) fn cross_entropy(gpu: &CudaDevice, logits: &Tensor, targets: &Tensor, losses: &mut Tensor) -> Result<()> {
    let [tokens, vocabulary] = logits.dims("cross_entropy: logits")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(logits.dtype())?, entry: "cross_entropy" };
    let args = [
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
    ];
    // SAFETY: `logits` is `tokens · vocabulary`, `targets` and `losses` `tokens`, and targets lie in the vocabulary by contract.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0, &args) }
}

pub(super) fn cross_entropy_gradient(
    gpu: &CudaDevice,
    logits: &mut Tensor,
    targets: &Tensor,
    scale: f64,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, vocabulary] = logits.dims("cross_entropy: logits")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(logits.dtype())?, entry: "cross_entropy_gradient" };
    let args = [
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr_mut()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
        Arg::F32(scale as f32),
    ];
    // SAFETY: as in `cross_entropy`.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], GRADIENT_THREADS, 0, &args) }
}
