//! Shapes of known models.

use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_recipe::Precision;
use ottava_tensor::bench::{AttentionRow, Meter};
use ottava_tensor::ops::AttentionSpec;
use serde_json::{Value, json};
use std::path::Path;

/// Returns the keys of `config.json` of known models. The number of positions is large enough for every benchmark.
fn keys() -> Vec<(&'static str, Value)> {
    let dense = |family, vocabulary, channels, hidden, layers, heads, kv_heads| {
        json!({
            "model_type": family, "vocab_size": vocabulary, "hidden_size": channels, "intermediate_size": hidden,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 1 << 17,
        })
    };
    let with = |mut keys: Value, others: Value| {
        let (all, Value::Object(others)) = (keys.as_object_mut().expect("an object"), others) else { unreachable!() };
        all.extend(others);
        keys
    };
    let llama = |vocabulary, channels, hidden, layers, heads, kv_heads| {
        dense("llama", vocabulary, channels, hidden, layers, heads, kv_heads)
    };
    let qwen = |vocabulary, channels, hidden, layers, heads, kv_heads, tied| {
        with(
            dense("qwen2", vocabulary, channels, hidden, layers, heads, kv_heads),
            json!({"tie_word_embeddings": tied}),
        )
    };
    let qwen3 = |channels, hidden, layers, heads, tied| {
        with(dense("qwen3", 151_936, channels, hidden, layers, heads, 8), json!({"tie_word_embeddings": tied}))
    };
    let gpt2 = |channels, layers, heads| json!({"model_type": "gpt2", "vocab_size": 50_257, "n_embd": channels, "n_layer": layers, "n_head": heads});
    let of_deepseek = json!({
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "q_lora_rank": null,
    });
    let of_moonlight = json!({
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "q_lora_rank": null, "routed_scaling_factor": 2.446, "topk_group": 1,
    });
    // Layers that see the whole text have heads of 512, and no projection to values in the larger models.
    let gemma4 = |channels, hidden, layers, heads, kv_heads, others: Value| {
        let sizes = dense("gemma4_text", 262_144, channels, hidden, layers, heads, kv_heads);
        with(
            sizes,
            with(
                json!({"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "sliding_window": 1024}),
                others,
            ),
        )
    };
    let one_projection = |kv_heads: usize| json!({"attention_k_eq_v": true, "num_global_key_value_heads": kv_heads});
    let of_gemma4 =
        json!({"enable_moe_block": true, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8});
    let of_gemma4_e4b = json!({"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "sliding_window": 512});
    let of_qwen3 =
        json!({"head_dim": 128, "moe_intermediate_size": 768, "norm_topk_prob": true, "num_experts_per_tok": 8});
    let of_nemotron_3 = json!({
        "head_dim": 128, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
    });
    let types = |layer| if [5, 15, 25, 35].contains(&layer) { "attention" } else { "mamba" };
    let of_granite_4 = json!({
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "layer_types": (0..40).map(types).collect::<Vec<_>>(),
        "logits_scaling": 6, "mamba_n_heads": 48, "num_experts_per_tok": 6, "num_local_experts": 64, "residual_multiplier": 0.22,
        "shared_intermediate_size": 1024,
    });
    vec![
        ("llama-2-7b", llama(32_000, 4096, 11_008, 32, 32, 32)),
        ("llama-2-13b", llama(32_000, 5120, 13_824, 40, 40, 40)),
        ("llama-30b", llama(32_000, 6656, 17_920, 60, 52, 52)),
        ("llama-3-8b", llama(128_256, 4096, 14_336, 32, 32, 8)),
        ("llama-3-70b", llama(128_256, 8192, 28_672, 80, 64, 8)),
        ("qwen2.5-0.5b", qwen(151_936, 896, 4864, 24, 14, 2, true)),
        ("qwen2.5-1.5b", qwen(151_936, 1536, 8960, 28, 12, 2, true)),
        ("qwen2.5-3b", qwen(151_936, 2048, 11_008, 36, 16, 2, true)),
        ("qwen2.5-7b", qwen(152_064, 3584, 18_944, 28, 28, 4, false)),
        ("qwen3-0.6b", qwen3(1024, 3072, 28, 16, true)),
        ("qwen3-8b", qwen3(4096, 12_288, 36, 32, false)),
        (
            "qwen3.5-4b",
            with(dense("qwen3_5_text", 248_320, 2560, 9216, 32, 16, 4), json!({"tie_word_embeddings": true})),
        ),
        ("qwen3.5-9b", dense("qwen3_5_text", 248_320, 4096, 12_288, 32, 16, 4)),
        ("gpt2", gpt2(768, 12, 12)),
        ("gpt2-xl", gpt2(1600, 48, 25)),
        ("gemma-2-9b", dense("gemma2", 256_000, 3584, 14_336, 42, 16, 8)),
        ("gemma-4-e4b", gemma4(2560, 10_240, 42, 8, 2, of_gemma4_e4b)),
        ("gemma-4-26b-a4b", gemma4(2816, 2112, 30, 16, 8, with(one_projection(2), of_gemma4))),
        ("gemma-4-31b", gemma4(5376, 21_504, 60, 32, 16, one_projection(4))),
        ("phi-3-medium", with(dense("phi3", 32_064, 5120, 17_920, 40, 40, 10), json!({"sliding_window": 2047}))),
        ("olmoe-1b-7b", with(dense("olmoe", 50_304, 2048, 1024, 16, 16, 16), json!({"num_experts_per_tok": 8}))),
        ("qwen3-30b-a3b", with(dense("qwen3_moe", 151_936, 2048, 6144, 48, 32, 4), of_qwen3)),
        ("deepseek-v2-lite", with(dense("deepseek_v2", 102_400, 2048, 10_944, 27, 16, 16), of_deepseek)),
        ("mixtral-8x7b", dense("mixtral", 32_000, 4096, 14_336, 32, 32, 8)),
        ("command-r-35b", dense("cohere", 256_000, 8192, 22_528, 40, 64, 64)),
        ("glm-4-9b", dense("glm4", 151_552, 4096, 13_696, 40, 32, 2)),
        (
            "glm-4.5-air",
            with(dense("glm4_moe", 151_552, 4096, 10_944, 46, 96, 8), json!({"attention_bias": true, "head_dim": 128})),
        ),
        ("glm-4.7-flash", dense("glm4_moe_lite", 154_880, 2048, 10_240, 47, 20, 20)),
        ("moonlight-16b-a3b", with(dense("deepseek_v3", 163_840, 2048, 11_264, 27, 16, 16), of_moonlight)),
        ("olmo-3-7b", dense("olmo3", 100_278, 4096, 11_008, 32, 32, 32)),
        ("nemotron-3-nano", with(dense("nemotron_h", 131_072, 2688, 1856, 52, 32, 2), of_nemotron_3)),
        ("granite-4-h-tiny", with(dense("granitemoehybrid", 100_352, 1536, 512, 40, 12, 4), of_granite_4)),
    ]
}

/// Returns the shapes of known models: `(name, config)`.
pub fn models() -> Vec<(&'static str, DecoderConfig)> {
    let read = |name: &str, keys: Value| {
        let Value::Object(keys) = keys else { unreachable!("keys are an object") };
        decoder_config(&ConfigFile::from_values(name, keys)).expect("the sizes of known models are possible")
    };
    keys().into_iter().map(|(name, keys)| (name, read(name, keys))).collect()
}

/// Returns the shape of the known model called `name`, or of the model whose folder, or `config.json`, is at the path `name`.
///
/// Errors with [`Error::Config`] if there is neither, and as [`ConfigFile::read`] and [`decoder_config`].
pub fn model(name: &str) -> Result<DecoderConfig> {
    let path = Path::new(name);
    if path.exists() {
        return decoder_config(&ConfigFile::read(path)?);
    }
    let known = models();
    if let Some((_, sizes)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(sizes.clone());
    }
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    Err(Error::Config(format!(
        "there is no model `{name}`, and no folder or config.json at this path; known models are {}",
        names.join(", ")
    )))
}

/// Times each kind of attention in a model of `sizes`, for `tokens` tokens in sequences of `seq_len` tokens.
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

/// Returns the model of `sizes`, with `layers` blocks if `layers` is given.
pub(super) fn with_layers(sizes: DecoderConfig, layers: Option<usize>) -> DecoderConfig {
    match layers {
        Some(layers) => sizes.with_layers(layers),
        None => sizes,
    }
}

/// Checks that the sizes to measure are positive.
pub(super) fn expect_positive(sizes: &[usize]) -> Result<()> {
    match sizes.contains(&0) {
        true => Err(Error::Config("tokens, sequence lengths and sizes must be at least 1".into())),
        false => Ok(()),
    }
}
