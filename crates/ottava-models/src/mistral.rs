//! Mistral: Llama's blocks; early versions attend to a sliding window. Jiang et al. 2023, arXiv:2310.06825.

use crate::family::{Family, common, sliding_window};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
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

/// Mistral with `layer_types`, whose layers with a window alternate with others.
pub(super) const MINISTRAL: Family = Family {
    architecture: "MinistralForCausalLM",
    model_type: "ministral",
    reward_model: Some("MinistralForSequenceClassification"),
    defaults,
    aliases: &[],
    read: |file| {
        let sizes = read(file)?;
        Ok(DecoderConfig { local: LayerSet::with_window(file, sizes.layers, LayerSet::All)?, ..sizes })
    },
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    Ok(DecoderConfig { window: sliding_window(file)?, ..common(file)? })
}
