//! Gemma 2: norms by `1 + weight` before and after each sublayer, soft caps of scores and logits, a sliding window in every second layer, a
//! scaled and tied embedding. Team Gemma 2024, arXiv:2408.00118.

use super::family::{Family, common, gated, sliding_window};
use super::{ConfigFile, DecoderConfig, LayerSet};
use crate::error::Result;
use crate::layers::{LLAMA, Names};
use ottava_tensor::ops::{Activation, Gelu, NormKind};

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    reward_model: Some("Gemma2ForSequenceClassification"),
    read,
};

static NAMES: Names = Names {
    attention_post_norm: "post_attention_layernorm",
    mlp_norm: "pre_feedforward_layernorm",
    mlp_post_norm: "post_feedforward_layernorm",
    ..LLAMA
};

/// A Gemma 2 of these sizes, with a window of 4096 tokens.
pub fn gemma2(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig {
        window: Some(4096),
        local: LayerSet::AllButEvery(2),
        score_cap: Some(50.0),
        logit_cap: Some(30.0),
        ..gemma(sizes)
    }
}

/// What Gemma 2 and 3 have in common.
pub(super) fn gemma(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig {
        tied: true,
        norm: NormKind::RmsPlusOne,
        activation: Activation::GeGlu(Gelu::Tanh),
        embedding_scale: (sizes.channels as f64).sqrt() as f32,
        attention_scale: Some(1.0 / 16.0),
        names: &NAMES,
        ..sizes
    }
}

/// The keys that Gemma 2 and 3 have in common, for a model like `defaults`.
pub(super) fn read_gemma(file: &ConfigFile, defaults: DecoderConfig) -> Result<DecoderConfig> {
    if file.optional("use_bidirectional_attention", false)? {
        return Err(file.error("`use_bidirectional_attention` is true; attention to later tokens is not implemented"));
    }
    let bias = file.optional("attention_bias", false)?;
    let scalar: f64 = file.optional("query_pre_attn_scalar", 256.0)?;
    let cap = |key: &str, default: Option<f64>| match file.values().contains_key(key) {
        true => file.optional(key, None),
        false => Ok(default),
    };
    Ok(DecoderConfig {
        head_dim: file.optional("head_dim", 256)?,
        tied: file.optional("tie_word_embeddings", true)?,
        activation: gated(file, "hidden_activation", "gelu_pytorch_tanh")?,
        qkv_bias: bias,
        output_bias: bias,
        attention_scale: Some(scalar.powf(-0.5)),
        window: sliding_window(file, Some(4096))?,
        local: LayerSet::with_window(file, defaults.layers, defaults.local.clone())?,
        score_cap: cap("attn_logit_softcapping", defaults.score_cap)?,
        logit_cap: cap("final_logit_softcapping", defaults.logit_cap)?,
        ..defaults
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let max_positions = file.optional("max_position_embeddings", 8192)?;
    read_gemma(file, gemma2(DecoderConfig { max_positions, ..common(file)? }))
}
