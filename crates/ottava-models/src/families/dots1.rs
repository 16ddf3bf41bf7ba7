//! dots.llm1: Qwen3's attention and the experts of DeepSeek-V3. rednote-hilab 2025, arXiv:2506.05767.

use super::deepseek_v2::{experts, routed_layers};
use super::deepseek_v3::{CHOICE_BIAS, routing};
use super::qwen3::attention;
use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, window_in};
use crate::layers::HeadsSpec;
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Dots1ForCausalLM",
    model_type: "dots1",
    reward_model: None,
    defaults,
    aliases: &[("num_local_experts", "n_routed_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 0, "layer_types": null, "max_window_layers": 62, "moe_intermediate_size": 1408, "n_group": 1,
        "n_shared_experts": null, "norm_topk_prob": false, "num_key_value_heads": 32, "routed_scaling_factor": 1.0, "sliding_window": 4096,
        "topk_group": 1,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let heads = attention(file, common.heads)?;
    let window = window_in(file, common.layers, LayerSet::From(file.required("max_window_layers")?))?;
    let experts = experts(file, common.mlp.activation, routing(file)?, Some(CHOICE_BIAS))?;
    let (routed, rope, mlp) = (routed_layers(file, common.layers)?, Some(common.rope), common.mlp);
    let sizes = common.sequential(|index| {
        let attention = Heads(HeadsSpec { window: window.at(index), ..heads }, rope);
        [attention, if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]
    });
    ignore_router_logits(file, sizes)
}
