//! Granite: Llama's blocks with factors of the embedding, of residual branches, of attention scores and of logits. Granite Team, IBM 2024,
//! "Granite 3.0 Language Models", and `transformers`.

use super::family::{Family, common};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;

pub(super) const FAMILY: Family =
    Family { architecture: "GraniteForCausalLM", model_type: "granite", reward_model: None, read };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.optional("attention_bias", false)?;
    let logits_scaling: f32 = file.optional("logits_scaling", 1.0)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: file.optional("mlp_bias", false)?,
        embedding_scale: file.optional("embedding_multiplier", 1.0)?,
        residual_scale: file.optional("residual_multiplier", 1.0)?,
        attention_scale: Some(file.optional("attention_multiplier", 1.0)?),
        logit_scale: 1.0 / logits_scaling,
        ..common(file)?
    })
}
