//! OLMoE: mixtures of experts, and one norm for all queries and one for all keys of a token. Muennighoff et al. 2024, arXiv:2409.02060.

use super::olmo2::attention;
use crate::SublayerSpec::{Experts, Heads};
use crate::family::{Family, common, ignore_router_logits, softmax_routing};
use crate::layers::ExpertsSpec;
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
        "attention_bias": false, "clip_qkv": null, "max_position_embeddings": 4096, "norm_topk_prob": false, "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    if file.has("clip_qkv") {
        return Err(file.error("`clip_qkv` is set; clipping of queries, keys and values is not implemented"));
    }
    let common = common(file)?;
    let heads = attention(file, common.heads)?;
    let (count, routing) = (file.required("num_experts")?, softmax_routing(file, file.required("norm_topk_prob")?)?);
    let experts = ExpertsSpec::new(count, common.mlp.hidden, common.mlp.activation, routing);
    let rope = Some(common.rope);
    ignore_router_logits(file, common.sequential(|_| [Heads(heads, rope), Experts(experts)]))
}
