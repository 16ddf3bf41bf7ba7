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
    // SAFETY: `logits` and `adjusted` are `rows · columns`, `tokens` and `logprobs` `rows`. `words` has a `RowDraw` for each row and the changes
    // that these name, of columns below `columns`, as `Draws::set` writes them; before that it is 0, which names none. Without room for
    // changes there are none, so a null `adjusted` is not read.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], 1024, 0) }
}
