use super::{CrossEntropy, IGNORE_INDEX, VocabularyPart};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("cross_entropy"; IGNORE_INDEX);
kernel_source!(CAPPED, "cross_entropy" + CAPS; IGNORE_INDEX);
kernel_source!(SMOOTHED, "cross_entropy" + SMOOTHS; IGNORE_INDEX);
kernel_source!(CAPPED_SMOOTHED, "cross_entropy" + CAPS + SMOOTHS; IGNORE_INDEX);
kernel_source!(SCALED, "cross_entropy" + TOKEN_SCALES; IGNORE_INDEX);
kernel_source!(CAPPED_SCALED, "cross_entropy" + CAPS + TOKEN_SCALES; IGNORE_INDEX);
kernel_source!(SMOOTHED_SCALED, "cross_entropy" + SMOOTHS + TOKEN_SCALES; IGNORE_INDEX);
kernel_source!(CAPPED_SMOOTHED_SCALED, "cross_entropy" + CAPS + SMOOTHS + TOKEN_SCALES; IGNORE_INDEX);

/// By whether each token has a scale of its own, whether labels are smoothed, and whether logits have a cap.
pub(crate) static SOURCES: [&Source; 8] =
    [&SOURCE, &CAPPED, &SMOOTHED, &CAPPED_SMOOTHED, &SCALED, &CAPPED_SCALED, &SMOOTHED_SCALED, &CAPPED_SMOOTHED_SCALED];

/// The kernels that compute `how` of a `vocabulary`, with one scale for all tokens or `scales` of them, and their last arguments.
fn source(how: CrossEntropy, vocabulary: usize, scales: usize) -> (&'static Source, Vec<Arg>) {
    let is_smoothed = how.label_smoothing > 0.0;
    let which = [how.soft_cap.is_some(), is_smoothed, scales > 1];
    let weights = how.weights(vocabulary).into_iter().filter(|_| is_smoothed);
    let last = how.soft_cap.into_iter().chain(weights).map(|number| Arg::F32(number as f32)).collect();
    let place = which.into_iter().enumerate().map(|(bit, is_set)| usize::from(is_set) << bit).sum::<usize>();
    (SOURCES[place], last)
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
    vocabulary: usize,
    targets: &Tensor,
    how: CrossEntropy,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, pitch] = logits.dims("cross_entropy: logits")?;
    let (source, last) = source(how, vocabulary, 1);
    let kernel = Kernel { source, defines: launch::storage(logits.dtype())?, entry: "cross_entropy" };
    let mut args = vec![
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(vocabulary as i32),
        Arg::I32(pitch as i32),
    ];
    args.extend(last);
    // SAFETY: `logits` is `tokens · pitch`, its rows have `vocabulary` values, `targets` and `losses` `tokens`, and targets lie in the vocabulary by contract.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0, &args) }
}

pub(super) fn cross_entropy_gradient(
    gpu: &CudaDevice,
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, pitch] = logits.dims("cross_entropy: logits")?;
    let (source, last) = source(how, vocabulary, scale.len());
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
        Arg::I32(pitch as i32),
        Arg::Ptr(scale.device_ptr()),
        Arg::I32((kept / eight) as i32),
    ];
    args.extend(last);
    // 512 bytes more, so that a launch that exceeds 48 KiB with its static part raises the limit.
    // SAFETY: as in `cross_entropy`; `scale` has one element, or `tokens` for the kernels that read so many; shared memory holds `kept` bytes.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], threads, kept as u32 + 512, &args) }
}

pub(super) fn partial_losses(
    gpu: &CudaDevice,
    logits: &Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    how: CrossEntropy,
    partial: &mut Tensor,
) -> Result<()> {
    let [tokens, columns] = logits.dims("partial_losses: logits")?;
    let (source, last) = source(how, part.vocabulary, 1);
    let kernel = Kernel { source, defines: launch::storage(logits.dtype())?, entry: "partial_losses" };
    let pointers = [partial.device_ptr_mut(), logits.device_ptr(), targets.device_ptr()].map(Arg::Ptr);
    let mut args = [pointers.as_slice(), &[columns, part.first].map(|n| Arg::I32(n as i32))].concat();
    args.extend(last);
    // SAFETY: `logits` is `tokens · columns`, `targets` `tokens` and `partial` `2 · tokens`; the kernel checks whether a target has a column.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0, &args) }
}

pub(super) fn merge_losses(
    gpu: &CudaDevice,
    partial: &Tensor,
    targets: &Tensor,
    losses: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    // The kernel reads no logits, so a variant of any storage type will do.
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(DType::BF16)?, entry: "merge_losses" };
    let tokens = targets.len();
    let args = [
        Arg::Ptr(losses.device_ptr_mut()),
        Arg::Ptr(lse.device_ptr_mut()),
        Arg::Ptr(partial.device_ptr()),
        Arg::Ptr(targets.device_ptr()),
        Arg::I32(partial.shape()[0] as i32),
        Arg::I32(tokens as i32),
    ];
    // SAFETY: `partial` has two values per part and token, the others one per token.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, tokens), BLOCK, 0, &args) }
}

pub(super) fn partial_gradient(
    gpu: &CudaDevice,
    logits: &mut Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    lse: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
) -> Result<()> {
    let [tokens, columns] = logits.dims("partial_gradient: logits")?;
    let (source, last) = source(how, part.vocabulary, scale.len());
    let kernel = Kernel { source, defines: launch::storage(logits.dtype())?, entry: "partial_gradient" };
    let read = [targets.device_ptr(), lse.device_ptr(), scale.device_ptr()].map(Arg::Ptr);
    let sizes = [columns, part.first].map(|n| Arg::I32(n as i32));
    let mut args = [&[Arg::Ptr(logits.device_ptr_mut())], read.as_slice(), &sizes].concat();
    args.extend(last);
    // SAFETY: as in `partial_losses`; `lse` is `tokens`, and `scale` as in `cross_entropy_gradient`.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn cap_logits(gpu: &CudaDevice, logits: &mut Tensor, soft_cap: f64) -> Result<()> {
    let kernel = Kernel { source: &CAPPED, defines: launch::storage(logits.dtype())?, entry: "cap_logits" };
    let args = [Arg::Ptr(logits.device_ptr_mut()), Arg::I64(logits.len() as i64), Arg::F32(soft_cap as f32)];
    // SAFETY: `logits` has as many elements as the second argument says.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, logits.len()), BLOCK, 0, &args) }
}
