//! Qwen1.5 and Qwen2 with mixtures of experts, beside an expert that all tokens share, with a factor by token. Yang et al. 2024,
//! arXiv:2407.10671.

use crate::family::{Family, common, ignore_router_logits, qwen_window, routed_layers, softmax_routing};
use crate::layers::{ExpertsConfig, SharedExpert};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    reward_model: Some("Qwen2MoeForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "decoder_sparse_step": 1, "layer_types": null, "max_position_embeddings": 32_768, "max_window_layers": 28, "mlp_only_layers": [],
        "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_experts": 60, "num_experts_per_tok": 4,
        "num_key_value_heads": 16, "qkv_bias": true, "shared_expert_intermediate_size": 5632, "sliding_window": 4096,
        "use_sliding_window": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    let (window, mut local) = qwen_window(file, sizes.layers)?;
    if window.is_some() && !file.has("layer_types") {
        // Every second layer up to `max_window_layers`, unlike Qwen2.
        let last: usize = file.required("max_window_layers")?;
        local = LayerSet::Listed((0..sizes.layers).map(|layer| layer < last && layer.is_multiple_of(2)).collect());
    }
    let hidden = file.required("shared_expert_intermediate_size")?;
    let routing = softmax_routing(file, file.required("norm_topk_prob")?)?;
    let experts = ExpertsConfig {
        shared: Some(SharedExpert { name: "shared_expert", hidden, gate: Some("shared_expert_gate") }),
        ..ExpertsConfig::new(file.required("num_experts")?, file.required("moe_intermediate_size")?, routing)
    };
    let (qkv_bias, routed) = (file.required("qkv_bias")?, routed_layers(file, sizes.layers)?);
    let sizes = DecoderConfig { qkv_bias, window, local, experts: Some(experts), routed, ..sizes };
    ignore_router_logits(file, sizes)
}
