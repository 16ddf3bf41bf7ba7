//! GLM-4.5 to GLM-4.7: rotary positions in the first half of each head, and the experts of DeepSeek-V3. GLM-4.5 Team 2025, arXiv:2508.06471.

use super::deepseek_v2::{experts, routed_layers};
use super::deepseek_v3::{CHOICE_BIAS, routing};
use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, layers};
use crate::layers::{HeadsSpec, NormScope};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Glm4MoeForCausalLM",
    model_type: "glm4_moe",
    reward_model: None,
    defaults,
    aliases: &[("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 1, "max_position_embeddings": 131_072, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "topk_group": 1,
        "use_qk_norm": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let qk_norm = file.required::<bool>("use_qk_norm")?.then_some(NormScope::Head);
    let heads = HeadsSpec { qk_norm, qkv_bias: file.required("attention_bias")?, ..common.heads };
    let experts = experts(file, common.mlp.activation, routing(file)?, Some(CHOICE_BIAS))?;
    let (routed, rope, mlp) = (routed_layers(file, common.layers)?, Some(common.rope), common.mlp);
    let sizes = common
        .sequential(|index| [Heads(heads, rope), if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]);
    ignore_router_logits(file, sizes.with_further_layers(layers(file, "num_nextn_predict_layers")?))
}
