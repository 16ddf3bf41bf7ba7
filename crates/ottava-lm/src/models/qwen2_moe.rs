//! Qwen1.5 and Qwen2 with mixtures of experts, beside an expert that all tokens share, with a factor by token. Yang et al. 2024,
//! arXiv:2407.10671.

use super::family::{Family, common, ignore_router_logits, qwen_window, routed_layers, softmax_routing};
use super::{ConfigFile, DecoderConfig, LayerSet};
use crate::error::Result;
use crate::layers::{ExpertsConfig, SharedExpert};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    reward_model: Some("Qwen2MoeForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    let (window, mut local) = qwen_window(file, sizes.layers)?;
    if window.is_some() && !file.has("layer_types") {
        // Every second layer up to `max_window_layers`, unlike Qwen2.
        let last: usize = file.optional("max_window_layers", 28)?;
        local = LayerSet::Listed((0..sizes.layers).map(|layer| layer < last && layer.is_multiple_of(2)).collect());
    }
    let hidden = file.required("shared_expert_intermediate_size")?;
    let routing = softmax_routing(file, file.optional("norm_topk_prob", false)?)?;
    let experts = ExpertsConfig {
        shared: Some(SharedExpert { name: "shared_expert", hidden, gate: Some("shared_expert_gate") }),
        ..ExpertsConfig::new(file.required("num_experts")?, file.required("moe_intermediate_size")?, routing)
    };
    let (qkv_bias, routed) = (file.optional("qkv_bias", true)?, routed_layers(file, sizes.layers)?);
    let sizes = DecoderConfig { qkv_bias, window, local, experts: Some(experts), routed, ..sizes };
    ignore_router_logits(file, sizes)
}
