//! Mistral: Llama's blocks. Early versions have a sliding window. Jiang et al. 2023, arXiv:2310.06825.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, window, window_in};
use crate::layer_set::Window;
use crate::layers::HeadsSpec;
use crate::rope::GROWTH;
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(crate) const FAMILY: Family = Family {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    reward_model: Some("MistralForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096})
}

/// Mistral with `layer_types`: layers with a window alternate with layers without a window.
pub(crate) const MINISTRAL: Family = Family {
    architecture: "MinistralForCausalLM",
    model_type: "ministral",
    reward_model: Some("MinistralForSequenceClassification"),
    defaults: || {
        let mut all = defaults();
        all["layer_types"] = Value::Null;
        all
    },
    aliases: &[],
    read: |file| {
        let common = common(file)?;
        let window = window_in(file, common.layers, LayerSet::All)?;
        Ok(windowed(common, &window))
    },
};

/// Ministral 3: queries grow with their position beyond the context before stretching. Mistral AI 2025, and `transformers`.
pub(crate) const MINISTRAL_3: Family = Family {
    architecture: "Ministral3ForCausalLM",
    model_type: "ministral3",
    reward_model: Some("Ministral3ForSequenceClassification"),
    defaults: || {
        json!({
            "head_dim": 128, "max_position_embeddings": 262_144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": null,
            GROWTH: null,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, GROWTH: 0.1,
            },
        })
    },
    aliases: &[],
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut common = common(file)?;
    common.heads.growth = common.model.ropes[common.rope.rope].growth;
    Ok(windowed(common, &window(file)?))
}

/// Builds Llama's layers with a sliding window.
fn windowed(common: Common, window: &Window) -> DecoderConfig {
    let Common { heads, rope, mlp, .. } = common;
    common.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, Some(rope)), Mlp(mlp)])
}
