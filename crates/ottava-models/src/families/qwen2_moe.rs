//! Qwen1.5 and Qwen2 with mixtures of experts. All tokens share one more expert, whose output a gate multiplies per token. Yang et al. 2024,
//! arXiv:2407.10671.

use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, qwen_window, routed_layers, softmax_routing};
use crate::layers::{ExpertsSpec, HeadsSpec, SharedExpert};
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
    let common = common(file)?;
    let mut window = qwen_window(file, common.layers)?;
    if window.size.is_some() && !file.has("layer_types") {
        // Unlike Qwen2, every second layer up to `max_window_layers` has the window.
        let last: usize = file.required("max_window_layers")?;
        let has_window = |layer: usize| layer < last && layer.is_multiple_of(2);
        window.layers = LayerSet::Listed((0..common.layers).map(has_window).collect());
    }
    let heads = HeadsSpec { qkv_bias: file.required("qkv_bias")?, ..common.heads };
    let routing = softmax_routing(file, file.required("norm_topk_prob")?)?;
    let (count, hidden) = (file.required("num_experts")?, file.required("moe_intermediate_size")?);
    let of_shared = file.required("shared_expert_intermediate_size")?;
    let shared =
        SharedExpert { name: "shared_expert", is_in_block: false, hidden: of_shared, gate: Some("shared_expert_gate") };
    let experts =
        ExpertsSpec { shared: Some(shared), ..ExpertsSpec::new(count, hidden, common.mlp.activation, routing) };
    let (routed, rope, mlp) = (routed_layers(file, common.layers)?, Some(common.rope), common.mlp);
    let sizes = common.sequential(|index| {
        let attention = Heads(HeadsSpec { window: window.at(index), ..heads }, rope);
        [attention, if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]
    });
    ignore_router_logits(file, sizes)
}
