//! How fast a model decodes and reads prompts: steps of the engine's passes with random weights, beside the time to read the bytes. Several ranks
//! divide the model as in inference.

use super::model;
use super::shapes::{expect_positive, with_layers};
use crate::checkpoint::RandomWeights;
use crate::engine::{BLOCK_SIZE, DecodeSteps, KvCacheDtype, Scored};
use crate::error::{Error, Result};
use crate::layer_ranks::LayerRanks;
use crate::models::{Decoder, DecoderConfig, InferenceBatch, KvGroup, SequenceTokens};
use crate::parallel::{LayerAxes, Ranks};
use crate::param::Description;
use crate::plan::expect_random_model_fits;
use crate::recipe::{Precision, Recipe, RecipeName};
use ottava_tensor::bench::copy_bandwidth;
use ottava_tensor::comm::{Axis, Sent};
use ottava_tensor::cuda::Graph;
use ottava_tensor::{DType, Device, Tensor};
use serde::Serialize;
use std::rc::Rc;
use std::time::Instant;

/// Steps before those that are timed: they compile kernels, time products and capture the graph.
const WARM_UP: usize = 3;

/// What to time.
#[derive(Clone, Debug)]
pub struct DecodeBench {
    /// A name of [`models`](super::models).
    pub model: String,
    /// Number of blocks, if not the model's.
    pub layers: Option<usize>,
    /// Sequences that are decoded at once, in turn.
    pub batches: Vec<usize>,
    /// Tokens of each sequence.
    pub context: usize,
    /// Tokens of a prompt that is read; `None` for none.
    pub prefill: Option<usize>,
    /// Steps whose median is reported.
    pub steps: usize,
}

/// The result for one batch.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeRow {
    /// The recipe.
    pub recipe: RecipeName,
    /// The type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Sequences; 1 for a prompt.
    pub batch: usize,
    /// Tokens of each sequence.
    pub context: usize,
    /// New tokens of each sequence: 1, or all of a prompt.
    pub new_tokens: usize,
    /// Median milliseconds of a step, with the drawn tokens on the host.
    pub milliseconds: f64,
    /// New tokens of all sequences per second.
    pub tokens_per_second: f64,
    /// Bytes of weights, keys and values that this rank has to read in a step; of experts, those of as many as its tokens choose on average if all
    /// are as likely.
    pub bytes: u64,
    /// Milliseconds to read them at the speed of a copy.
    pub floor_milliseconds: f64,
    /// Median milliseconds of as many all-reduces of equal size as a step has, one after the other; `None` on one rank.
    pub all_reduce_milliseconds: Option<f64>,
}

impl DecodeBench {
    /// Times `recipe` with a KV cache in `kv_cache_dtype` on `device`, and gives each row to `on_row`. All of `ranks` call it, each with a device of
    /// its own.
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
        let precision = Precision { recipe, skip_slow_linears: false, ..Precision::default() }.recipe();
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
        // Bytes of the keys and values that a token sees.
        let of_context = |context: usize| -> usize {
            let of = |group: &KvGroup| {
                let seen = group.window.map_or(context, |window| context.min(window));
                seen * decoder.kv_block_bytes(group, BLOCK_SIZE, dtype) / BLOCK_SIZE
            };
            groups.iter().map(of).sum()
        };
        let cache_of = |blocks: usize| {
            let groups: Vec<_> = groups.iter().map(|group| (group.clone(), blocks)).collect();
            decoder.kv_cache(&groups, BLOCK_SIZE, dtype)
        };
        let row = |batch: usize, context: usize, new_tokens: usize, Timed { seconds, all_reduces }: Timed| {
            let bytes = weight_bytes(decoder.part(), batch * new_tokens, precision.compute, ranks.size())
                + (batch * of_context(context)) as u64;
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
            let mut cache = cache_of(batch * per_sequence)?;
            let blocks: Vec<i32> = (0..(batch * per_sequence) as i32).collect();
            let tables = blocks.chunks_exact(per_sequence).map(|blocks| vec![blocks.to_vec(); groups.len()]);
            let tables: Vec<_> = tables.collect();
            let sequences: Vec<SequenceTokens> = tables
                .iter()
                .enumerate()
                // Different tokens, so that sequences choose different experts.
                .map(|(i, blocks)| SequenceTokens::new(self.context - 1, &tokens[i..=i], blocks))
                .collect();
            let mut steps = DecodeSteps::default();
            let mut step = || drawn(&steps.run(&decoder, None, &mut cache, &sequences)?);
            let timed = self.time(ranks, &mut step)?;
            on_row(row(batch, self.context, 1, timed)?);
        }
        if let Some(prompt) = self.prefill {
            let blocks: Vec<i32> = (0..prompt.div_ceil(BLOCK_SIZE) as i32).collect();
            let mut cache = cache_of(blocks.len())?;
            let blocks = vec![blocks; groups.len()];
            let sequence = SequenceTokens::new(0, &tokens[..prompt], &blocks);
            let last = Tensor::from_slice(device, &[1], &[prompt as i32 - 1])?;
            let timed = self.time(ranks, || {
                let hidden = decoder.hidden(&InferenceBatch::padded(device, &[sequence])?, &mut cache)?;
                drawn(&Scored::score(&decoder, &hidden, &last)?)
            })?;
            on_row(row(1, prompt, prompt, timed)?);
        }
        Ok(())
    }

    /// Times `step`, which ends on the host.
    fn time(&self, ranks: &Ranks, mut step: impl FnMut() -> Result<()>) -> Result<Timed> {
        // Launched call by call, while later ones may replay a graph.
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

    /// Median seconds of the all-reduces of a step without its kernels, one after the other and captured as steps are, as if all had the same
    /// size; `None` if there are none.
    fn time_all_reduces(&self, of: Sent, dtype: DType, device: &Device, ranks: &Rc<Ranks>) -> Result<Option<f64>> {
        if of.calls == 0 {
            return Ok(None);
        }
        // A rank sends twice (size - 1) / size of each buffer.
        let size = ranks.size() as u64;
        let bytes = of.bytes * size / (2 * (size - 1)) / of.calls;
        let x = Tensor::zeros(device, &[bytes as usize / dtype.size()], dtype)?;
        let axes = LayerAxes::new(ranks.clone());
        let mut x = Some(x);
        let mut all = || -> Result<()> {
            for _ in 0..of.calls {
                x = x.take().map(|x| axes.sum(Axis::Tensor, "activations", x)).transpose()?;
            }
            Ok(())
        };
        let mut graph = match device {
            Device::Cuda(gpu) if gpu.captures() => {
                all()?;
                Some(Graph::capture(gpu, &mut all)?)
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

/// A step.
struct Timed {
    /// The median.
    seconds: f64,
    /// The all-reduces of activations.
    all_reduces: Sent,
}

/// Waits for the tokens of a step on the host.
fn drawn(scored: &Scored) -> Result<()> {
    scored.likeliest.to_vec::<i32>()?;
    Ok(())
}

/// What each of `ranks` has of a model for inference of up to `max_len` tokens, with random weights.
///
/// Errors as [`Decoder::for_inference`].
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

/// Bytes of the weights of `part`, which one of `ranks` has, that products of so many tokens read, in FP8 or in the type `compute`. Of the experts
/// that tokens choose, each rank has an equal share.
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

/// The mean number of different matrices that `tokens` read, each of which chooses `chosen` of them, all as likely.
fn matrices_read(matrices: usize, chosen: usize, tokens: usize) -> f64 {
    let missed = (1.0 - chosen as f64 / matrices as f64).powf(tokens as f64);
    matrices as f64 * (1.0 - missed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_the_experts_that_it_chooses_and_many_tokens_read_all() {
        assert_eq!(matrices_read(1, 1, 5), 1.0);
        assert_eq!(matrices_read(64, 8, 1), 8.0);
        // Of two choices, the second is the first with probability 1/4.
        assert_eq!(matrices_read(4, 1, 2), 1.75);
        assert!((matrices_read(64, 8, 1000) - 64.0).abs() < 1e-9);
    }
}
