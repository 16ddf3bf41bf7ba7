//! SmolLM3: Llama's blocks without rotary positions in every fourth layer. Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context
//! reasoner"; Yang et al. 2025, arXiv:2501.18795.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, window_in};
use crate::layers::{HeadsSpec, MlpSpec};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    reward_model: Some("SmolLM3ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "layer_types": null, "max_position_embeddings": 32_768, "mlp_bias": false, "no_rope_layer_interval": 4, "no_rope_layers": null, "num_key_value_heads": 4,
        "pad_token_id": 128_004, "rope_theta": 2_000_000.0, "sliding_window": null, "tie_word_embeddings": true,
        "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (bias, common) = (file.required("attention_bias")?, common(file)?);
    let unrotated = LayerSet::unrotated(file, common.layers)?;
    // If a file has `layer_types`, masks follow it even without `use_sliding_window`.
    let local = if file.required("use_sliding_window")? { unrotated.clone() } else { LayerSet::None };
    let window = window_in(file, common.layers, local)?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let mlp = MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp };
    let rope = common.rope;
    Ok(common.sequential(|index| {
        let rope = (!unrotated.contains(index)).then_some(rope);
        [Heads(HeadsSpec { window: window.at(index), ..heads }, rope), Mlp(mlp)]
    }))
}
