//! Completions by the model that is trained.

use super::sample::{Draw, sample};
use ottava_common::error::Result;
use ottava_common::limits;
use ottava_engine::{Engine, EngineOptions, LogprobsMode};
use ottava_models::Decoder;
use ottava_parallel::{Partition, Ranks, WholeWeights};
use ottava_recipe::KvCacheDtype;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use std::rc::Rc;

/// The sizes of draws.
#[derive(Clone, Copy, Debug)]
pub struct DrawSizes {
    /// Completions that are drawn for the steps of a generation.
    pub completions: usize,
    /// Tokens of a prompt and its completion, at most.
    pub max_length: usize,
    /// Tokens of the KV cache; 0 for as many as the completions need and memory has room for.
    pub kv_cache_tokens: usize,
    /// The format of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// The log-probabilities that draws report.
    pub logprobs_mode: LogprobsMode,
}

impl DrawSizes {
    /// The draws of a rank of a run of reinforcement learning, which has so many `completions` of a generation.
    pub fn of_generation(run: &RunConfig, completions: usize) -> DrawSizes {
        DrawSizes {
            completions,
            max_length: run.data.max_length,
            kv_cache_tokens: run.reinforcement.sampling.kv_cache_tokens,
            kv_cache_dtype: run.reinforcement.sampling.kv_cache_dtype,
            logprobs_mode: LogprobsMode::Loss,
        }
    }
}

/// An engine to which the model is lent. Between draws, steps use the memory of its KV cache.
pub struct Drawer {
    sizes: DrawSizes,
    /// Made of the model at the first draw.
    engine: Option<Engine>,
    whole: WholeWeights,
}

impl Drawer {
    /// Draws of these sizes.
    pub fn new(sizes: DrawSizes) -> Drawer {
        Drawer { sizes, engine: None, whole: WholeWeights::default() }
    }

    /// Runs `draw` with an engine of `model`, as [`Engine::lend`]. All ranks of `partition` call it together. Then ranks that divide tensors or experts
    /// draw the same completions, with the same calls of the engine; other ranks draw independently.
    ///
    /// Errors as [`Engine::to_lend`] and `draw`.
    pub fn lend<T>(
        &mut self,
        model: &mut Decoder,
        partition: &Partition,
        draw: impl FnOnce(&mut Engine) -> Result<T>,
    ) -> Result<T> {
        let Drawer { sizes, engine, whole } = self;
        whole.lend(model, partition, |model, reads_others| {
            let device = model.device().clone();
            let _scope = device.whole_scope("draws");
            let engine = match engine {
                Some(engine) => engine,
                none => none.insert(engine_for(model, sizes, partition.shared_ranks())?),
            };
            if reads_others {
                engine.forget_graphs();
            }
            engine.lend(model, draw)
        })
    }

    /// Draws a few tokens of completions whose prompts fill the rows, as many as are drawn at once. A plan on a device without data counts their memory.
    ///
    /// Errors as [`Drawer::lend`] and [`sample`].
    pub fn rehearse(&mut self, model: &mut Decoder, partition: &Partition) -> Result<()> {
        const DRAWN: usize = 2;
        let DrawSizes { completions, max_length, .. } = self.sizes;
        let prompt = vec![0; max_length.saturating_sub(DRAWN).max(1)];
        let wanted = vec![Draw { prompt, seed: 0, max_tokens: DRAWN }; completions];
        self.lend(model, partition, |engine| sample(engine, &wanted, &[], 1.0)).map(drop)
    }
}

/// Makes an engine that `model` can be lent to. Ranks that draw together make engines of the same sizes.
///
/// Errors as [`EngineOptions::within`] and [`Engine::to_lend`].
fn engine_for(model: &Decoder, sizes: &DrawSizes, ranks: Rc<Ranks>) -> Result<Engine> {
    let DrawSizes { completions, max_length, kv_cache_tokens, kv_cache_dtype, logprobs_mode } = *sizes;
    let lengths = std::iter::repeat_n(max_length, completions);
    let memory = ranks.least_of_drawing("memory of the KV cache", memory(model.device()))?;
    let mut options = EngineOptions::within(memory, model, None, lengths, max_length, kv_cache_dtype)?;
    if kv_cache_tokens > 0 {
        options.kv_cache_tokens = options.kv_cache_tokens.min(kv_cache_tokens);
    }
    options.logprobs_mode = logprobs_mode;
    options.batch_invariant = model.device().is_batch_invariant();
    let mut engine = Engine::to_lend(model, &options)?;
    engine.draw_together(ranks);
    Ok(engine)
}

/// The bytes that the KV cache may take on `device`: on a GPU, nine tenths of the memory that no tensor holds between steps, and on a CPU half of what is
/// free. Activations and logits of draws take the rest.
fn memory(device: &Device) -> usize {
    match device {
        Device::Cuda(gpu) => gpu.usable_memory().saturating_sub(gpu.memory().allocated) / 10 * 9,
        Device::Cpu | Device::DryCpu(_) => limits::available_memory().map_or(usize::MAX, |bytes| bytes as usize / 2),
    }
}
