use super::{CrossEntropy, IGNORE_INDEX, VocabularyPart};
use crate::cuda::{CudaDevice, Source};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

kernels! {
    // The key tells whether logits have a cap, whether labels are smoothed, and whether each token has a separate scale.
    table source([bool; 3]) = {
        file: "cross_entropy", headers: [], constants: [IGNORE_INDEX], variants: launch::STORAGE,
        ([false, false, false]) => [],
        ([true, false, false]) => [CAPS],
        ([false, true, false]) => [SMOOTHS],
        ([true, true, false]) => [CAPS, SMOOTHS],
        ([false, false, true]) => [TOKEN_SCALES],
        ([true, false, true]) => [CAPS, TOKEN_SCALES],
        ([false, true, true]) => [SMOOTHS, TOKEN_SCALES],
        ([true, true, true]) => [CAPS, SMOOTHS, TOKEN_SCALES],
    };
    kernel cross_entropy(
        losses: *mut f32, logits: *const X, targets: *const i32, vocabulary: i32, pitch: i32, #[CAPS] cap: f32, #[SMOOTHS] on_target: f32,
        #[SMOOTHS] on_all: f32
    );
    kernel cross_entropy_gradient(
        losses: *mut f32, logits: *mut X, targets: *const i32, vocabulary: i32, pitch: i32, scale_of_loss: *const f32, kept: i32,
        #[CAPS] cap: f32, #[SMOOTHS] on_target: f32, #[SMOOTHS] on_all: f32
    );
    kernel partial_losses(
        partial: *mut float2, logits: *const X, targets: *const i32, vocabulary: i32, first: i32, #[CAPS] cap: f32,
        #[SMOOTHS] on_target: f32, #[SMOOTHS] on_all: f32
    );
    kernel merge_losses(losses: *mut f32, lse: *mut f32, partial: *const float2, targets: *const i32, parts: i32, tokens: i32);
    kernel partial_gradient(
        logits: *mut X, targets: *const i32, lse: *const f32, scale_of_loss: *const f32, vocabulary: i32, first: i32, #[CAPS] cap: f32,
        #[SMOOTHS] on_target: f32, #[SMOOTHS] on_all: f32
    );
    kernel cap_logits(logits: *mut X, n: i64, cap: f32);
}

/// Returns the source of the kernels for `how`, and their last arguments: the cap, the weight of the target's logit, and the weight of every logit.
/// `vocabulary` is the number of tokens of the vocabulary, and `scales` is the number of scales: 1 for all tokens, or one per token.
fn of(how: CrossEntropy, vocabulary: usize, scales: usize) -> (&'static Source, Option<f64>, [Option<f64>; 2]) {
    let is_smoothed = how.label_smoothing > 0.0;
    let weights = how.weights(vocabulary).map(|weight| is_smoothed.then_some(weight));
    (source([how.soft_cap.is_some(), is_smoothed, scales > 1]), how.soft_cap, weights)
}

/// The number of threads per row whose logits have up to this number of bytes in shared memory, and the number for longer rows. Three short or two long rows
/// share a multiprocessor. Logits that do not fit are read again from L2, which is faster than one row per multiprocessor.
const SHORT_ROWS: (u32, usize) = (512, 72 << 10);
const LONG_ROWS: (u32, usize) = (768, 108 << 10);

/// The number of threads of the other kernels per row.
const THREADS: u32 = 128;

/// Returns the bytes of the whole eights of a row, the number of its threads, and the largest number of bytes in shared memory. The loss has the same
/// bits with and without its gradient, because both kernels have the same number of threads.
fn of_row(vocabulary: usize, dtype: DType) -> (usize, u32, usize) {
    let bytes = vocabulary / 8 * 8 * dtype.size();
    let (threads, most) = if bytes <= SHORT_ROWS.1 { SHORT_ROWS } else { LONG_ROWS };
    (bytes, threads, most)
}

pub(super) fn cross_entropy(
    gpu: &CudaDevice,
    logits: &Tensor,
    vocabulary: usize,
    targets: &Tensor,
    how: CrossEntropy,
    losses: &mut Tensor,
) -> Result<()> {
    let [tokens, pitch] = logits.dims("cross_entropy: logits")?;
    let (source, cap, [on_target, on_all]) = of(how, vocabulary, 1);
    let entry = kernel::cross_entropy(losses, logits, targets, vocabulary, pitch, cap, on_target, on_all);
    let kernel = source.kernel(launch::storage(logits.dtype())?, entry);
    // SAFETY: `logits` has `tokens` rows of `pitch` elements with `vocabulary` values, `targets` and `losses` have `tokens` elements, and targets lie
    // in the vocabulary by contract.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], of_row(vocabulary, logits.dtype()).1, 0) }
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
    let (source, cap, [on_target, on_all]) = of(how, vocabulary, scale.len());
    let defines = launch::storage(logits.dtype())?;
    let (row, threads, most) = of_row(vocabulary, logits.dtype());
    let kept = row.min(most);
    let kept_eights = kept / (8 * logits.dtype().size());
    let entry = kernel::cross_entropy_gradient(
        losses,
        logits,
        targets,
        vocabulary,
        pitch,
        scale,
        kept_eights,
        cap,
        on_target,
        on_all,
    );
    let kernel = source.kernel(defines, entry);
    // 512 bytes are for static shared memory: a launch raises the limit only if the bytes that it is given exceed 48 KiB.
    // SAFETY: as in `cross_entropy`; `scale` has one element, or `tokens` elements for kernels with TOKEN_SCALES; shared memory holds `kept` bytes.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], threads, kept as u32 + 512) }
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
    let (source, cap, [on_target, on_all]) = of(how, part.vocabulary, 1);
    let entry = kernel::partial_losses(partial, logits, targets, columns, part.first, cap, on_target, on_all);
    let kernel = source.kernel(launch::storage(logits.dtype())?, entry);
    // SAFETY: `logits` has `tokens · columns` elements, `targets` has `tokens`, and `partial` has `2 · tokens`. The kernel checks whether a target
    // has a column.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0) }
}

pub(super) fn merge_losses(
    gpu: &CudaDevice,
    partial: &Tensor,
    targets: &Tensor,
    losses: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    // The kernel reads no logits, so its variant may have any storage type.
    let tokens = targets.len();
    let entry = kernel::merge_losses(losses, lse, partial, targets, partial.shape()[0], tokens);
    let kernel = source([false; 3]).kernel(launch::storage(DType::BF16)?, entry);
    // SAFETY: `partial` has two values per part and token; the other tensors have one per token.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, tokens), BLOCK, 0) }
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
    let (source, cap, [on_target, on_all]) = of(how, part.vocabulary, scale.len());
    let defines = launch::storage(logits.dtype())?;
    let entry = kernel::partial_gradient(logits, targets, lse, scale, columns, part.first, cap, on_target, on_all);
    let kernel = source.kernel(defines, entry);
    // SAFETY: as in `partial_losses`; `lse` has `tokens` elements, and `scale` is as in `cross_entropy_gradient`.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn cap_logits(gpu: &CudaDevice, logits: &mut Tensor, soft_cap: f64) -> Result<()> {
    let (n, defines) = (logits.len(), launch::storage(logits.dtype())?);
    let kernel = source([true, false, false]).kernel(defines, kernel::cap_logits(logits, n, soft_cap));
    // SAFETY: `logits` has `n` elements.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, n), BLOCK, 0) }
}
