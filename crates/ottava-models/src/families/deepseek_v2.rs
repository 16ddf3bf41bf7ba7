//! DeepSeek-V2: latent attention, mixtures of experts with shared experts, and MLPs in the first layers. DeepSeek-AI 2024, arXiv:2405.04434.

use crate::SublayerSpec::{Experts, Latent, Mlp};
use crate::family::{Common, Family, common, ignore_router_logits, size, softmax_routing};
use crate::layers::{ChoiceBias, ExpertsSpec, LatentSizes, LatentSpec, SharedExpert};
use crate::{ConfigFile, DecoderConfig, LayerSet, RopeScaling, RopeSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, ExpertGroups, GroupScore, RopePairs, Routing};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "DeepseekV2ForCausalLM",
    model_type: "deepseek_v2",
    reward_model: None,
    defaults,
    aliases: &[("num_experts", "n_routed_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "first_k_dense_replace": 0, "head_dim": 64, "kv_lora_rank": 512, "mlp_bias": false, "moe_intermediate_size": 1407, "n_routed_experts": 64,
        "n_shared_experts": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "v_head_dim": 128,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    if file.required("mlp_bias")? {
        return Err(file.error("`mlp_bias` is true; biases of DeepSeek-V2's MLPs are not implemented"));
    }
    let mut sizes = deepseek(file, RopePairs::Neighbours, routing(file)?, None)?;
    if file.optional("norm_topk_prob", false)? {
        sizes.folder.ignored.push(
            "`norm_topk_prob` is ignored, as in transformers: weights of DeepSeek-V2's experts do not sum to 1".into(),
        );
    }
    Ok(sizes)
}

/// Returns the sizes of a DeepSeek model with this router. `bias` is the vector that the router adds to scores for the choice.
pub(super) fn deepseek(
    file: &ConfigFile,
    pairs: RopePairs,
    routing: Routing,
    bias: Option<ChoiceBias>,
) -> Result<DecoderConfig> {
    let common = common(file)?;
    let Common { heads, rope, mlp, .. } = common;
    if heads.kv_heads != heads.heads {
        return Err(file.error(
            "`num_key_value_heads` differs from `num_attention_heads`; latent attention has one number of heads",
        ));
    }
    let sizes = LatentSizes {
        query_rank: file.nullable("q_lora_rank")?,
        kv_rank: size(file, "kv_lora_rank")?,
        plain: size(file, "qk_nope_head_dim")?,
        rotated: size(file, "qk_rope_head_dim")?,
        value: size(file, "v_head_dim")?,
    };
    let scale = Some(attention_scale(&common.model.ropes[rope.rope], sizes.head_dim()));
    let bias_of_attention = file.required("attention_bias")?;
    let latent = LatentSpec { heads: heads.heads, sizes, bias: bias_of_attention, scale, chosen_keys: None };
    let experts = experts(file, mlp.activation, routing, bias)?;
    let (routed, attention) = (routed_layers(file, common.layers)?, Latent(latent, RopeSpec { pairs, ..rope }));
    let layer = |index| [attention, if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }];
    ignore_router_logits(file, common.sequential(layer))
}

/// Returns the experts of a DeepSeek model, and the experts that all tokens share. `bias` is as in [`deepseek`].
pub(super) fn experts(
    file: &ConfigFile,
    activation: Activation,
    routing: Routing,
    bias: Option<ChoiceBias>,
) -> Result<ExpertsSpec> {
    let hidden = file.required("moe_intermediate_size")?;
    let shared: usize = file.nullable("n_shared_experts")?.unwrap_or(0);
    let of_shared = shared.saturating_mul(hidden);
    let shared = (shared > 0).then_some(SharedExpert {
        name: "shared_experts",
        is_in_block: false,
        hidden: of_shared,
        gate: None,
    });
    let count = file.required("n_routed_experts")?;
    Ok(ExpertsSpec { bias, shared, ..ExpertsSpec::new(count, hidden, activation, routing) })
}

/// Returns the layers that have experts, from `mlp_layer_types` if the family has the key and the file sets it, else from `first_k_dense_replace`.
pub(super) fn routed_layers(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
    const TYPES: &str = "mlp_layer_types";
    let listed = match file.has_default(TYPES) {
        true => LayerSet::of_types(file, TYPES, layers, ["dense", "sparse"])?,
        false => None,
    };
    listed.map_or_else(|| Ok(LayerSet::From(file.required("first_k_dense_replace")?)), Ok)
}

/// Returns the router, which chooses greedily, or within the groups that have the best experts.
fn routing(file: &ConfigFile) -> Result<Routing> {
    let method: String = file.required("topk_method")?;
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
    Ok(Routing { scale: file.required("routed_scaling_factor")?, groups, ..softmax_routing(file, false)? })
}

/// Returns the factor of the products of queries and keys. If the context is stretched, it grows with `mscale_all_dim`.
fn attention_scale(rope: &RopeScaling, head_dim: usize) -> f64 {
    let growth = match rope.kind.factor() {
        Some(factor) if factor > 1.0 => rope.mscale_all_dim.unwrap_or(0.0) * 0.1 * factor.ln() + 1.0,
        _ => 1.0,
    };
    growth * growth / (head_dim as f64).sqrt()
}
