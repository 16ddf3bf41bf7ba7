//! OLMoE: mixtures of experts, and norms of all queries and all keys of a token. Muennighoff et al. 2024, arXiv:2409.02060.

use crate::family::{Family, common, ignore_router_logits, softmax_routing};
use crate::layers::{ExpertsConfig, NormScope};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "OlmoeForCausalLM",
    model_type: "olmoe",
    reward_model: None,
    defaults,
    aliases: &[("num_local_experts", "num_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "max_position_embeddings": 4096, "norm_topk_prob": false, "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    if file.has("clip_qkv") {
        return Err(file.error("`clip_qkv` is set; clipping of queries, keys and values is not implemented"));
    }
    let sizes = common(file)?;
    let bias = file.required("attention_bias")?;
    let routing = softmax_routing(file, file.required("norm_topk_prob")?)?;
    let experts = ExpertsConfig::new(file.required("num_experts")?, sizes.hidden, routing);
    let sizes = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: Some(NormScope::Projection),
        experts: Some(experts),
        ..sizes
    };
    ignore_router_logits(file, sizes)
}
