//! Qwen3 with mixtures of experts. Yang et al. 2025, arXiv:2505.09388.

use super::qwen3::attention;
use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, routed_layers, softmax_routing, window};
use crate::layers::{ExpertsSpec, HeadsSpec};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    reward_model: Some("Qwen3MoeForSequenceClassification"),
    defaults,
    aliases: &[("num_local_experts", "num_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "decoder_sparse_step": 1, "max_position_embeddings": 32_768, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": false, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "sliding_window": 4096,
        "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let heads = attention(file, common.heads)?;
    // All layers have the window.
    let window = if file.required("use_sliding_window")? { window(file)?.size } else { None };
    let routing = softmax_routing(file, file.required("norm_topk_prob")?)?;
    let (count, hidden) = (file.required("num_experts")?, file.required("moe_intermediate_size")?);
    let experts = ExpertsSpec::new(count, hidden, common.mlp.activation, routing);
    let (routed, rope, mlp) = (routed_layers(file, common.layers)?, Some(common.rope), common.mlp);
    let sizes = common.sequential(|index| {
        let attention = Heads(HeadsSpec { window, ..heads }, rope);
        [attention, if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]
    });
    ignore_router_logits(file, sizes)
}
