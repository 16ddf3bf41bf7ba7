//! Measures how fast a model decodes and reads prompts. The steps are the engine's passes with random weights, and their times are shown with the
//! time to read the bytes. Several ranks divide the model as in inference.

use super::model;
use super::shapes::{expect_positive, with_layers};
use crate::plan::expect_random_model_fits;
use ottava_checkpoint::RandomWeights;
use ottava_common::error::{Error, Result};
use ottava_engine::{BLOCK_SIZE, DecodeSteps, Scored};
use ottava_models::{CacheSizes, Decoder, DecoderConfig, InferenceBatch, KvGroup, SequenceTokens};
use ottava_parallel::{LayerAxes, Ranks};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::Description;
use ottava_recipe::{ExceptionsConfig, KvCacheDtype, Precision, Recipe, RecipeName};
use ottava_tensor::bench::copy_bandwidth;
use ottava_tensor::comm::{Axis, Sent};
use ottava_tensor::cuda::Graph;
use ottava_tensor::{DType, Device, Tensor};
use serde::Serialize;
use std::rc::Rc;
use std::time::Instant;

/// The number of steps before the timed steps. These steps compile kernels, measure the speed of products and capture the graph.
const WARM_UP: usize = 3;

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct DecodeBench {
    /// A name of [`models`](super::models), or the path of a folder or a `config.json`.
    pub model: String,
    /// The number of blocks; `None` for all blocks of the model.
    pub layers: Option<usize>,
    /// The batch sizes to measure: the number of sequences that are decoded together.
    pub batches: Vec<usize>,
    /// The number of tokens of each sequence.
    pub context: usize,
    /// The number of tokens of the prompt; `None` to read no prompt.
    pub prefill: Option<usize>,
    /// The number of timed steps. Their median is reported.
    pub steps: usize,
}

/// The result for one batch.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeRow {
    /// The recipe.
    pub recipe: RecipeName,
    /// The type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// The number of sequences; 1 for a prompt.
    pub batch: usize,
    /// The number of tokens of each sequence.
    pub context: usize,
    /// The number of new tokens of each sequence: 1, or all tokens of a prompt.
    pub new_tokens: usize,
    /// The median time of a step in milliseconds, until the drawn tokens are on the host.
    pub milliseconds: f64,
    /// The number of new tokens of all sequences per second.
    pub tokens_per_second: f64,
    /// The bytes of weights, keys and values that this rank reads in a step. The number of experts that count is the mean number that the tokens
    /// choose if all experts are equally likely.
    pub bytes: u64,
    /// The milliseconds to read these bytes at the speed of a copy.
    pub floor_milliseconds: f64,
    /// The median milliseconds of the all-reduces of a step, one after the other and with equal sizes; `None` on one rank.
    pub all_reduce_milliseconds: Option<f64>,
}

impl DecodeBench {
    /// Times `recipe` with a KV cache in `kv_cache_dtype` on `device`, and passes each row to `on_row`. All of `ranks` call it, each with its own
    /// device.
    ///
    /// Errors with [`Error::Memory`] if the part of a rank does not fit its device.
    pub fn run(
        &self,
        recipe: RecipeName,
        kv_cache_dtype: KvCacheDtype,
        device: &Device,
        ranks: &Rc<Ranks>,
        mut on_row: impl FnMut(DecodeRow),
    ) -> Result<()> {
        expect_positive(&self.batches)?;
        expect_positive(&[self.context, self.steps, self.layers.unwrap_or(1), self.prefill.unwrap_or(1)])?;
        let sizes = with_layers(model(&self.model)?, self.layers);
        let exceptions = ExceptionsConfig { skip_slow_linears: false, ..ExceptionsConfig::default() };
        let precision = Precision { recipe, exceptions, ..Precision::default() }.recipe();
        let longest = self.context.max(self.prefill.unwrap_or(0));
        expect_random_model_fits(&sizes, &precision, device, longest, ranks.size())?;
        let copy_bytes = copy_bandwidth(device)?;
        if let Device::Cuda(gpu) = device {
            gpu.release_memory()?;
        }
        let mut decoder = random_decoder(&sizes, &precision, device, longest, ranks)?;
        decoder.scale_by_token()?;
        let dtype = kv_cache_dtype.resolve(precision.compute);
        let groups = decoder.kv_groups(longest);
        let cache_of = |blocks: usize, slots: usize| {
            let groups: Vec<_> = groups.iter().map(|group| (group.clone(), blocks)).collect();
            decoder.kv_cache(CacheSizes { groups: &groups, block_size: BLOCK_SIZE, dtype, slots, saved: 0 })
        };
        let row = |batch: usize, context: usize, new_tokens: usize, Timed { seconds, all_reduces }: Timed| {
            let bytes = weight_bytes(decoder.part(), batch * new_tokens, precision.compute, ranks.size())
                + (batch * kv_bytes(&decoder, &groups, context, dtype)) as u64;
            let all_reduces = self.time_all_reduces(all_reduces, precision.compute, device, ranks)?;
            Ok::<_, Error>(DecodeRow {
                recipe,
                kv_cache_dtype,
                batch,
                context,
                new_tokens,
                milliseconds: seconds * 1e3,
                tokens_per_second: (batch * new_tokens) as f64 / seconds,
                bytes,
                floor_milliseconds: bytes as f64 / copy_bytes * 1e3,
                all_reduce_milliseconds: all_reduces.map(|seconds| seconds * 1e3),
            })
        };
        let most = self.batches.iter().copied().fold(longest, usize::max);
        let tokens: Vec<u32> = (0..most).map(|i| (i * 7919 % sizes.vocabulary) as u32).collect();
        let per_sequence = self.context.div_ceil(BLOCK_SIZE);
        for &batch in &self.batches {
            let mut cache = cache_of(batch * per_sequence, batch)?;
            let blocks: Vec<i32> = (0..(batch * per_sequence) as i32).collect();
            let tables = blocks.chunks_exact(per_sequence).map(|blocks| vec![blocks.to_vec(); groups.len()]);
            let tables: Vec<_> = tables.collect();
            let sequences: Vec<SequenceTokens> = tables
                .iter()
                .enumerate()
                // The sequences have different tokens, so they choose different experts.
                .map(|(i, blocks)| SequenceTokens::new(self.context - 1, &tokens[i..=i], blocks).in_slot(i))
                .collect();
            let mut steps = DecodeSteps::new(device, None);
            let mut step = || drawn(&steps.run(&decoder, None, &mut cache, &sequences, None)?);
            let timed = self.time(ranks, &mut step)?;
            on_row(row(batch, self.context, 1, timed)?);
        }
        if let Some(prompt) = self.prefill {
            let blocks: Vec<i32> = (0..prompt.div_ceil(BLOCK_SIZE) as i32).collect();
            let mut cache = cache_of(blocks.len(), 1)?;
            let blocks = vec![blocks; groups.len()];
            let sequence = SequenceTokens::new(0, &tokens[..prompt], &blocks);
            let last = Tensor::from_slice(device, &[1], &[prompt as i32 - 1])?;
            let timed = self.time(ranks, || {
                let batch = match decoder.packs_prompts()? {
                    true => InferenceBatch::packed(device, &[sequence])?,
                    false => InferenceBatch::padded(device, &[sequence])?,
                };
                let hidden = decoder.hidden(&batch, &mut cache)?;
                drawn(&Scored::score(&decoder, &hidden, &last)?)
            })?;
            on_row(row(1, prompt, prompt, timed)?);
        }
        Ok(())
    }

    /// Times `step`, which returns when its result is on the host.
    fn time(&self, ranks: &Ranks, mut step: impl FnMut() -> Result<()>) -> Result<Timed> {
        // The first step is launched call by call, while later steps may replay a graph. So its calls are counted.
        let before = ranks.traffic_of_layers().all_reduce;
        step()?;
        let all_reduces = ranks.traffic_of_layers().all_reduce - before;
        for _ in 1..WARM_UP {
            step()?;
        }
        let mut seconds = Vec::new();
        for _ in 0..self.steps {
            let begin = Instant::now();
            step()?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok(Timed { seconds: seconds[seconds.len() / 2], all_reduces })
    }

    /// Returns the median seconds of the all-reduces of a step without its kernels. They run one after the other with equal sizes, and are captured
    /// if steps are. Returns `None` without all-reduces.
    fn time_all_reduces(&self, of: Sent, dtype: DType, device: &Device, ranks: &Rc<Ranks>) -> Result<Option<f64>> {
        if of.calls == 0 {
            return Ok(None);
        }
        // A rank sends 2 · (size - 1) / size of each buffer.
        let size = ranks.size() as u64;
        let bytes = of.bytes * size / (2 * (size - 1)) / of.calls;
        let x = Tensor::zeros(device, &[bytes as usize / dtype.size()], dtype)?;
        let axes = LayerAxes::new(ranks.clone());
        let all = || (0..of.calls).try_for_each(|_| axes.sum(Axis::Tensor, "activations", &x, None).map(drop));
        let mut graph = match device {
            Device::Cuda(gpu) if gpu.captures() => {
                all()?;
                Some(Graph::capture(gpu, all)?)
            }
            Device::Cpu | Device::DryCpu(_) | Device::Cuda(_) => None,
        };
        let timed = self.time(ranks, || {
            match &mut graph {
                Some(graph) => graph.replay()?,
                None => all()?,
            }
            Ok(device.synchronize()?)
        })?;
        Ok(Some(timed.seconds))
    }
}

/// The measurements of a step.
struct Timed {
    /// The median time in seconds.
    seconds: f64,
    /// The number and the bytes of the all-reduces of activations.
    all_reduces: Sent,
}

/// Waits until the tokens of a step are on the host.
fn drawn(scored: &Scored) -> Result<()> {
    scored.likeliest.to_vec::<i32>()?;
    Ok(())
}

/// Builds the part of a model that each of `ranks` holds for inference of up to `max_len` tokens, with random weights.
///
/// Errors in the same cases as [`Decoder::for_inference`].
pub fn random_decoder(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    max_len: usize,
    ranks: &Rc<Ranks>,
) -> Result<Decoder> {
    let mut weights = RandomWeights { seed: 1, device: device.clone() };
    let axes = Rc::new(LayerAxes::new(ranks.clone()));
    let mut decoder = Decoder::for_inference(sizes, recipe, device, max_len, &mut weights, axes)?;
    decoder.quantize_weights()?;
    Ok(decoder)
}

/// Returns the bytes of weights that products of `tokens` tokens read, in FP8 or in the type `compute`. `part` is the part of the model on one of
/// `ranks` ranks. Each rank reads an equal share of the experts that tokens choose.
fn weight_bytes(part: &Description, tokens: usize, compute: DType, ranks: usize) -> u64 {
    let wide = compute.size();
    let of = |outputs: usize, inputs: usize, size: usize| (outputs * inputs * size) as u64;
    let linears = part.linears.iter().map(|(site, decision)| {
        let bytes = of(site.outputs, site.inputs, if decision.fp8.is_some() { 1 } else { wide });
        let [matrices, chosen] = site.matrices();
        let share = if matrices > 1 { ranks as f64 } else { 1.0 };
        (bytes as f64 * matrices_read(matrices, chosen, tokens) / share) as u64
    });
    linears.chain(part.head.iter().map(|head| of(head.outputs, head.inputs, wide))).sum()
}

/// Returns the mean number of different matrices that `tokens` tokens read. Each token chooses `chosen` matrices, and all matrices are equally
/// likely.
fn matrices_read(matrices: usize, chosen: usize, tokens: usize) -> f64 {
    let missed = (1.0 - chosen as f64 / matrices as f64).powf(tokens as f64);
    matrices as f64 * (1.0 - missed)
}

/// Returns the bytes of the keys and values that a token reads after `context` tokens.
fn kv_bytes(decoder: &Decoder, groups: &[KvGroup], context: usize, dtype: DType) -> usize {
    let of = |group: &KvGroup| {
        let seen = group.window.map_or(context, |window| context.min(window));
        seen * decoder.kv_block_bytes(group, BLOCK_SIZE, dtype) / BLOCK_SIZE
    };
    groups.iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_the_experts_that_it_chooses_and_many_tokens_read_all() {
        assert_eq!(matrices_read(1, 1, 5), 1.0);
        assert_eq!(matrices_read(64, 8, 1), 8.0);
        // With two choices, the second equals the first with probability 1/4.
        assert_eq!(matrices_read(4, 1, 2), 1.75);
        assert!((matrices_read(64, 8, 1000) - 64.0).abs() < 1e-9);
    }
}
