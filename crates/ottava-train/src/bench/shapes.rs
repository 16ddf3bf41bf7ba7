//! Shapes of known models.

use ottava_common::error::{Error, Result};
use ottava_models::layers::{ExpertsConfig, LatentSizes, NormScope, SharedExpert};
use ottava_models::{Decoder, DecoderConfig, LayerSet, Positions, cohere, gemma2, gpt2, mixtral, phi3};
use ottava_recipe::Precision;
use ottava_tensor::bench::{AttentionRow, Meter};
use ottava_tensor::ops::{AttentionSpec, RopePairs, RouterScores, Routing};

/// Shapes of known models: `(name, config)`.
pub fn models() -> Vec<(&'static str, DecoderConfig)> {
    let shape = |vocabulary, channels, hidden, layers, heads, kv_heads| DecoderConfig {
        vocabulary,
        channels,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim: channels / heads,
        max_positions: 1 << 17,
        ..DecoderConfig::default()
    };
    let qwen = |vocabulary, channels, hidden, layers, heads, kv_heads, tied| DecoderConfig {
        qkv_bias: true,
        tied,
        ..shape(vocabulary, channels, hidden, layers, heads, kv_heads)
    };
    let qwen3 = |channels, hidden, layers, heads, tied| DecoderConfig {
        head_dim: 128,
        qk_norm: Some(NormScope::Head),
        tied,
        ..shape(151_936, channels, hidden, layers, heads, 8)
    };
    let routed = |count, hidden, chosen, normalise, shape: DecoderConfig| DecoderConfig {
        experts: Some(ExpertsConfig::new(
            count,
            hidden,
            Routing { chosen, scores: RouterScores::Softmax, normalise, scale: 1.0, groups: None },
        )),
        ..shape
    };
    let olmoe = DecoderConfig { qk_norm: Some(NormScope::Projection), ..shape(50_304, 2048, 1024, 16, 16, 16) };
    let qwen3_30b = DecoderConfig { kv_heads: 4, ..qwen3(2048, 6144, 48, 32, false) };
    let latent = LatentSizes { query_rank: None, kv_rank: 512, plain: 128, rotated: 64, value: 128 };
    let mut deepseek_v2_lite = DecoderConfig {
        head_dim: latent.head_dim(),
        latent: Some(latent),
        positions: Positions::Rotary(RopePairs::Neighbours),
        routed: LayerSet::From(1),
        ..routed(64, 1408, 6, None, shape(102_400, 2048, 10_944, 27, 16, 16))
    };
    if let Some(experts) = &mut deepseek_v2_lite.experts {
        experts.shared = Some(SharedExpert { name: "shared_experts", hidden: 2 * 1408, gate: None });
    }
    vec![
        ("llama-2-7b", shape(32_000, 4096, 11_008, 32, 32, 32)),
        ("llama-2-13b", shape(32_000, 5120, 13_824, 40, 40, 40)),
        ("llama-30b", shape(32_000, 6656, 17_920, 60, 52, 52)),
        ("llama-3-8b", shape(128_256, 4096, 14_336, 32, 32, 8)),
        ("llama-3-70b", shape(128_256, 8192, 28_672, 80, 64, 8)),
        ("qwen2.5-0.5b", qwen(151_936, 896, 4864, 24, 14, 2, true)),
        ("qwen2.5-1.5b", qwen(151_936, 1536, 8960, 28, 12, 2, true)),
        ("qwen2.5-3b", qwen(151_936, 2048, 11_008, 36, 16, 2, true)),
        ("qwen2.5-7b", qwen(152_064, 3584, 18_944, 28, 28, 4, false)),
        ("qwen3-0.6b", qwen3(1024, 3072, 28, 16, true)),
        ("qwen3-8b", qwen3(4096, 12_288, 36, 32, false)),
        ("gpt2", gpt2(shape(50_257, 768, 4 * 768, 12, 12, 12))),
        ("gpt2-xl", gpt2(shape(50_257, 1600, 4 * 1600, 48, 25, 25))),
        ("gemma-2-9b", gemma2(DecoderConfig { head_dim: 256, ..shape(256_000, 3584, 14_336, 42, 16, 8) })),
        ("phi-3-medium", phi3(DecoderConfig { window: Some(2047), ..shape(32_064, 5120, 17_920, 40, 40, 10) })),
        ("olmoe-1b-7b", routed(64, 1024, 8, None, olmoe)),
        ("qwen3-30b-a3b", routed(128, 768, 8, Some(0.0), qwen3_30b)),
        ("deepseek-v2-lite", deepseek_v2_lite),
        ("mixtral-8x7b", routed(8, 14_336, 2, Some(0.0), mixtral(shape(32_000, 4096, 14_336, 32, 32, 8)))),
        ("command-r-35b", cohere(shape(256_000, 8192, 22_528, 40, 64, 64))),
    ]
}

/// The shape of the model called `name`.
pub fn model(name: &str) -> Result<DecoderConfig> {
    let known = models();
    if let Some((_, sizes)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(sizes.clone());
    }
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    Err(Error::Config(format!("there is no model `{name}`; there are {}", names.join(", "))))
}

/// Times each kind of attention in a model of `sizes` over `tokens` in sequences of `seq_len`.
pub fn attention(meter: Meter, sizes: &DecoderConfig, tokens: usize, seq_len: usize) -> Result<Vec<AttentionRow>> {
    expect_positive(&[tokens, seq_len])?;
    let mut kinds: Vec<AttentionSpec> = Vec::new();
    for spec in Decoder::describe(sizes, &Precision::default().recipe())?.attention {
        if !kinds.contains(&spec) {
            kinds.push(spec);
        }
    }
    let batch = (tokens / seq_len).max(1);
    Ok(kinds
        .iter()
        .map(|spec| ottava_tensor::bench::attention(meter, spec, batch, seq_len))
        .collect::<Result<_, _>>()?)
}

/// Checks sizes of what is to be timed.
pub(super) fn expect_positive(sizes: &[usize]) -> Result<()> {
    match sizes.contains(&0) {
        true => Err(Error::Config("tokens, sequence lengths and sizes must be at least 1".into())),
        false => Ok(()),
    }
}
