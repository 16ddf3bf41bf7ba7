//! Softmax attention over heads that may share keys and values. Dao et al. 2022, arXiv:2205.14135; Ainslie et al. 2023, arXiv:2305.13245.
//!
//! An `AttentionSpec` holds what is constant for a layer: heads and their sizes, mask, window, soft cap and scale. An `AttentionInput` holds what
//! differs between calls: views of queries, keys and values in one tensor or several, the position of the first query, and the boundaries of
//! documents. Attention also returns the log-sum-exp `lse`, so that results over parts of the keys can be merged.
//!
//! The CPU reference supports all combinations. On a GPU, `AttentionBackend::choose` looks the case up in a table of what cuDNN, the plain kernels
//! and the paged kernels support. `ottava plan` prints the choice. If no backend supports a case, the error lists the reasons. A `Condition` may
//! apply only to GPUs that lack a feature: outside Hopper, the table excludes cuDNN for windows, soft caps and head dimensions above 128.
//!
//! While results must not depend on the batch (`CudaDevice::with_batch_invariance`), forward uses `ordered.cu` where it supports the case. It has the order
//! of sums of paged attention (`attention_order.cuh`), so the attention of a whole document has the bits that its tokens get one by one over a cache. In other
//! cases, and if the spec names a type for keys and values, `ops/document_attention.rs` computes attention over a temporary cache.
//!
//! The plain kernels are compiled in two forms: for causal attention of a fused projection, and with the define `GENERAL` for every spec. The paged
//! kernels support a window and a soft cap with the define `BOUNDED`.

mod backend;
mod cpu;
pub(super) mod cuda;
mod input;
pub(super) mod ordered;
mod spec;
#[cfg(test)]
mod tests;

pub use backend::{AttentionBackend, AttentionCase, ChosenBackend, KeySource};
pub use input::{AttentionGradient, AttentionInput, HeadView};
pub use spec::AttentionSpec;

use self::ordered::Variant;
use super::{attention_sink, real_type};
use crate::ops::dispatch::dispatch;
use crate::{Device, Result, Tensor};

pub(in crate::ops) use backend::cache_refusal;
pub(in crate::ops) use cpu::softmax;

/// Computes attention as [`attention_with_sinks`](super::attention_with_sinks()), which has checked `input`, for keys and values that are read where they are.
pub(in crate::ops) fn forward(
    input: AttentionInput,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (device, case) = (input.q.matrix.device(), AttentionCase::of_input(&input, spec));
    let mut outputs = outputs(&input, spec)?;
    if let Some((gpu, variant)) = Variant::in_use(device, &case) {
        ordered::ordered_attention(gpu, variant, input, spec, sinks, &mut outputs)?;
        return Ok((outputs.o, outputs.lse));
    }
    let Outputs { backend, mut o, mut lse, .. } = outputs;
    dispatch! { device,
        scratch => cpu::scratch(&input, spec),
        cpu => cpu::attention(input, spec, &mut o, &mut lse),
        gpu => cuda::attention(gpu, backend, input, spec, &mut o, &mut lse)?,
    }
    if let Some(sinks) = sinks {
        attention_sink(&mut o, &mut lse, sinks)?;
    }
    Ok((o, lse))
}

/// Returns the gradients of [`forward`]. [`attention_backward`](super::attention_backward()) has checked `input`.
pub(in crate::ops) fn backward(
    d_o: &Tensor,
    input: AttentionInput,
    o: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
) -> Result<AttentionGradient> {
    input.check_coverage("attention_backward", spec)?;
    let (device, dtype) = (input.q.matrix.device(), input.q.matrix.dtype());
    let backend = AttentionBackend::choose(device, &AttentionCase::of_input(&input, spec))?.backend;
    for (what, tensor) in [("attention_backward: do", d_o), ("attention_backward: o", o)] {
        tensor.expect(what, &[input.q.matrix.shape()[0], spec.output_width()])?;
        tensor.expect_dtype(what, &[dtype])?;
    }
    lse.expect("attention_backward: lse", &lse_shape(&input, spec, backend))?;
    let mut gradient =
        AttentionGradient { tensors: input.matrices().into_iter().map(Tensor::empty_like).collect::<Result<_>>()? };
    dispatch! { device,
        scratch => cpu::scratch_of_backward(&input, spec),
        cpu => cpu::attention_backward(d_o, input, o, lse, spec, &mut gradient.tensors),
        gpu => cuda::attention_backward(gpu, backend, [d_o, o, lse], input, spec, &mut gradient.tensors)?,
    }
    Ok(gradient)
}

/// The tensors that forward writes, and the backend of backward, whose layout `lse` has.
pub(in crate::ops) struct Outputs {
    pub backend: AttentionBackend,
    pub o: Tensor,
    pub lse: Tensor,
    /// 0 if `lse` has a row for each token, and otherwise the number of tokens of a sequence.
    pub length: usize,
}

/// Allocates the outputs of a call.
pub(in crate::ops) fn outputs(input: &AttentionInput, spec: &AttentionSpec) -> Result<Outputs> {
    let (device, dtype) = (input.q.matrix.device(), input.q.matrix.dtype());
    let backend = AttentionBackend::choose(device, &AttentionCase::of_input(input, spec))?.backend;
    let o = Tensor::empty(device, &[input.q.matrix.shape()[0], spec.output_width()], dtype)?;
    let lse = Tensor::empty(device, &lse_shape(input, spec, backend), real_type(dtype))?;
    let length = if has_rows_of_tokens(input, backend) { 0 } else { input.query_len() };
    Ok(Outputs { backend, o, lse, length })
}

/// Returns whether forward of a case on `device` runs a kernel for whole documents in the order of sums of paged attention.
pub(in crate::ops) fn is_ordered(device: &Device, case: &AttentionCase) -> bool {
    Variant::in_use(device, case).is_some()
}

fn lse_shape(input: &AttentionInput, spec: &AttentionSpec, backend: AttentionBackend) -> Vec<usize> {
    match has_rows_of_tokens(input, backend) {
        true => vec![input.batch * input.query_len(), spec.heads],
        false => vec![input.batch, spec.heads, input.query_len()],
    }
}

/// Returns whether `lse` has a row for each token instead of a row for each head, since backward of `backend` reads it so.
fn has_rows_of_tokens(input: &AttentionInput, backend: AttentionBackend) -> bool {
    backend == AttentionBackend::CuDnn && input.cu_seqlens.is_some()
}
