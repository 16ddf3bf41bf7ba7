//! GLM-4.7-Flash: DeepSeek-V3 with other defaults. `transformers`.

use super::deepseek_v3::latent;
use crate::family::Family;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Glm4MoeLiteForCausalLM",
    model_type: "glm4_moe_lite",
    reward_model: None,
    defaults,
    aliases: &[("num_local_experts", "n_routed_experts"), ("head_dim", "qk_rope_head_dim")],
    // transformers reads `mlp_layer_types` only. If the key is missing, only the first layer has an MLP, as `first_k_dense_replace` says by default.
    read: latent,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 1, "head_dim": 64, "kv_lora_rank": 512, "max_position_embeddings": 202_752, "mlp_layer_types": null,
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_experts_per_tok": 4, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_interleave": true, "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256,
    })
}
