//! Gemma 2: norms by `1 + weight` before and after each sublayer, soft caps of scores and logits, a sliding window in every second layer, a
//! scaled and tied embedding. Team Gemma 2024, arXiv:2408.00118.

use crate::family::{Family, common, gated, sliding_window};
use crate::layers::{LLAMA, Names};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, Gelu, NormKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    reward_model: Some("Gemma2ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": null, "max_position_embeddings": 8192, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "tie_word_embeddings": true,
    })
}

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

/// The keys that Gemma 2 and 3 have in common, for a model of these `sizes`.
pub(super) fn read_gemma(file: &ConfigFile, sizes: DecoderConfig) -> Result<DecoderConfig> {
    if file.optional("use_bidirectional_attention", false)? {
        return Err(file.error("`use_bidirectional_attention` is true; attention to later tokens is not implemented"));
    }
    let bias = file.required("attention_bias")?;
    let scalar: f64 = file.required("query_pre_attn_scalar")?;
    Ok(DecoderConfig {
        tied: file.required("tie_word_embeddings")?,
        activation: gated(file, "hidden_activation")?,
        qkv_bias: bias,
        output_bias: bias,
        attention_scale: Some(scalar.powf(-0.5)),
        window: sliding_window(file)?,
        local: LayerSet::with_window(file, sizes.layers, sizes.local.clone())?,
        logit_cap: file.nullable("final_logit_softcapping")?,
        ..sizes
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = read_gemma(file, gemma2(common(file)?))?;
    Ok(DecoderConfig { score_cap: file.nullable("attn_logit_softcapping")?, ..sizes })
}
