//! Qwen3 with mixtures of experts. Yang et al. 2025, arXiv:2505.09388.

use super::family::{Family, common, ignore_router_logits, routed_layers, softmax_routing};
use super::qwen3::dense;
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;
use crate::layers::ExpertsConfig;

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    reward_model: Some("Qwen3MoeForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = dense(file, common(file)?)?;
    // All layers have the window.
    let window =
        if file.optional("use_sliding_window", false)? { file.optional("sliding_window", None)? } else { None };
    // transformers 5 writes `num_local_experts`.
    let count = if file.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    let routing = softmax_routing(file, file.optional("norm_topk_prob", false)?)?;
    let experts = ExpertsConfig::new(file.required(count)?, file.required("moe_intermediate_size")?, routing);
    let routed = routed_layers(file, sizes.layers)?;
    ignore_router_logits(file, DecoderConfig { window, experts: Some(experts), routed, ..sizes })
}
