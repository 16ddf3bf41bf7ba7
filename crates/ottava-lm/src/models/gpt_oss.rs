//! gpt-oss: mixtures of experts with biases, and a sink in the softmax of each head. OpenAI 2025, arXiv:2508.10925.

use super::family::{Family, common, ignore_router_logits, sliding_window, softmax_routing};
use super::{ConfigFile, DecoderConfig, LayerSet};
use crate::error::Result;
use crate::layers::ExpertsConfig;
use ottava_tensor::ops::Activation;
use serde_json::json;

pub(super) const FAMILY: Family =
    Family { architecture: "GptOssForCausalLM", model_type: "gpt_oss", reward_model: None, read };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    for (key, known) in [("swiglu_alpha", Activation::CLAMPED_FACTOR), ("swiglu_limit", Activation::CLAMPED_LIMIT)] {
        let value: f64 = file.optional(key, known)?;
        if value != known {
            return Err(file.error(&format!("`{key}` is {value}; {known} is implemented")));
        }
    }
    let sizes = common(&with_rope(file))?;
    if sizes.activation != Activation::SwiGlu {
        return Err(file.error("`hidden_act` is not \"silu\"; experts of gpt-oss have the clamped SwiGLU"));
    }
    let bias = file.optional("attention_bias", true)?;
    // The softmax over the chosen logits is that over all, divided by its sum.
    let routing = softmax_routing(file, true)?;
    let experts = ExpertsConfig {
        router: "router",
        biases: true,
        stacked: true,
        ..ExpertsConfig::new(file.required("num_local_experts")?, sizes.hidden, routing)
    };
    let sizes = DecoderConfig {
        norm_eps: file.optional("rms_norm_eps", 1e-5)?,
        qkv_bias: bias,
        output_bias: bias,
        sinks: true,
        window: sliding_window(file, Some(128))?,
        local: LayerSet::with_window(file, sizes.layers, LayerSet::AllButEvery(2))?,
        activation: Activation::ClampedSwiGlu,
        experts: Some(experts),
        ..sizes
    };
    ignore_router_logits(file, sizes)
}

/// `file` with the rotary positions that transformers assumes where it has none.
fn with_rope(file: &ConfigFile) -> ConfigFile {
    let mut values = file.values().clone();
    if !file.has("rope_parameters") && !file.has("rope_scaling") {
        let yarn = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        });
        values.insert("rope_scaling".into(), yarn);
    }
    if !file.has("rope_theta") {
        values.insert("rope_theta".into(), json!(150_000.0));
    }
    file.with_values(values)
}
