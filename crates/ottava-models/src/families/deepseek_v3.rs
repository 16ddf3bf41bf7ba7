//! DeepSeek-V3: DeepSeek-V2 with sigmoid scores. A bias is added to the scores for the choice. DeepSeek-AI 2024, arXiv:2412.19437.

use super::deepseek_v2::deepseek;
use crate::family::{Family, layers, softmax_routing};
use crate::layers::ChoiceBias;
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::{ExpertGroups, GroupScore, RopePairs, RouterScores, Routing};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    reward_model: None,
    defaults,
    aliases: &[("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers")],
    read,
};

/// Kimi K2, whose folders name DeepSeek-V3's class and a type of their own. Kimi Team 2025, arXiv:2507.20534.
pub(super) const KIMI_K2: Family = Family { model_type: "kimi_k2", ..FAMILY };

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 3, "head_dim": 64, "kv_lora_rank": 512, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rope_interleave": true, "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut sizes = latent(file)?;
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        let name: String = file.optional(key, known.to_string())?;
        if name != known {
            let sentence =
                format!("`{key}` is \"{name}\" and is ignored, as in transformers: DeepSeek-V3 has \"{known}\"");
            sizes.folder.ignored.push(sentence);
        }
    }
    Ok(sizes)
}

/// Returns the sizes of a model with latent attention and the experts of DeepSeek-V3.
pub(super) fn latent(file: &ConfigFile) -> Result<DecoderConfig> {
    let pairs = if file.required("rope_interleave")? { RopePairs::Neighbours } else { RopePairs::Halves };
    let sizes = deepseek(file, pairs, routing(file)?, Some(CHOICE_BIAS))?;
    Ok(sizes.with_further_layers(layers(file, "num_nextn_predict_layers")?))
}

/// The vector that the router of a mixture adds to scores for the choice.
pub(super) const CHOICE_BIAS: ChoiceBias = ChoiceBias::vector("gate.e_score_correction_bias");

/// Returns the router of DeepSeek-V3.
pub(super) fn routing(file: &ConfigFile) -> Result<Routing> {
    let [count, chosen] = [file.required("n_group")?, file.required("topk_group")?];
    Ok(Routing {
        scores: RouterScores::Sigmoid,
        normalise: file.required::<bool>("norm_topk_prob")?.then_some(1e-20),
        scale: file.required("routed_scaling_factor")?,
        groups: Some(ExpertGroups { count, chosen, by: GroupScore::TwoBest }),
        ..softmax_routing(file, false)?
    })
}
