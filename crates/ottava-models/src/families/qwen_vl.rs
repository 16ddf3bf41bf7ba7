//! The text models of Qwen2.5-VL and Qwen3-VL: Qwen2, Qwen3 and Qwen3-MoE with other defaults. Bai et al. 2025, arXiv:2502.13923 and arXiv:2511.21631.

use super::{qwen2, qwen3, qwen3_moe};
use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, routed_layers, softmax_routing};
use crate::layers::{ExpertStacks, ExpertsSpec};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_recipe::param::StackOrder;
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

/// Folders have one tensor for all experts of a layer. Published folders have its last two dimensions exchanged.
pub(super) const QWEN_3_VL_MOE: Family = Family {
    model_type: "qwen3_vl_moe_text",
    reward_model: None,
    defaults: || {
        json!({
            "attention_bias": false, "decoder_sparse_step": 1, "max_position_embeddings": 128_000, "mlp_only_layers": [],
            "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 500_000.0,
            "tie_word_embeddings": true,
        })
    },
    read: |file| {
        let common = common(file)?;
        let heads = qwen3::attention(file, common.heads)?;
        // Weights of the chosen experts are always normalised.
        let routing = softmax_routing(file, true)?;
        let (count, hidden) = (file.required("num_experts")?, file.required("moe_intermediate_size")?);
        let stacks = Some(ExpertStacks::new(StackOrder::OutputsFirst));
        let experts = ExpertsSpec { stacks, ..ExpertsSpec::new(count, hidden, common.mlp.activation, routing) };
        let (routed, rope, mlp) = (routed_layers(file, common.layers)?, Some(common.rope), common.mlp);
        let layer = |index| [Heads(heads, rope), if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }];
        ignore_router_logits(file, common.sequential(layer))
    },
    ..qwen3_moe::FAMILY
};
