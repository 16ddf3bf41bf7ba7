//! OLMo 3: OLMo 2 with a window in three of four layers. Stretched rotary positions apply to the other layers. Team Olmo 2025, arXiv:2512.13961.

use super::olmo2::{AFTER, attention};
use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, window_in};
use crate::layers::HeadsSpec;
use crate::rope::{by_layer_types, without_ropes};
use crate::{ConfigFile, DecoderConfig, LayerSet, RopeSpec};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Olmo3ForCausalLM",
    model_type: "olmo3",
    reward_model: Some("Olmo3ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "layer_types": null, "pad_token_id": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let others = without_ropes(file);
    let mut common = common(&others)?.named(&AFTER);
    common.model.ropes = by_layer_types(file, &others, ["rope_theta", "rope_theta"])?;
    let heads = attention(file, common.heads)?;
    let window = window_in(file, common.layers, LayerSet::AllButEvery(4))?;
    let (rope, mlp) = (common.rope, common.mlp);
    Ok(common.sequential(|index| {
        let rope = RopeSpec { rope: usize::from(window.layers.contains(index)), ..rope };
        [Heads(HeadsSpec { window: window.at(index), ..heads }, Some(rope)), Mlp(mlp)]
    }))
}
