//! How fast a model decodes and reads prompts: steps of the engine's passes with random weights, beside the time to read the bytes.

use super::{model, shapes::expect_positive};
use crate::checkpoint::RandomWeights;
use crate::engine::{BLOCK_SIZE, DecodeSteps, KvCacheDtype, Scored};
use crate::error::Result;
use crate::models::{Decoder, DecoderConfig, InferenceBatch, KvGroup, SequenceTokens};
use crate::param::Purpose;
use crate::recipe::{Precision, Recipe, RecipeName};
use ottava_tensor::bench::copy_bandwidth;
use ottava_tensor::{Device, Tensor};
use serde::Serialize;
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
    /// Bytes of weights, keys and values that a step has to read; of experts, those of as many as its tokens choose on average if all are as
    /// likely.
    pub bytes: u64,
    /// Milliseconds to read them at the speed of a copy.
    pub floor_milliseconds: f64,
}

impl DecodeBench {
    /// Times `recipe` with a KV cache in `kv_cache_dtype` on `device`, and gives each row to `on_row`.
    pub fn run(
        &self,
        recipe: RecipeName,
        kv_cache_dtype: KvCacheDtype,
        device: &Device,
        mut on_row: impl FnMut(DecodeRow),
    ) -> Result<()> {
        expect_positive(&self.batches)?;
        expect_positive(&[self.context, self.steps, self.layers.unwrap_or(1), self.prefill.unwrap_or(1)])?;
        let copy_bytes = copy_bandwidth(device)?;
        if let Device::Cuda(gpu) = device {
            gpu.release_memory()?;
        }
        let sizes = model(&self.model)?;
        let sizes = DecoderConfig { layers: self.layers.unwrap_or(sizes.layers), ..sizes };
        let precision = Precision { recipe, skip_slow_linears: false, ..Precision::default() }.recipe();
        let longest = self.context.max(self.prefill.unwrap_or(0));
        let mut decoder = random_decoder(&sizes, &precision, device, longest)?;
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
        let row = |batch: usize, context: usize, new_tokens: usize, mut seconds: Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            let median = seconds[seconds.len() / 2];
            let bytes = weight_bytes(&decoder, batch * new_tokens) + (batch * of_context(context)) as u64;
            DecodeRow {
                recipe,
                kv_cache_dtype,
                batch,
                context,
                new_tokens,
                milliseconds: median * 1e3,
                tokens_per_second: (batch * new_tokens) as f64 / median,
                bytes,
                floor_milliseconds: bytes as f64 / copy_bytes * 1e3,
            }
        };
        let tokens: Vec<u32> = (0..longest).map(|i| (i * 7919 % sizes.vocabulary) as u32).collect();
        let per_sequence = self.context.div_ceil(BLOCK_SIZE);
        for &batch in &self.batches {
            let mut cache = cache_of(batch * per_sequence)?;
            let blocks: Vec<i32> = (0..(batch * per_sequence) as i32).collect();
            let tables = blocks.chunks_exact(per_sequence).map(|blocks| vec![blocks.to_vec(); groups.len()]);
            let tables: Vec<_> = tables.collect();
            let sequences: Vec<SequenceTokens> = tables
                .iter()
                .map(|blocks| SequenceTokens {
                    start: self.context - 1,
                    new: &tokens[self.context - 1..self.context],
                    blocks,
                })
                .collect();
            let mut steps = DecodeSteps::default();
            let seconds = self.time(|| Ok(steps.run(&decoder, None, &mut cache, &sequences)?.likeliest.to_vec()?))?;
            on_row(row(batch, self.context, 1, seconds));
        }
        if let Some(prompt) = self.prefill {
            let blocks: Vec<i32> = (0..prompt.div_ceil(BLOCK_SIZE) as i32).collect();
            let mut cache = cache_of(blocks.len())?;
            let blocks = vec![blocks; groups.len()];
            let sequence = SequenceTokens { start: 0, new: &tokens[..prompt], blocks: &blocks };
            let last = Tensor::from_slice(device, &[1], &[prompt as i32 - 1])?;
            let seconds = self.time(|| {
                let hidden = decoder.hidden(&InferenceBatch::padded(device, &[sequence])?, &mut cache)?;
                Ok(Scored::score(&decoder, &hidden, &last)?.likeliest.to_vec()?)
            })?;
            on_row(row(1, prompt, prompt, seconds));
        }
        Ok(())
    }

    /// Seconds of each timed step.
    fn time(&self, mut step: impl FnMut() -> Result<Vec<i32>>) -> Result<Vec<f64>> {
        let mut seconds = Vec::new();
        for number in 0..WARM_UP + self.steps {
            let begin = Instant::now();
            step()?;
            if number >= WARM_UP {
                seconds.push(begin.elapsed().as_secs_f64());
            }
        }
        Ok(seconds)
    }
}

/// A model for inference of up to `max_len` tokens, with random weights.
///
/// Errors as [`Decoder::new`].
pub fn random_decoder(sizes: &DecoderConfig, recipe: &Recipe, device: &Device, max_len: usize) -> Result<Decoder> {
    let mut weights = RandomWeights { seed: 1, device: device.clone() };
    let mut decoder = Decoder::new(sizes, recipe, device, Purpose::Infer, max_len, &mut weights)?;
    decoder.quantize_weights()?;
    Ok(decoder)
}

/// Bytes of the weights that products of so many tokens read, in the formats in which they read them.
fn weight_bytes(decoder: &Decoder, tokens: usize) -> u64 {
    let (description, wide) = (decoder.description(), decoder.recipe().compute.size());
    let of = |outputs: usize, inputs: usize, size: usize| (outputs * inputs * size) as u64;
    let linears = description.linears.iter().map(|(site, decision)| {
        let bytes = of(site.outputs, site.inputs, if decision.fp8.is_some() { 1 } else { wide });
        let [matrices, chosen] = site.matrices();
        (bytes as f64 * matrices_read(matrices, chosen, tokens)) as u64
    });
    linears.chain(description.head.iter().map(|head| of(head.outputs, head.inputs, wide))).sum()
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
