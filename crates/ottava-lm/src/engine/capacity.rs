//! Sizes an engine for given requests within the memory of its device.

use super::blocks::BLOCK_SIZE;
use super::request::{EngineOptions, KvCacheDtype};
use crate::error::{Error, Result};
use crate::limits;
use crate::models::Decoder;
use ottava_tensor::Device;

/// Requests computed at once. On a CPU, larger batches do not make products of few rows cheaper.
const MAX_BATCH: [usize; 2] = [32, 256];

/// Tokens of a step.
const PREFILL_CHUNK: usize = 2048;

impl EngineOptions {
    /// Room for as many requests at once as memory allows, each of which has one of `lengths` tokens at most, its completion included;
    /// none is longer than `max_model_len`.
    ///
    /// Errors with [`Error::Memory`] if even a single request of the greatest length does not fit.
    pub fn for_lengths(
        model: &Decoder,
        lengths: impl IntoIterator<Item = usize>,
        max_model_len: usize,
        kv_cache_dtype: KvCacheDtype,
    ) -> Result<EngineOptions> {
        let max_batch = MAX_BATCH[usize::from(matches!(model.device(), Device::Cuda(_)))];
        let mut blocks: Vec<usize> =
            lengths.into_iter().map(|length| length.min(max_model_len).div_ceil(BLOCK_SIZE)).collect();
        blocks.sort_unstable_by(|a, b| b.cmp(a));
        let longest = blocks.first().copied().unwrap_or(1);
        let block_bytes = model.kv_block_bytes(BLOCK_SIZE, kv_cache_dtype.resolve(model.recipe().compute));
        let available = available(model.device())? / block_bytes.max(1);
        if longest > available {
            return Err(Error::Memory(format!(
                "a request of {} tokens needs {} MiB of KV cache, and there is room for {} tokens: ask for fewer tokens, or take a KV cache in fp8",
                longest * BLOCK_SIZE,
                (longest * block_bytes) >> 20,
                available * BLOCK_SIZE
            )));
        }
        let wanted: usize = blocks.iter().take(max_batch).sum();
        let kv_cache_tokens = wanted.clamp(1, available.max(1)) * BLOCK_SIZE;
        Ok(EngineOptions { max_model_len, max_batch, kv_cache_tokens, prefill_chunk: PREFILL_CHUNK, kv_cache_dtype })
    }
}

/// Bytes that a KV cache may take: the rest is for activations and logits.
fn available(device: &Device) -> Result<usize> {
    Ok(match device {
        Device::Cuda(gpu) => gpu.memory_info()?.0 / 10 * 8,
        _ => limits::available_memory().map_or(usize::MAX, |bytes| bytes as usize / 2),
    })
}
