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
//! cases, and if the spec names a type for keys and values, forward stores keys and values in a temporary cache (`paged_attention/documents.rs`).
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
use super::paged_attention::documents;
use super::{attention_sink, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Result, Tensor};

pub(in crate::ops) use cpu::softmax;

/// Returns `o = softmax(s)·v` for each head, `[B·S, H·D_v]`, with the scores `s` of `spec`, and `lse` in F32 (F64 for F64).
///
/// `lse = ln Σ exp(s)`, over the keys that a query sees, is the natural logarithm for scaled and capped scores. Its shape is `[B, H, S]`. For
/// documents in BF16 or F16 on a GPU, it is `[B·S, H]`, as cuDNN writes it. If a query sees no key, `o = 0` and `lse = −∞`. Results over parts of the
/// keys
/// can be merged: `lse = ln Σ exp(lseᵢ)` and `o = Σ exp(lseᵢ − lse)·oᵢ`.
///
/// Errors with [`Error::Value`](crate::Error::Value) if no backend of the device supports the case ([`AttentionBackend::choose`]). Gemma
/// Team 2024, arXiv:2408.00118 (soft cap); Beltagy et al. 2020, arXiv:2004.05150 (window).
pub fn attention(input: AttentionInput, spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
    attention_with_sinks(input, spec, None)
}

/// Returns the results of [`attention`], to whose softmax `sinks` are added as by [`attention_sink`](super::attention_sink()).
///
/// Has the errors of both.
pub fn attention_with_sinks(
    input: AttentionInput,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    input.check("attention", spec)?;
    let (device, dtype) = (input.q.matrix.device(), input.q.matrix.dtype());
    let case = AttentionCase::of_input(&input, spec);
    let backend = AttentionBackend::choose(device, &case)?.backend;
    let mut o = Tensor::empty(device, &[input.q.matrix.shape()[0], spec.output_width()], dtype)?;
    let mut lse = Tensor::empty(device, &lse_shape(&input, spec, backend), real_type(dtype))?;
    if let Some(dtype) = cache_dtype(device, &case) {
        let length = if has_rows_of_tokens(&input, backend) { 0 } else { input.query_len() };
        documents::attention_of_documents(&input, spec, dtype, sinks, [&mut o, &mut lse], length)?;
        return Ok((o, lse));
    }
    if let Some((gpu, variant)) = Variant::in_use(device, &case) {
        ordered::ordered_attention(gpu, variant, backend, input, spec, sinks, [&mut o, &mut lse])?;
        return Ok((o, lse));
    }
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

/// Returns the gradients of [`attention`] by queries, keys and values, from `d_o` and the results of forward.
///
/// If `o` and `lse` were merged over several parts of the keys, the gradients by the keys and values of a part are final, and the gradients by
/// queries must be summed over the parts. Has the errors of [`attention`], and also errors if the views of a tensor do not cover all its columns.
pub fn attention_backward(
    d_o: &Tensor,
    input: AttentionInput,
    o: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
) -> Result<AttentionGradient> {
    input.check("attention_backward", spec)?;
    // The rounding of keys and values has the gradient of the identity.
    let stored = documents::as_stored(&input, spec)?;
    let input = match &stored {
        Some(qkv) => AttentionInput::fused(qkv, spec, input.batch, input.cu_seqlens),
        None => input,
    };
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

/// Returns the type of the temporary cache whose keys and values forward reads; `None` if forward reads them where they are.
fn cache_dtype(device: &Device, case: &AttentionCase) -> Option<DType> {
    let needs_order = device.is_batch_invariant() && Variant::in_use(device, case).is_none();
    let is_possible = || documents::refusal(case, case.dtype, device).is_none();
    case.spec.kv_dtype.or_else(|| (needs_order && is_possible()).then_some(case.dtype))
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
