//! SmolLM3: Llama's blocks without rotary positions in every fourth layer. Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context
//! reasoner"; Yang et al. 2025, arXiv:2501.18795.

use super::family::{Family, common, sliding_window};
use super::{ConfigFile, DecoderConfig, LayerSet, RopeScaling};
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    reward_model: Some("SmolLM3ForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (bias, sizes) = (file.optional("attention_bias", false)?, common(file)?);
    let rotated: Option<Vec<u8>> = file.optional("no_rope_layers", None)?;
    let unrotated = match rotated {
        Some(rotated) if rotated.len() < sizes.layers => {
            let (entries, layers) = (rotated.len(), sizes.layers);
            let text = format!("`no_rope_layers` has {entries} entries, and `num_hidden_layers` is {layers}");
            return Err(file.error(&text));
        }
        // 1 is a layer with rotary positions.
        Some(rotated) => LayerSet::Listed(rotated.iter().map(|&rotated| rotated == 0).collect()),
        None => match file.optional("no_rope_layer_interval", 4)? {
            0 => return Err(file.error("`no_rope_layer_interval` is 0; it is a number of layers")),
            interval => LayerSet::Every(interval),
        },
    };
    let uses_window: bool = file.optional("use_sliding_window", false)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: file.optional("mlp_bias", false)?,
        max_positions: file.optional("max_position_embeddings", 32_768)?,
        tied: file.optional("tie_word_embeddings", true)?,
        rope: RopeScaling::read(file, 2_000_000.0)?,
        window: sliding_window(file, None)?.filter(|_| uses_window),
        local: LayerSet::with_window(file, sizes.layers, unrotated.clone())?,
        unrotated,
        ..sizes
    })
}
