//! Qwen2 and Qwen2.5: Llama's blocks with biases on queries, keys and values. Yang et al. 2024, arXiv:2407.10671.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, qwen_window};
use crate::layers::HeadsSpec;
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    reward_model: Some("Qwen2ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "layer_types": null, "max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let window = qwen_window(file, common.layers)?;
    let heads = HeadsSpec { qkv_bias: true, ..common.heads };
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, rope), Mlp(mlp)]))
}
