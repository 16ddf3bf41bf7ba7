//! Attention of documents, whose keys and values are read where they are, or from a temporary cache.
//!
//! A temporary cache gives results the bits of attention over a cache: if the spec names the type of a cache, and while results must not depend on the batch
//! (`CudaDevice::with_batch_invariance`), if no kernel for whole documents has the order of sums of paged attention for the case.

use super::attention::{self, cache_refusal};
use super::paged_attention::documents;
use super::{AttentionCase, AttentionGradient, AttentionInput, AttentionSpec};
use crate::{DType, Device, Result, Tensor};

/// Returns `o = softmax(s)·v` for each head, `[B·S, H·D_v]`, with the scores `s` of `spec`, and `lse` in F32 (F64 for F64).
///
/// `lse = ln Σ exp(s)`, over the keys that a query sees, is the natural logarithm for scaled and capped scores. Its shape is `[B, H, S]`. For
/// documents in BF16 or F16 on a GPU, it is `[B·S, H]`, as cuDNN writes it. If a query sees no key, `o = 0` and `lse = −∞`. Results over parts of the
/// keys
/// can be merged: `lse = ln Σ exp(lseᵢ)` and `o = Σ exp(lseᵢ − lse)·oᵢ`.
///
/// Errors with [`Error::Value`](crate::Error::Value) if no backend of the device supports the case ([`AttentionBackend::choose`](super::AttentionBackend::choose)). Gemma
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
    let Some(dtype) = cache_dtype(input.q.matrix.device(), &AttentionCase::of_input(&input, spec)) else {
        return attention::forward(input, spec, sinks);
    };
    let mut outputs = attention::outputs(&input, spec)?;
    documents::attention_of_documents(&input, spec, dtype, sinks, &mut outputs)?;
    Ok((outputs.o, outputs.lse))
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
    attention::backward(d_o, input, o, lse, spec)
}

/// Returns the type of the temporary cache whose keys and values forward reads; `None` if forward reads them where they are.
fn cache_dtype(device: &Device, case: &AttentionCase) -> Option<DType> {
    let needs_order = device.is_batch_invariant() && !attention::is_ordered(device, case);
    let is_possible = || cache_refusal(case, case.dtype, device).is_none();
    case.spec.kv_dtype.or_else(|| (needs_order && is_possible()).then_some(case.dtype))
}
