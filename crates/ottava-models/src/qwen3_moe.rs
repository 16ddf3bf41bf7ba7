//! Qwen3 with mixtures of experts. Yang et al. 2025, arXiv:2505.09388.

use crate::family::{Family, common, ignore_router_logits, routed_layers, sliding_window, softmax_routing};
use crate::layers::ExpertsConfig;
use crate::qwen3::dense;
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
        "decoder_sparse_step": 1, "max_position_embeddings": 32_768, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": false, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "sliding_window": 4096,
        "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = dense(file, common(file)?)?;
    // All layers have the window.
    let window = if file.required("use_sliding_window")? { sliding_window(file)? } else { None };
    let routing = softmax_routing(file, file.required("norm_topk_prob")?)?;
    let experts = ExpertsConfig::new(file.required("num_experts")?, file.required("moe_intermediate_size")?, routing);
    let routed = routed_layers(file, sizes.layers)?;
    ignore_router_logits(file, DecoderConfig { window, experts: Some(experts), routed, ..sizes })
}
