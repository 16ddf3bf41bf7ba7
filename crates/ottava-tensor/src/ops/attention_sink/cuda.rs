use super::Sizes;
use crate::cuda::CudaDevice;
use crate::ops::bias::add_partial_sums;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "attention_sink", variants: launch::STORAGE };
    kernel attention_sink(o: *mut X, lse: *mut f32, sinks: *const X, heads: i32, dim: i32, seq_len: i32);
    kernel sink_gradients(
        partial: *mut f32, d_o: *const X, o: *const X, lse: *const f32, sinks: *const X, heads: i32, dim: i32, seq_len: i32, tokens: i32,
        chunk: i32
    );
}

/// The number of tokens per block of the backward kernel.
const CHUNK: usize = 128;

impl Sizes {
    /// Returns the number of heads, of elements of a head, and of tokens of a sequence (0 if `lse` is `[B·S, H]`).
    fn of_kernels(&self) -> [usize; 3] {
        [self.heads, self.dim, self.seq_len.unwrap_or(0)]
    }
}

pub(super) fn attention_sink(
    gpu: &CudaDevice,
    o: &mut Tensor,
    lse: &mut Tensor,
    sinks: &Tensor,
    sizes: Sizes,
) -> Result<()> {
    let [heads, dim, seq_len] = sizes.of_kernels();
    let defines = launch::storage(o.dtype())?;
    let kernel = SOURCE.kernel(defines, kernel::attention_sink(o, lse, sinks, heads, dim, seq_len));
    let shared = (sizes.heads * size_of::<f32>()) as u32;
    // SAFETY: each token has a block; `o` has `heads · dim` elements per token, `lse` one per token and head, and shared memory one per head.
    unsafe { gpu.launch(&kernel, [sizes.tokens.max(1) as u32, 1, 1], BLOCK, shared) }
}

pub(super) fn attention_sink_backward(
    gpu: &CudaDevice,
    d_o: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
    dsinks: &mut Tensor,
    sizes: Sizes,
) -> Result<()> {
    let chunks = sizes.tokens.div_ceil(CHUNK).max(1);
    let mut partial = Tensor::empty(dsinks.device(), &[chunks, sizes.heads], DType::F32)?;
    let [heads, dim, seq_len] = sizes.of_kernels();
    let entry = kernel::sink_gradients(&mut partial, d_o, o, lse, sinks, heads, dim, seq_len, sizes.tokens, CHUNK);
    let kernel = SOURCE.kernel(launch::storage(o.dtype())?, entry);
    // SAFETY: as above; `partial` has an element for each chunk of tokens and each head, and each element has a block.
    unsafe { gpu.launch(&kernel, [sizes.heads as u32, chunks as u32, 1], BLOCK, 0)? };
    add_partial_sums(gpu, &partial, dsinks)
}
