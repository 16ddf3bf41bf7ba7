//! Granite: Llama's blocks with factors of the embedding, of residual branches, of attention scores and of logits. Granite Team, IBM 2024,
//! "Granite 3.0 Language Models", and `transformers`.

use crate::family::{Family, common};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GraniteForCausalLM",
    model_type: "granite",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.required("attention_bias")?;
    let logits_scaling: f32 = file.required("logits_scaling")?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: file.required("mlp_bias")?,
        embedding_scale: file.required("embedding_multiplier")?,
        residual_scale: file.required("residual_multiplier")?,
        attention_scale: Some(file.required("attention_multiplier")?),
        logit_scale: 1.0 / logits_scaling,
        ..common(file)?
    })
}
