//! Qwen3, dense: Llama's blocks with normalised queries and keys, and a separately configured head size. Yang et al. 2025, arXiv:2505.09388.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, qwen_window};
use crate::layers::{HeadsSpec, NormScope};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    reward_model: Some("Qwen3ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "head_dim": 128, "layer_types": null, "max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let (heads, window) = (attention(file, common.heads)?, qwen_window(file, common.layers)?);
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, rope), Mlp(mlp)]))
}

/// Adds Qwen3's biases and norms to `heads`.
pub(super) fn attention(file: &ConfigFile, heads: HeadsSpec) -> Result<HeadsSpec> {
    let bias = file.required("attention_bias")?;
    Ok(HeadsSpec { qk_norm: Some(NormScope::Head), qkv_bias: bias, output_bias: bias, ..heads })
}
