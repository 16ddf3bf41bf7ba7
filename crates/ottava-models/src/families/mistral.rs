//! Mistral: Llama's blocks. Early versions have a sliding window. Jiang et al. 2023, arXiv:2310.06825.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, window, window_in};
use crate::layer_set::Window;
use crate::layers::HeadsSpec;
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

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    Ok(windowed(common(file)?, &window(file)?))
}

/// Builds Llama's layers with a sliding window.
fn windowed(common: Common, window: &Window) -> DecoderConfig {
    let Common { heads, rope, mlp, .. } = common;
    common.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, Some(rope)), Mlp(mlp)])
}
