use super::{EntropyBonus, IGNORE_INDEX};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch;
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "entropy", constants: [IGNORE_INDEX], variants: launch::STORAGE };
    kernel entropy_gradient(
        entropies: *mut f32, logits: *mut X, targets: *const i32, factors: *const f32, weights: *const f32, scale: *const f32, coefficient: f32,
        vocabulary: i32, pitch: i32
    );
}

/// Threads per row.
const THREADS: u32 = 512;

pub(super) fn entropy_gradient(
    gpu: &CudaDevice,
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    EntropyBonus { factors, weights, scale, coefficient }: EntropyBonus,
    entropies: &mut Tensor,
) -> Result<()> {
    let [tokens, pitch] = logits.dims("entropy_gradient: logits")?;
    let defines = launch::storage(logits.dtype())?;
    let entry =
        kernel::entropy_gradient(entropies, logits, targets, factors, weights, scale, coefficient, vocabulary, pitch);
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: `logits` is `tokens · pitch` with at least `vocabulary` values in each row; `targets`, `factors`, `weights` and `entropies` have `tokens`
    // elements, and `scale` one.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0) }
}
