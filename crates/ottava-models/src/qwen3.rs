//! Qwen3, dense: Llama's blocks with normalised queries and keys, and heads of a size of their own. Yang et al. 2025, arXiv:2505.09388.

use crate::family::{Family, common, qwen_window};
use crate::layers::NormScope;
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
        "head_dim": 128, "layer_types": null, "max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    let (window, local) = qwen_window(file, sizes.layers)?;
    dense(file, DecoderConfig { window, local, ..sizes })
}

/// The sizes with Qwen3's attention.
pub(super) fn dense(file: &ConfigFile, sizes: DecoderConfig) -> Result<DecoderConfig> {
    let bias = file.required("attention_bias")?;
    Ok(DecoderConfig { qk_norm: Some(NormScope::Head), qkv_bias: bias, output_bias: bias, ..sizes })
}
