//! Granite: Llama's blocks with factors of the embedding, of residual branches, of attention scores and of logits. Granite Team, IBM 2024,
//! "Granite 3.0 Language Models", and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common};
use crate::layers::{HeadsSpec, MlpSpec};
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

pub(super) fn defaults() -> Value {
    json!({
        "attention_bias": false, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "mlp_bias": false,
        "residual_multiplier": 1.0,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, heads) = scaled(file)?;
    let mlp = MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp };
    let rope = Some(common.rope);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}

/// Returns the parts that dense models and mixtures share, with Granite's factors, and the heads.
pub(super) fn scaled(file: &ConfigFile) -> Result<(Common, HeadsSpec)> {
    let (mut common, bias) = (common(file)?, file.required("attention_bias")?);
    common.model.embedding.scale = file.required("embedding_multiplier")?;
    common.model.stream.residual_scale = file.required("residual_multiplier")?;
    common.model.head.scale = 1.0 / file.required::<f32>("logits_scaling")?;
    let scale = Some(file.required("attention_multiplier")?);
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, scale, ..common.heads };
    Ok((common, heads))
}
