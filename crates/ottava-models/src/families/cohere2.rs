//! Command-R7B and Command A: Cohere's blocks. Three of four layers have a window and rotary positions, and the others have neither. Cohere 2025,
//! arXiv:2504.00698.

use super::cohere::stream;
use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, local_layers, window_in};
use crate::layers::HeadsSpec;
use crate::{ConfigFile, DecoderConfig, LayerSpec, RopeSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::RopePairs;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Cohere2ForCausalLM",
    model_type: "cohere2",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "layer_norm_eps": 1e-5, "layer_types": null, "logit_scale": 0.0625, "max_position_embeddings": 8192, "sliding_window": 4096,
        "sliding_window_pattern": 4, "tie_word_embeddings": true,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (Common { mut model, layers, heads, rope, mlp }, bias) = (common(file)?, file.required("attention_bias")?);
    stream(file, &mut model)?;
    let window = window_in(file, layers, local_layers(file, file.required("sliding_window_pattern")?)?)?;
    let rope = RopeSpec { pairs: RopePairs::Neighbours, ..rope };
    let layer = |index| {
        let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, window: window.at(index), ..heads };
        LayerSpec::parallel(model.stream.names, [Heads(heads, heads.window.map(|_| rope)), Mlp(mlp)])
    };
    let layers = (0..layers).map(layer).collect();
    Ok(DecoderConfig { layers, ..model })
}
