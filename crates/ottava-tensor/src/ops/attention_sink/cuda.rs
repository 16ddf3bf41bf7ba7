use super::Sizes;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::bias::add_partial_sums;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("attention_sink");

/// Tokens of a block of the backward kernel.
const CHUNK: usize = 128;

impl Sizes {
    /// Heads, elements of a head, and tokens of a sequence, 0 if `lse` is by token.
    fn args(&self) -> [Arg; 3] {
        [self.heads, self.dim, self.seq_len.unwrap_or(0)].map(|size| Arg::I32(size as i32))
    }
}

pub(super) fn attention_sink(
    gpu: &CudaDevice,
    o: &mut Tensor,
    lse: &mut Tensor,
    sinks: &Tensor,
    sizes: Sizes,
) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(o.dtype())?, entry: "attention_sink" };
    let pointers = [o.device_ptr_mut(), lse.device_ptr_mut(), sinks.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &sizes.args()].concat();
    let shared = (sizes.heads * size_of::<f32>()) as u32;
    // SAFETY: a block for each token; `o` has `heads · dim` elements of each, `lse` one per token and head, and shared memory one per head.
    unsafe { gpu.launch(&kernel, [sizes.tokens.max(1) as u32, 1, 1], BLOCK, shared, &args) }
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
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(o.dtype())?, entry: "sink_gradients" };
    let inputs = [d_o, o, lse, sinks].map(Tensor::device_ptr);
    let args = [
        &[Arg::Ptr(partial.device_ptr_mut())],
        inputs.map(Arg::Ptr).as_slice(),
        &sizes.args(),
        &[sizes.tokens, CHUNK].map(|size| Arg::I32(size as i32)),
    ]
    .concat();
    // SAFETY: as above, and `partial` has an element for each chunk of tokens and each head: one block for each.
    unsafe { gpu.launch(&kernel, [sizes.heads as u32, chunks as u32, 1], BLOCK, 0, &args)? };
    add_partial_sums(gpu, &partial, dsinks)
}
