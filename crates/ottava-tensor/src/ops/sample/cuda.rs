use super::{Distribution, Draws, ONE};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::UNTYPED;
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "sample", constants: [ONE], variants: UNTYPED };
    kernel sample(
        tokens: *mut i32, logprobs: *mut f32, logits: *const f32, adjusted: *mut f32, words: *const RowDraw, vocabulary: i32,
        of_draw: i32
    );
}

pub(super) fn sample(
    gpu: &CudaDevice,
    logits: &Tensor,
    draws: &mut Draws,
    distribution: Distribution,
    tokens: &mut Tensor,
    logprobs: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = draws.shape;
    let of_draw = distribution == Distribution::Draw;
    let entry = kernel::sample(tokens, logprobs, logits, draws.adjusted.as_mut(), &draws.words, columns, of_draw);
    let kernel = SOURCE.kernel(&[], entry);
    // SAFETY: `logits` and `adjusted` have `rows · columns` elements, `tokens` and `logprobs` have `rows`. `Draws::set` writes a `RowDraw` for each
    // row to `words`, and the changes that it names, which are of columns below `columns`. Before that, `words` is 0, which names no changes. Without
    // room for changes, there are none, so a null `adjusted` is not read.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], 1024, 0) }
}
