//! gpt-oss: mixtures of experts with biases, and an attention sink for each head. OpenAI 2025, arXiv:2508.10925.

use crate::SublayerSpec::{Experts, Heads};
use crate::family::{Family, common, ignore_router_logits, softmax_routing, window_in};
use crate::layers::{ExpertStacks, ExpertsSpec, HeadsSpec};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use ottava_recipe::param::StackOrder;
use ottava_tensor::ops::Activation;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    reward_model: None,
    defaults,
    aliases: &[("num_experts", "num_local_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": true, "head_dim": 64, "layer_types": null, "max_position_embeddings": 131_072, "num_experts_per_tok": 4, "num_key_value_heads": 8,
        "num_local_experts": 128, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        },
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    for (key, known) in [("swiglu_alpha", Activation::CLAMPED_FACTOR), ("swiglu_limit", Activation::CLAMPED_LIMIT)] {
        let value: f64 = file.optional(key, known)?;
        if value != known {
            return Err(file.error(&format!("`{key}` is {value}; {known} is implemented")));
        }
    }
    // Experts always have the clamped SwiGLU, so `hidden_act` is ignored.
    let mut values = file.values().clone();
    values.remove("hidden_act");
    let (common, bias) = (common(&file.with_values(values))?, file.required("attention_bias")?);
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, sinks: true, ..common.heads };
    let window = window_in(file, common.layers, LayerSet::AllButEvery(2))?;
    // The softmax over the chosen logits equals the softmax over all logits, divided by its sum over the chosen experts.
    let routing = softmax_routing(file, true)?;
    let (count, activation) = (file.required("num_local_experts")?, Activation::ClampedSwiGlu);
    let experts = ExpertsSpec {
        router: "router",
        biases: true,
        stacks: Some(ExpertStacks::new(StackOrder::Interleaved)),
        adapter_order: StackOrder::Interleaved,
        ..ExpertsSpec::new(count, common.mlp.hidden, activation, routing)
    };
    let rope = Some(common.rope);
    let sizes =
        common.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, rope), Experts(experts)]);
    ignore_router_logits(file, sizes)
}
