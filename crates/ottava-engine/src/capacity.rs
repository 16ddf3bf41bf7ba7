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
        // A draft model has as many saved states as states.
        let of_draft = draft.map_or(0, |draft| 2 * draft.state_bytes());
        let states = States::within(memory, [model.state_bytes(), of_draft], blocks.len(), most)?;
        let (max_batch, memory) = (states.max_batch, memory - states.bytes);
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
                saved_states: states.saved,
                batch_invariant: false,
                async_scheduling: false,
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

/// The recurrent states of requests that are computed at once, and saved states.
#[derive(Debug, PartialEq, Eq)]
struct States {
    /// The number of requests that are computed at once.
    max_batch: usize,
    /// The number of saved states.
    saved: usize,
    /// The bytes of all states.
    bytes: usize,
}

impl States {
    /// Returns how many of `requests` are computed at once, at most `most`, and the states beside them. A request has states of `own` bytes, and of
    /// `of_draft` bytes in a draft model. States take at most half of the memory, and at most as many states are saved as requests are computed at once.
    /// If two requests fit, there is room for a saved state.
    ///
    /// Errors with [`Error::Memory`] if the states of a single request do not fit.
    fn within(memory: usize, [own, of_draft]: [usize; 2], requests: usize, most: usize) -> Result<States> {
        let (half, each) = (memory / 2, own + of_draft);
        let Some(fitting) = half.checked_div(each) else {
            return Ok(States { max_batch: most, saved: 0, bytes: 0 });
        };
        if fitting == 0 {
            return Err(Error::Memory(format!(
                "the recurrent states of a request take {} MiB, and half of the {} MiB for caches is for states: take a smaller model, or a device with \
                 more memory",
                each >> 20,
                memory >> 20
            )));
        }
        let beside_saved = half.saturating_sub(own) / each;
        let max_batch = most.min(requests.max(1)).min(beside_saved.max(1));
        let saved = (half - max_batch * each).checked_div(own).unwrap_or(0).min(max_batch);
        Ok(States { max_batch, saved, bytes: max_batch * each + saved * own })
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
        let of = |bytes, requests| {
            let States { max_batch, saved, bytes } = States::within(1000, bytes, requests, 32).unwrap();
            (max_batch, saved, bytes)
        };
        assert_eq!(of([0, 0], 3), (32, 0, 0));
        assert_eq!((of([100, 0], 2), of([100, 0], 3), of([100, 0], 50)), ((2, 2, 400), (3, 2, 500), (4, 1, 500)));
        assert_eq!((of([100, 20], 3), of([0, 100], 3)), ((3, 1, 460), (3, 0, 300)));
        assert!(States::within(1000, [501, 0], 50, 32).unwrap_err().to_string().contains("recurrent states"));
    }
}
