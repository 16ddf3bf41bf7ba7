//! Attention in the order of sums of paged attention, for passes whose results must not depend on the batch.

use super::{AttentionBackend, AttentionCase, AttentionInput, AttentionSpec, KeySource};
use crate::cuda::CudaDevice;
use crate::ops::declaration::{Address, kernels};
use crate::ops::launch::Defines;
use crate::{DType, Result, Tensor};
use std::f64::consts::LOG2_E;

kernels! {
    static SOURCE = { file: "ordered", headers: ["attention_order.cuh"], variants: VARIANTS };
    kernel ordered_attention(
        o: *mut X, lse: *mut f32, q: *const X, k: *const X, v: *const X, q_stride: i32, k_stride: i32, v_stride: i32, seq_len: i32,
        cu_seqlens: *const i32, documents: i32, heads: i32, group: i32, together: i32, dim: i32, by_token: i32, scale: f32, window: i32, cap: f32
    );
}

/// The types, and the largest head size of each variant.
const VARIANTS: &[Defines] = &[
    &[("X", "f16"), ("DIM", "64")],
    &[("X", "f16"), ("DIM", "128")],
    &[("X", "bf16"), ("DIM", "64")],
    &[("X", "bf16"), ("DIM", "128")],
];

/// The number of queries of a block, and its number of threads.
const ROWS: usize = 128;
const THREADS: u32 = 256;

/// Returns the variant and its largest head size, if the kernel supports the call.
pub(super) fn variant(case: &AttentionCase) -> Option<(Defines, usize)> {
    let AttentionCase { spec, dtype, keys, is_aligned, .. } = *case;
    let AttentionSpec { head_dim, value_dim, causal, .. } = *spec;
    let same_tokens = matches!(keys, KeySource::Fused | KeySource::Separate);
    let sizes = head_dim == value_dim && head_dim.is_multiple_of(16) && head_dim <= 128 && spec.group() <= ROWS;
    let size = if head_dim <= 64 { 64 } else { 128 };
    let name = match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => return None,
    };
    let wanted = [name, if size == 64 { "64" } else { "128" }];
    let defines = VARIANTS.iter().find(|defines| defines.iter().map(|define| define.1).eq(wanted))?;
    (causal && same_tokens && is_aligned && sizes).then_some((*defines, size))
}

/// Computes attention as [`attention`](super::attention()), with `lse` in the layout that `backend` reads in backward.
///
/// Panics if the kernel does not support the call ([`variant`]).
pub(super) fn ordered_attention(
    gpu: &CudaDevice,
    backend: AttentionBackend,
    input: AttentionInput,
    spec: &AttentionSpec,
    o: &mut Tensor,
    lse: &mut Tensor,
) -> Result<()> {
    let (defines, size) = variant(&AttentionCase::of_input(&input, spec)).expect("the kernel supports the call");
    let [q, k, v] = input.views().map(|view| Address(view.address()));
    let (tokens, together) = (input.q.matrix.shape()[0], ROWS / spec.group());
    let documents = input.cu_seqlens.map_or(0, |at| at.len() - 1);
    let tiles = match input.cu_seqlens {
        Some(_) => tokens / together + documents,
        None => input.batch * input.query_len().div_ceil(together),
    };
    let by_token = super::has_rows_of_tokens(&input, backend);
    let entry = kernel::ordered_attention(
        o,
        lse,
        q,
        k,
        v,
        input.q.stride(),
        input.k.stride(),
        input.v.stride(),
        input.query_len(),
        input.cu_seqlens,
        documents,
        spec.heads,
        spec.group(),
        together,
        spec.head_dim,
        usize::from(by_token),
        (spec.scale * LOG2_E) as f32,
        spec.window.unwrap_or(0).min(i32::MAX as usize),
        spec.soft_cap.unwrap_or(0.0) * LOG2_E,
    );
    let kernel = SOURCE.kernel(defines, entry);
    // Two stages of 16 KiB of keys and of values, and the sums of all rows in F32.
    let bytes = 4 * (16 << 10) + ROWS * size * size_of::<f32>();
    // SAFETY: the op has checked that the views, `o` and `lse` have the sizes of the spec; `AttentionInput` requires that documents lie within the rows.
    unsafe { gpu.launch(&kernel, [(tiles * spec.kv_heads) as u32, 1, 1], THREADS, bytes as u32) }
}
