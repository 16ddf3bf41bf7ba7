//! DeepSeek-V2: latent attention, mixtures of experts beside shared ones, and MLPs in the first layers. DeepSeek-AI 2024, arXiv:2405.04434.

use super::family::{Family, common, ignore_router_logits, softmax_routing};
use super::{ConfigFile, DecoderConfig, LayerSet, Positions, RopeKind};
use crate::error::Result;
use crate::layers::{ExpertsConfig, LatentSizes, SharedExpert};
use ottava_tensor::ops::{ExpertGroups, GroupScore, RopePairs, Routing};

pub(super) const FAMILY: Family =
    Family { architecture: "DeepseekV2ForCausalLM", model_type: "deepseek_v2", reward_model: None, read };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    deepseek(file, RopePairs::Neighbours, routing(file)?, None)
}

/// The sizes of a DeepSeek with this router, which adds the vector called `bias` to its scores for the choice.
pub(super) fn deepseek(
    file: &ConfigFile,
    pairs: RopePairs,
    routing: Routing,
    bias: Option<&'static str>,
) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    if sizes.kv_heads != sizes.heads {
        return Err(file.error(
            "`num_key_value_heads` differs from `num_attention_heads`; latent attention has one number of heads",
        ));
    }
    if file.optional("mlp_bias", false)? {
        return Err(file.error("`mlp_bias` is true; biases of DeepSeek's MLPs are not implemented"));
    }
    let latent = LatentSizes {
        query_rank: file.optional("q_lora_rank", None)?,
        kv_rank: file.required("kv_lora_rank")?,
        plain: file.required("qk_nope_head_dim")?,
        rotated: file.required("qk_rope_head_dim")?,
        value: file.required("v_head_dim")?,
    };
    let count = if file.has("num_experts") { "num_experts" } else { "n_routed_experts" };
    let hidden = file.required("moe_intermediate_size")?;
    let shared: usize = file.optional("n_shared_experts", 0)?;
    let shared = (shared > 0).then(|| SharedExpert { name: "shared_experts", hidden: shared * hidden, gate: None });
    let experts = ExpertsConfig { bias, shared, ..ExpertsConfig::new(file.required(count)?, hidden, routing) };
    let sizes = DecoderConfig {
        head_dim: latent.head_dim(),
        latent: Some(latent),
        attention_scale: Some(attention_scale(&sizes.rope.kind, latent.head_dim())),
        output_bias: file.optional("attention_bias", false)?,
        positions: Positions::Rotary(pairs),
        experts: Some(experts),
        routed: LayerSet::From(file.optional("first_k_dense_replace", 0)?),
        ..sizes
    };
    ignore_router_logits(file, sizes)
}

/// The router: greedy, or in the groups with the best experts.
fn routing(file: &ConfigFile) -> Result<Routing> {
    if file.optional("norm_topk_prob", false)? {
        return Err(file.error("`norm_topk_prob` is true; weights that sum to 1 are not implemented for DeepSeek-V2, and transformers ignores the key"));
    }
    let method: String = file.optional("topk_method", "greedy".to_string())?;
    let groups = match method.as_str() {
        "greedy" => None,
        "group_limited_greedy" => {
            let [count, chosen] = [file.required("n_group")?, file.required("topk_group")?];
            Some(ExpertGroups { count, chosen, by: GroupScore::Best })
        }
        other => {
            let known = "\"greedy\" and \"group_limited_greedy\" are implemented";
            return Err(file.error(&format!("`topk_method` is \"{other}\"; {known}")));
        }
    };
    Ok(Routing { scale: file.optional("routed_scaling_factor", 1.0)?, groups, ..softmax_routing(file, false)? })
}

/// The factor of products of queries and keys, which grows with the context that YaRN stretches.
fn attention_scale(rope: &RopeKind, head_dim: usize) -> f64 {
    let growth = match rope {
        RopeKind::Yarn(yarn) if yarn.factor > 1.0 => yarn.mscale_all_dim.unwrap_or(0.0) * 0.1 * yarn.factor.ln() + 1.0,
        _ => 1.0,
    };
    growth * growth / (head_dim as f64).sqrt()
}
