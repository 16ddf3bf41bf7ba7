use super::IGNORE_INDEX;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, kernel_source};
use crate::{Result, Tensor};

kernel_source!("cross_entropy"; IGNORE_INDEX);

/// Threads per row of the loss without gradient.
const THREADS: u32 = 128;

/// Threads per row of the gradient, and bytes of shared memory for its logits: three short or two long rows share a multiprocessor. Logits
/// that do not fit are read again from L2, which is faster than one row per multiprocessor.
const SHORT_ROWS: (u32, usize) = (512, 72 << 10);
const LONG_ROWS: (u32, usize) = (768, 108 << 10);

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
    scale: &Tensor,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, vocabulary] = logits.dims("cross_entropy: logits")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(logits.dtype())?, entry: "cross_entropy_gradient" };
    let eight = 8 * logits.dtype().size();
    let row = vocabulary / 8 * eight;
    let (threads, most) = if row <= SHORT_ROWS.1 { SHORT_ROWS } else { LONG_ROWS };
    let kept = row.min(most);
    let args = [
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr_mut()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
        Arg::Ptr(scale.device_ptr()),
        Arg::I32((kept / eight) as i32),
    ];
    // 512 bytes more, so that a launch that exceeds 48 KiB with its static part raises the limit.
    // SAFETY: as in `cross_entropy`; `scale` has one element; shared memory holds `kept` bytes.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], threads, kept as u32 + 512, &args) }
}
