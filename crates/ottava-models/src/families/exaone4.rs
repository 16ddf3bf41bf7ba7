//! EXAONE 4: norms after sublayers and of each query and key head. If the model has a window, the layers without the window have no rotary
//! positions. LG AI Research 2025, arXiv:2507.11407.

use super::olmo2::AFTER;
use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, local_layers, window_in};
use crate::layers::{HeadsSpec, NormScope};
use crate::{ConfigFile, DecoderConfig, LayerSet, SublayerSpec};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Exaone4ForCausalLM",
    model_type: "exaone4",
    reward_model: Some("Exaone4ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "layer_types": null, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?.named(&AFTER);
    let (attention, mlp) = (attention(file, &common)?, common.mlp);
    Ok(common.sequential(|index| [attention(index), Mlp(mlp)]))
}

/// Returns the attention of each layer.
pub(super) fn attention(file: &ConfigFile, common: &Common) -> Result<impl Fn(usize) -> SublayerSpec + use<>> {
    let window = window_in(file, common.layers, local_layers_of(file)?)?;
    let (heads, rope) = (common.heads, common.rope);
    Ok(move |index| {
        let is_rotated = window.size.is_none() || window.layers.contains(index);
        let heads = HeadsSpec { qk_norm: Some(NormScope::Head), window: window.at(index), ..heads };
        Heads(heads, is_rotated.then_some(rope))
    })
}

/// Returns the layers with a window if `layer_types` is missing. `sliding_window_pattern` is the number of layers of a group, whose last layer sees all
/// tokens, or a text such as "LLLG", whose last letter stands for this layer.
fn local_layers_of(file: &ConfigFile) -> Result<LayerSet> {
    if file.nullable::<usize>("sliding_window")?.is_none() {
        return Ok(LayerSet::None);
    }
    let count = match file.required::<Value>("sliding_window_pattern")? {
        Value::String(letters) => letters.len(),
        _ => file.required("sliding_window_pattern")?,
    };
    local_layers(file, count)
}
