use super::IGNORE_INDEX;
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("cross_entropy"; IGNORE_INDEX);
kernel_source!(CAPPED, "cross_entropy" + CAPS; IGNORE_INDEX);

/// The kernels with or without a soft cap, and their last argument.
fn source(soft_cap: Option<f64>) -> (&'static Source, Option<Arg>) {
    let cap = soft_cap.map(|cap| Arg::F32(cap as f32));
    (if cap.is_some() { &CAPPED } else { &SOURCE }, cap)
}

/// Threads per row of the loss without gradient.
const THREADS: u32 = 128;

/// Threads per row of the gradient, and bytes of shared memory for its logits: three short or two long rows share a multiprocessor. Logits
/// that do not fit are read again from L2, which is faster than one row per multiprocessor.
const SHORT_ROWS: (u32, usize) = (512, 72 << 10);
const LONG_ROWS: (u32, usize) = (768, 108 << 10);

pub(super) fn cross_entropy(
    gpu: &CudaDevice,
    logits: &Tensor,
    targets: &Tensor,
    soft_cap: Option<f64>,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, vocabulary] = logits.dims("cross_entropy: logits")?;
    let (source, cap) = source(soft_cap);
    let kernel = Kernel { source, defines: launch::storage(logits.dtype())?, entry: "cross_entropy" };
    let mut args = vec![
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
    ];
    args.extend(cap);
    // SAFETY: `logits` is `tokens · vocabulary`, `targets` and `losses` `tokens`, and targets lie in the vocabulary by contract.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0, &args) }
}

pub(super) fn cross_entropy_gradient(
    gpu: &CudaDevice,
    logits: &mut Tensor,
    targets: &Tensor,
    scale: &Tensor,
    soft_cap: Option<f64>,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, vocabulary] = logits.dims("cross_entropy: logits")?;
    let (source, cap) = source(soft_cap);
    let kernel = Kernel { source, defines: launch::storage(logits.dtype())?, entry: "cross_entropy_gradient" };
    let eight = 8 * logits.dtype().size();
    let row = vocabulary / 8 * eight;
    let (threads, most) = if row <= SHORT_ROWS.1 { SHORT_ROWS } else { LONG_ROWS };
    let kept = row.min(most);
    let mut args = vec![
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr_mut()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
        Arg::Ptr(scale.device_ptr()),
        Arg::I32((kept / eight) as i32),
    ];
    args.extend(cap);
    // 512 bytes more, so that a launch that exceeds 48 KiB with its static part raises the limit.
    // SAFETY: as in `cross_entropy`; `scale` has one element; shared memory holds `kept` bytes.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], threads, kept as u32 + 512, &args) }
}

pub(super) fn cap_logits(gpu: &CudaDevice, logits: &mut Tensor, soft_cap: f64) -> Result<()> {
    let kernel = Kernel { source: &CAPPED, defines: launch::storage(logits.dtype())?, entry: "cap_logits" };
    let args = [Arg::Ptr(logits.device_ptr_mut()), Arg::I64(logits.len() as i64), Arg::F32(soft_cap as f32)];
    // SAFETY: `logits` has as many elements as the second argument says.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, logits.len()), BLOCK, 0, &args) }
}
