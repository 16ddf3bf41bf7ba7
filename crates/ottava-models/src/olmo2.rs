//! OLMo 2: Llama's sublayers with a norm after each instead of before it, and norms of all queries and all keys of a token. OLMo Team 2025,
//! arXiv:2501.00656.

use crate::family::{Family, common};
use crate::layers::NormScope;
use crate::layers::{LLAMA, Names};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    reward_model: Some("Olmo2ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({"rms_norm_eps": 1e-5})
}

static NAMES: Names = Names {
    attention_norm: "",
    attention_post_norm: "post_attention_layernorm",
    mlp_norm: "",
    mlp_post_norm: "post_feedforward_layernorm",
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.required("attention_bias")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: Some(NormScope::Projection),
        names: &NAMES,
        ..common(file)?
    })
}
