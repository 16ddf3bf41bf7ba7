//! K-EXAONE: the attention of EXAONE 4, and the experts of DeepSeek-V3. LG AI Research 2026, and `transformers`.

use super::deepseek_v2::{experts, routed_layers};
use super::deepseek_v3::routing;
use super::exaone4::attention;
use crate::SublayerSpec::{Experts, Mlp};
use crate::family::{Family, common, ignore_router_logits};
use crate::layers::ChoiceBias;
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "ExaoneMoeForCausalLM",
    model_type: "exaone_moe",
    reward_model: None,
    defaults,
    // The experts of DeepSeek's models are read by its names of keys.
    aliases: &[("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "first_k_dense_replace": 1, "layer_types": null, "mlp_layer_types": null, "moe_intermediate_size": 1024, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "sliding_window": 4096, "sliding_window_pattern": 4, "topk_group": 1,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?;
    let bias = ChoiceBias::vector("e_score_correction_bias");
    let experts = experts(file, common.mlp.activation, routing(file)?, Some(bias))?;
    let (attention, routed) = (attention(file, &common)?, routed_layers(file, common.layers)?);
    let mlp = common.mlp;
    let sizes =
        common.sequential(|index| [attention(index), if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]);
    ignore_router_logits(file, sizes.with_carried("mtp."))
}
