//! The text models of Qwen3.5: the layers of Qwen3-Next with flat projections, dense or with experts.

use super::qwen3_next::{Hybrid, experts};
use crate::SublayerSpec::{Experts, Mlp};
use crate::family::{Family, ignore_router_logits};
use crate::layers::ProjectionLayout;
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    reward_model: Some("Qwen3_5TextForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

pub(super) const MOE: Family = Family {
    architecture: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    reward_model: None,
    defaults: moe_defaults,
    // No layer has a dense MLP.
    aliases: &[("moe_intermediate_size", "intermediate_size")],
    read: read_moe,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "full_attention_interval": 4, "head_dim": 256, "layer_types": null, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 32_768, "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
    })
}

fn moe_defaults() -> Value {
    let mut defaults = defaults();
    let of_experts = json!({
        "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    });
    for (key, value) in of_experts.as_object().into_iter().flatten() {
        defaults[key] = value.clone();
    }
    defaults
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let hybrid = Hybrid::read(file, ProjectionLayout::Flat)?;
    let mlp = hybrid.common.mlp;
    Ok(hybrid.sequential(|_| Mlp(mlp)))
}

fn read_moe(file: &ConfigFile) -> Result<DecoderConfig> {
    let hybrid = Hybrid::read(file, ProjectionLayout::Flat)?;
    let experts = experts(file, hybrid.common.mlp.activation, true)?;
    ignore_router_logits(file, hybrid.sequential(|_| Experts(experts)))
}
