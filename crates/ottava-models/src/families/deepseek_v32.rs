//! DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose queries see the keys that an indexer chooses. DeepSeek-AI 2025, arXiv:2512.02556; GLM-5 Team 2026.
//!
//! A query with at most `index_topk` keys sees all of them, so shorter sequences have the attention of DeepSeek-V3. Only such sequences are
//! implemented. The choice has no gradient, and the tensors of indexers are copied.

use super::deepseek_v3::latent;
use crate::family::Family;
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "DeepseekV32ForCausalLM",
    model_type: "deepseek_v32",
    reward_model: None,
    defaults,
    aliases: &[
        ("num_local_experts", "n_routed_experts"),
        ("num_experts", "n_routed_experts"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
    ],
    read,
};

/// GLM-5, whose layers may share the choices of an indexer.
pub(super) const GLM_5: Family = Family {
    architecture: "GlmMoeDsaForCausalLM",
    model_type: "glm_moe_dsa",
    defaults: || {
        let mut all = defaults();
        let own = json!({
            "max_position_embeddings": 202_752, "n_group": 1, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5, "topk_group": 1, "v_head_dim": 256,
        });
        for (key, value) in own.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        all
    },
    ..FAMILY
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 3, "head_dim": 64, "index_topk": 2048, "kv_lora_rank": 512, "layer_types": null,
        "max_position_embeddings": 163_840,
        "mlp_bias": false, "mlp_layer_types": null, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_experts_per_tok": 8, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": true, "routed_scaling_factor": 2.5, "topk_group": 4,
        "v_head_dim": 128,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    if file.required("mlp_bias")? {
        return Err(file.error("`mlp_bias` is true; biases of the MLPs of DeepSeek-V3.2 and GLM-5 are not implemented"));
    }
    // These models always rotate neighbours, so the key of DeepSeek-V3 is ignored.
    let mut values = file.values().clone();
    values.remove("rope_interleave");
    let mut sizes = latent(&file.with_values(values))?;
    let keys = file.required("index_topk")?;
    if keys == 0 {
        return Err(file.error("`index_topk` is 0; it is the number of keys that a query sees"));
    }
    sizes.latents_mut().for_each(|latent| latent.chosen_keys = Some(keys));
    let (names, layers) = (sizes.stream.names, sizes.layers.len());
    // Both are names of the attention of all layers.
    LayerSet::of_types(file, "layer_types", layers, ["indexed_attention", "deepseek_sparse_attention"])?;
    sizes
        .folder
        .carried
        .extend((0..layers).map(|layer| format!("{}.{layer}.{}.indexer.", names.blocks, names.attention)));
    Ok(sizes)
}
