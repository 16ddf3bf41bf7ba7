//! The text models of Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with other defaults. Bai et al. 2025, arXiv:2502.13923 and arXiv:2511.21631.

use super::{qwen2, qwen3};
use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::json;

pub(super) const QWEN_2_5_VL: Family = Family {
    model_type: "qwen2_5_vl_text",
    reward_model: None,
    defaults: || {
        json!({
            "layer_types": null, "max_position_embeddings": 32_768, "max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0, "sliding_window": 4096, "use_sliding_window": false,
        })
    },
    ..qwen2::FAMILY
};

/// Qwen3-VL reads no window.
pub(super) const QWEN_3_VL: Family = Family {
    model_type: "qwen3_vl_text",
    reward_model: None,
    defaults: || {
        json!({
            "attention_bias": false, "head_dim": 128, "max_position_embeddings": 128_000, "num_key_value_heads": 32, "rope_theta": 500_000.0,
        })
    },
    read,
    ..qwen3::FAMILY
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let heads = qwen3::attention(file, common.heads)?;
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}
