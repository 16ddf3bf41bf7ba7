//! Attention of new tokens of many sequences over keys and values in blocks of a shared cache (paged KV cache). Kwon et al. 2023,
//! arXiv:2309.06180.
//!
//! Kernels of a decode step may start before their predecessor ends (`CudaDevice::launch_early`). They wait for the predecessor
//! (`wait_for_predecessors`) before they read or write memory that the predecessor writes. Before the wait, a kernel reads only memory that no kernel
//! of the pass writes. For example, products of few rows (`ops/gemm/skinny.cu`) fetch weights, and attention reads its position in the batch, and
//! keys and values of tokens of earlier passes (`PagedBatch::cached_lens`). If a sequence has several rows, the keys of its earlier rows are appended
//! in the same pass and are read after the wait. The first kernel of a pass, the embedding, does not start early, so the data of earlier passes are
//! complete. Casts of such a pass compute no statistics (`CastStatistics::unread`).

mod cpu;
pub(super) mod cuda;
pub(super) mod documents;
mod memory;
#[cfg(test)]
mod tests;

pub use memory::SuspendedKv;

use super::rope::{self, Angles, RopeLayout, RopePairs, Rotation, rope};
use super::{AttentionBackend, AttentionCase, AttentionSpec, expect_compute};
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// Returns the heads that are rotated: query heads and key heads.
fn rotated(spec: &AttentionSpec, pairs: RopePairs) -> RopeLayout {
    RopeLayout { heads: spec.heads + spec.kv_heads, head_dim: spec.head_dim, pairs }
}

/// Returns the number of counters of a sequence: one for each key head and each eight query heads that share this key head.
fn counters(spec: &AttentionSpec) -> usize {
    spec.kv_heads * spec.group().div_ceil(8)
}

/// The keys and values of one layer, in blocks. A block belongs to one sequence at a time.
pub struct KvBlocks {
    /// The keys and then the values of each block, `[blocks, 2, H_kv, block size, D]`: F64, F32, F16 or BF16, or E4M3 codes.
    data: Tensor,
    /// For codes, the inverse scale of each token and head, F32 `[blocks, 2, H_kv, block size]`.
    scale_inv: Option<Tensor>,
    /// The number of thread blocks that have read their split of a sequence, I32 `[blocks, counters]`. A row belongs to a sequence of the batch. Zero
    /// between ops.
    arrived: Tensor,
}

impl KvBlocks {
    /// Allocates `blocks` blocks of `block_size` tokens in type `dtype`, for attention by `spec`.
    pub fn new(
        device: &Device,
        spec: &AttentionSpec,
        blocks: usize,
        block_size: usize,
        dtype: DType,
    ) -> Result<KvBlocks> {
        let mut layers = KvBlocks::of_layers(device, &[(*spec, blocks)], block_size, dtype)?;
        Ok(layers.pop().expect("one layer"))
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(spec: &AttentionSpec, block_size: usize, dtype: DType) -> usize {
        let scale = if dtype == DType::E4M3 { size_of::<f32>() } else { 0 };
        let arrived = counters(spec) * size_of::<i32>();
        2 * spec.kv_heads * block_size * (spec.head_dim * dtype.size() + scale) + arrived
    }

    /// Returns the number of tokens of a block.
    pub fn block_size(&self) -> usize {
        self.data.shape()[3]
    }

    /// Returns the type of keys and values.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Returns the codes and scales, or the values, for comparisons.
    pub fn tensors(&self) -> Vec<&Tensor> {
        std::iter::once(&self.data).chain(&self.scale_inv).collect()
    }
}

/// The new tokens of each sequence, and the blocks of the sequence's keys and values. All tensors are I32 on the device and have a capacity of `R`
/// sequences. Unused sequences have no new tokens and a context of 0.
#[derive(Clone, Copy)]
pub struct PagedBatch<'a> {
    /// The ranges of new tokens, `[R + 1]`. Sequence `r` has the new tokens `query_starts[r]..query_starts[r + 1]`. Tokens after the last range are
    /// padding.
    pub query_starts: &'a Tensor,
    /// The number of tokens of each sequence, `[R]`. The new tokens are its last tokens and are included.
    pub context_lens: &'a Tensor,
    /// The number of tokens of each sequence whose keys and values were written by earlier passes, `[R]`. A GPU may read them before earlier ops have
    /// ended. These are the tokens before the new tokens. If several rows of a pass are tokens of one sequence, these are the tokens before the first
    /// of these rows.
    pub cached_lens: &'a Tensor,
    /// The blocks of each sequence in the order of its tokens, `[R, max blocks]`.
    pub block_tables: &'a Tensor,
    /// The largest number of new tokens of a sequence. It selects the kernel; 1 means decode.
    pub max_new: usize,
}

impl PagedBatch<'_> {
    /// Returns the maximum number of sequences.
    fn capacity(&self) -> usize {
        self.context_lens.len()
    }

    /// Returns the maximum number of tokens of a sequence.
    fn max_context(&self, cache: &KvBlocks) -> usize {
        self.block_tables.shape()[1] * cache.block_size()
    }
}

fn check(what: &str, qkv: &Tensor, cache: &KvBlocks, batch: &PagedBatch, spec: &AttentionSpec) -> Result<usize> {
    expect_compute(what, qkv)?;
    let [tokens, width] = qkv.dims(what)?;
    spec.check(what)?;
    AttentionBackend::choose(qkv.device(), &AttentionCase::cache(spec, qkv.dtype()))?;
    let [_, _, kv_heads, _, head_dim] = cache.data.dims(what)?;
    if width != spec.qkv_width() || kv_heads != spec.kv_heads || head_dim != spec.head_dim {
        return Err(Error::Value(format!(
            "{what}: rows of {width} elements and a cache of shape {:?} are not those of {spec:?}",
            cache.data.shape()
        )));
    }
    let fits = match (qkv.dtype(), cache.dtype()) {
        (DType::F64, kv) => kv == DType::F64,
        (x, kv) => x == kv || matches!(kv, DType::BF16 | DType::E4M3),
    };
    if !fits {
        return Err(Error::Value(format!(
            "{what}: a cache in {} does not hold keys in {}",
            cache.dtype(),
            qkv.dtype()
        )));
    }
    let [sequences] = batch.context_lens.dims(what)?;
    let [rows, _] = batch.block_tables.dims(what)?;
    batch.query_starts.expect("query_starts", &[sequences + 1])?;
    batch.cached_lens.expect("cached_lens", &[sequences])?;
    batch.block_tables.expect("block_tables", &[sequences, batch.block_tables.len() / rows.max(1)])?;
    for index in [batch.query_starts, batch.context_lens, batch.cached_lens, batch.block_tables] {
        index.expect_dtype(what, &[DType::I32])?;
        index.expect_device(what, qkv.device())?;
    }
    cache.data.expect_device(what, qkv.device())?;
    Ok(tokens)
}

/// Writes keys and values of new tokens to their places in `cache`. `qkv` `[T, (H + 2·H_kv)·D]` has the layout of [`attention`](super::attention()).
/// With a `rotation`, queries and keys are first rotated in the same launch, with the bits of [`rope`](super::rope()).
///
/// With codes, the key or value of each token and head has a separate scale `448 / amax`, which later tokens do not change. `qkv` is overwritten
/// with the dequantized values, so attention over `qkv` and attention over the cache read the same values.
///
/// On the CPU, errors with [`Error::Value`] if an index is outside the cache. A GPU does not check.
pub fn append_kv(
    qkv: &mut Tensor,
    cache: &mut KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    rotation: Option<(Angles, RopePairs)>,
) -> Result<()> {
    let tokens = check("append_kv", qkv, cache, batch, spec)?;
    if let Some((angles, pairs)) = rotation {
        rope::check(qkv, angles, rotated(spec, pairs))?;
    }
    if tokens == 0 {
        return Ok(());
    }
    dispatch! { qkv.device().clone(),
        cpu => {
            if let Some((angles, pairs)) = rotation {
                rope(qkv, angles, rotated(spec, pairs), Rotation::Forward)?;
            }
            cpu::append_kv(qkv, cache, batch, spec)?;
        },
        gpu => cuda::append_kv(&gpu, qkv, cache, batch, spec, rotation)?,
    }
    Ok(())
}

/// Returns the attention `o` `[T, H·D]` of new tokens over their sequence, up to and including themselves, as in [`attention`](super::attention()).
/// [`append_kv`] must have written the keys and values. With `sinks` `[H]` in the type of `qkv`, the result is as after
/// [`attention_sink`](super::attention_sink()). Padding rows are zero.
///
/// Has the errors of [`append_kv`].
pub fn paged_attention(
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
) -> Result<Tensor> {
    let tokens = check("paged_attention", qkv, cache, batch, spec)?;
    if let Some(sinks) = sinks {
        sinks.expect("paged_attention: sinks", &[spec.heads])?;
        sinks.expect_dtype("paged_attention: sinks", &[qkv.dtype()])?;
        sinks.expect_device("paged_attention: sinks", qkv.device())?;
    }
    let mut o = Tensor::empty(qkv.device(), &[tokens, spec.output_width()], qkv.dtype())?;
    if tokens == 0 {
        return Ok(o);
    }
    dispatch! { qkv.device(),
        cpu => {
            o.fill_zero()?;
            cpu::paged_attention(qkv, cache, batch, spec, sinks, &mut o, None)?
        },
        gpu => cuda::paged_attention(gpu, qkv, cache, batch, spec, sinks, &mut o)?,
    }
    Ok(o)
}
