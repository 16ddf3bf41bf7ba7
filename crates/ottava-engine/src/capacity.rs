//! Chooses the sizes of an engine for given requests within the memory of its device.

use crate::block_pool::BLOCK_SIZE;
use crate::blocks::Pools;
use crate::request::{EngineOptions, LogprobsMode};
use ottava_common::error::{Error, Result};
use ottava_common::limits;
use ottava_models::{Decoder, KvGroup};
use ottava_recipe::KvCacheDtype;
use ottava_tensor::Device;

/// The maximum number of requests computed at once, on a CPU and on a GPU. On a CPU, larger batches do not make products of few rows cheaper.
const MAX_BATCH: [usize; 2] = [32, 256];

/// The maximum number of tokens of a step.
const PREFILL_CHUNK: usize = 2048;

impl EngineOptions {
    /// Chooses options with room for as many requests at once as memory allows. `lengths` has the maximum number of tokens of each request, including
    /// its completion. A length above `max_model_len` counts as `max_model_len`. A `draft` model gets a cache for as many tokens.
    ///
    /// Errors with [`Error::Memory`] if a single request of the greatest length does not fit.
    pub fn for_lengths(
        model: &Decoder,
        draft: Option<&Decoder>,
        lengths: impl IntoIterator<Item = usize>,
        max_model_len: usize,
        kv_cache_dtype: KvCacheDtype,
    ) -> Result<EngineOptions> {
        let memory = available(model.device())?;
        EngineOptions::within(memory, model, draft, lengths, max_model_len, kv_cache_dtype)
    }

    /// Chooses options as [`EngineOptions::for_lengths`], with caches of at most `memory` bytes.
    pub fn within(
        memory: usize,
        model: &Decoder,
        draft: Option<&Decoder>,
        lengths: impl IntoIterator<Item = usize>,
        max_model_len: usize,
        kv_cache_dtype: KvCacheDtype,
    ) -> Result<EngineOptions> {
        let mut blocks: Vec<usize> =
            lengths.into_iter().map(|length| length.min(max_model_len).div_ceil(BLOCK_SIZE)).collect();
        let most = MAX_BATCH[usize::from(matches!(model.device(), Device::Cuda(_)))];
        let (max_batch, memory) = beside_states(memory, model.state_bytes(), blocks.len(), most)?;
        blocks.sort_unstable_by(|a, b| b.cmp(a));
        let longest = blocks.first().copied().unwrap_or(1);
        let of = |blocks: usize| {
            let kv_cache_tokens = blocks * BLOCK_SIZE;
            EngineOptions {
                max_model_len,
                max_batch,
                kv_cache_tokens,
                prefill_chunk: PREFILL_CHUNK,
                kv_cache_dtype,
                prefix_caching: true,
                batch_invariant: false,
                logprobs_mode: LogprobsMode::default(),
            }
        };
        let models = [Some(model), draft].into_iter().flatten();
        let groups: Vec<_> = models.map(|model| (model, model.kv_groups(max_model_len))).collect();
        let bytes = |blocks: usize| -> usize {
            let of_group = |model: &Decoder, group| {
                let dtype = kv_cache_dtype.resolve(model.recipe().compute);
                of(blocks).blocks_of(group) * model.kv_block_bytes(group, BLOCK_SIZE, dtype)
            };
            groups.iter().flat_map(|(model, groups)| groups.iter().map(|group| of_group(model, group))).sum()
        };
        let wanted: usize = blocks.iter().take(max_batch).sum::<usize>().max(1);
        // Finds the largest number of blocks up to `wanted` that fits.
        let (mut fitting, mut excess) = (0, wanted + 1);
        while excess - fitting > 1 {
            let middle = fitting.midpoint(excess);
            if bytes(middle) <= memory { fitting = middle } else { excess = middle }
        }
        if longest > fitting {
            return Err(Error::Memory(format!(
                "a request of {} tokens needs {} MiB of KV cache, and there is room for {} tokens: ask for fewer tokens, or take a KV cache in fp8",
                longest * BLOCK_SIZE,
                bytes(longest) >> 20,
                fitting * BLOCK_SIZE
            )));
        }
        Ok(of(fitting.max(1)))
    }

    /// Returns the number of blocks of a group of attention layers.
    pub(super) fn blocks_of(&self, group: &KvGroup) -> usize {
        Pools::blocks_for(group.window, self.kv_cache_tokens, self.max_batch, self.prefill_chunk)
    }
}

/// Returns how many of `requests` are computed at once, at most `most`, and the memory that their recurrent states of `state_bytes` each leave for keys
/// and values. States take at most half of the memory.
///
/// Errors with [`Error::Memory`] if the states of a single request do not fit.
fn beside_states(memory: usize, state_bytes: usize, requests: usize, most: usize) -> Result<(usize, usize)> {
    if state_bytes == 0 {
        return Ok((most, memory));
    }
    match memory / 2 / state_bytes {
        0 => Err(Error::Memory(format!(
            "the recurrent states of a request take {} MiB, and half of the {} MiB for caches is for states: take a smaller model, or a device with \
             more memory",
            state_bytes >> 20,
            memory >> 20
        ))),
        fitting => {
            let max_batch = most.min(requests.max(1)).min(fitting);
            Ok((max_batch, memory - max_batch * state_bytes))
        }
    }
}

/// Returns the bytes that a KV cache may take. The other memory is for activations and logits.
fn available(device: &Device) -> Result<usize> {
    Ok(match device {
        Device::Cuda(gpu) => gpu.memory_info()?.0 / 10 * 8,
        _ => limits::available_memory().map_or(usize::MAX, |bytes| bytes as usize / 2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_leave_memory_for_keys_and_values() {
        assert_eq!(beside_states(1000, 0, 3, 32).unwrap(), (32, 1000));
        assert_eq!(beside_states(1000, 100, 3, 32).unwrap(), (3, 700));
        assert_eq!(beside_states(1000, 100, 50, 32).unwrap(), (5, 500));
        assert!(beside_states(1000, 501, 50, 32).unwrap_err().to_string().contains("recurrent states"));
    }
}
