use super::{Draws, ONE};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::kernel_source;
use crate::{Result, Tensor};

kernel_source!("sample"; ONE);

pub(super) fn sample(
    gpu: &CudaDevice,
    logits: &Tensor,
    draws: &mut Draws,
    tokens: &mut Tensor,
    logprobs: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = draws.shape;
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "sample" };
    let adjusted = draws.adjusted.as_mut().map_or(0, Tensor::device_ptr_mut);
    let args = [
        Arg::Ptr(tokens.device_ptr_mut()),
        Arg::Ptr(logprobs.device_ptr_mut()),
        Arg::Ptr(logits.device_ptr()),
        Arg::Ptr(adjusted),
        Arg::Ptr(draws.words.device_ptr()),
        Arg::I32(columns as i32),
    ];
    // SAFETY: `logits` and `adjusted` are `rows · columns`, `tokens` and `logprobs` `rows`. `words` has a `RowDraw` for each row and the changes
    // that these name, of columns below `columns`, as `Draws::set` writes them; before that it is 0, which names none. Without room for
    // changes there are none, so a null `adjusted` is not read.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], 1024, 0, &args) }
}
