//! Attention in the order of sums of paged attention, for passes whose results must not depend on the batch.

use super::{AttentionCase, AttentionInput, AttentionSpec, HeadView, KeySource, Outputs};
use crate::cuda::{BoxDim, CudaDevice, TensorMap};
use crate::ops::declaration::{Address, kernels};
use crate::ops::launch::Defines;
use crate::{DType, Device, Result, Tensor};
use std::f64::consts::LOG2_E;

kernels! {
    static SOURCE = { file: "ordered", headers: ["hopper.cuh", "attention_order.cuh"], needs: [Wgmma, BulkCopies], variants: VARIANTS };
    kernel ordered_attention(
        o: *mut X, lse: *mut f32, q: *const X, k: *const X, v: *const X, map_of_k: TensorMap, map_of_v: TensorMap, sinks: *const X, q_stride: i32, k_stride: i32, v_stride: i32, seq_len: i32,
        cu_seqlens: *const i32, documents: i32, heads: i32, group: i32, together: i32, dim: i32, lse_length: i32, scale: f32, window: i32, cap: f32
    );
}

/// The type, and the largest head size of each variant.
const VARIANTS: &[Defines] = &[&[("X", "bf16"), ("DIM", "64")], &[("X", "bf16"), ("DIM", "128")]];

/// The number of streams of a part of the keys, and of units of keys in a stream of a part.
const STREAMS: usize = 4;
const UNITS: usize = 4;

/// The number of queries of a block, its number of threads, and the number of keys of a step.
const ROWS: usize = 128;
const THREADS: u32 = 384;
const STEP_KEYS: usize = 128;

/// A variant of the kernel.
#[derive(Clone, Copy)]
pub(super) struct Variant {
    defines: Defines,
    /// The largest head size.
    size: usize,
}

impl Variant {
    /// Returns the variant for a case, if there is one.
    pub fn of(case: &AttentionCase) -> Option<Variant> {
        let AttentionCase { spec, dtype, keys, is_aligned, .. } = *case;
        let AttentionSpec { head_dim, value_dim, causal, .. } = *spec;
        let same_tokens = matches!(keys, KeySource::Fused | KeySource::Separate);
        let sizes = head_dim == value_dim && head_dim.is_multiple_of(16) && head_dim <= 128 && spec.group() <= ROWS;
        let variant = match head_dim {
            0..=64 => Variant { defines: VARIANTS[0], size: 64 },
            _ => Variant { defines: VARIANTS[1], size: 128 },
        };
        (dtype == DType::BF16 && causal && same_tokens && is_aligned && sizes).then_some(variant)
    }

    /// Returns whether the GPU has the instructions of the kernel.
    pub fn runs_on(gpu: &CudaDevice) -> bool {
        gpu.runs(&SOURCE)
    }

    /// Returns the variant for a case, if results on `device` must not depend on the batch.
    pub fn in_use<'a>(device: &'a Device, case: &AttentionCase) -> Option<(&'a CudaDevice, Variant)> {
        match device {
            Device::Cuda(gpu) if gpu.is_batch_invariant() && Variant::runs_on(gpu) => Some((gpu, Variant::of(case)?)),
            _ => None,
        }
    }
}

/// Computes attention as [`attention_with_sinks`](crate::ops::attention_with_sinks()) into `outputs`. `variant` is the variant for this call.
pub(super) fn ordered_attention(
    gpu: &CudaDevice,
    variant: Variant,
    input: AttentionInput,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    outputs: &mut Outputs,
) -> Result<()> {
    let (Variant { defines, size }, Outputs { o, lse, length, .. }) = (variant, outputs);
    let [q, k, v] = input.views().map(|view| Address(view.address()));
    let (tokens, together) = (input.q.matrix.shape()[0], ROWS / spec.group());
    let documents = input.cu_seqlens.map_or(0, |at| at.len() - 1);
    let tiles = match input.cu_seqlens {
        Some(_) => tokens / together + documents,
        None => input.batch * input.query_len().div_ceil(together),
    };
    let entry = kernel::ordered_attention(
        o,
        lse,
        q,
        k,
        v,
        map(input.k, spec, size),
        map(input.v, spec, size),
        sinks,
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
        *length,
        (spec.scale * LOG2_E) as f32,
        spec.window.unwrap_or(0).min(i32::MAX as usize),
        spec.soft_cap.unwrap_or(0.0) * LOG2_E,
    );
    let kernel = SOURCE.kernel(defines, entry);
    // 1 KiB aligns the matrices: the queries, stages of keys and of values, and the sums of all rows in F32.
    let [of_queries, of_step] = [ROWS, STEP_KEYS].map(|rows| rows * size * DType::BF16.size());
    let stages = if size <= 64 { 4 } else { 2 };
    let bytes = 1024 + of_queries + 2 * stages * of_step + ROWS * size * size_of::<f32>();
    // SAFETY: the op has checked that the views, `o` and `lse` have the sizes of the spec; `AttentionInput` requires that documents lie within the rows.
    unsafe { gpu.launch(&kernel, [(tiles * spec.kv_heads) as u32, 1, 1], THREADS, bytes as u32) }
}

/// Returns the keys or values of all heads as the copy engine reads them, in boxes of the units of a stream. `size` is the largest head size of the variant.
fn map(view: HeadView, spec: &AttentionSpec, size: usize) -> TensorMap {
    let (rows, pitch) = (view.matrix.shape()[0], view.stride() * DType::BF16.size());
    let (unit, row_bytes) = (if size <= 64 { 32 } else { 16 }, spec.head_dim * DType::BF16.size());
    // The units of a stream are `apart` rows apart. A box begins at any row for which its last unit ends within the rows.
    let apart = STREAMS * unit;
    let begin = rows.saturating_sub((UNITS - 1) * apart).max(1);
    let dims = [
        BoxDim { size: begin, pitch, of_box: unit },
        BoxDim { size: UNITS, pitch: apart * pitch, of_box: UNITS },
        BoxDim { size: spec.kv_heads, pitch: row_bytes, of_box: 1 },
    ];
    TensorMap::new(view.address(), row_bytes, &dims)
}
