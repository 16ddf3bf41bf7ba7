//! The text models of Llama 4: layers with rotary positions see chunks of a text, and the others see the whole text without positions. Experts read
//! tokens that are multiplied by the score of their router. Meta AI 2025, and `transformers`.

use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits, size, softmax_routing};
use crate::layers::{
    ExpertStacks, ExpertsSpec, HeadsSpec, LLAMA, MlpSpec, Names, NormScope, QueryGrowth, SharedExpert,
};
use crate::{ConfigFile, DecoderConfig, LayerSet, RopeSpec};
use ottava_common::error::Result;
use ottava_recipe::param::StackOrder;
use ottava_tensor::ops::{Activation, RopePairs, RouterScores, Routing};
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub(super) const FAMILY: Family = Family {
    architecture: "Llama4ForCausalLM",
    model_type: "llama4_text",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": true, "floor_scale": 8192.0, "head_dim": 128,
        "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "layer_types": null,
        "max_position_embeddings": 131_072, "moe_layers": null, "no_rope_layer_interval": 4, "no_rope_layers": null, "num_experts_per_tok": 1,
        "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "use_qk_norm": true,
    })
}

static NAMES: Names = Names { mlp: "feed_forward", ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, bias) = (common(file)?, file.required("attention_bias")?);
    let unrotated = match file.nullable::<Vec<u8>>("no_rope_layers")? {
        // As in transformers, an empty list stands for the interval.
        Some(rotated) if rotated.is_empty() => LayerSet::unrotated_by_interval(file)?,
        _ => LayerSet::unrotated(file, common.layers)?,
    };
    let chunk = chunk(file, common.layers, &unrotated)?;
    let growth = growth(file)?;
    let qk_norm = file.required::<bool>("use_qk_norm")?.then_some(NormScope::HeadUnweighted);
    let (heads, rope) = (common.heads, RopeSpec { pairs: RopePairs::Neighbours, ..common.rope });
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..heads };
    let attention = |index| {
        let of = HeadsSpec { chunk: chunk(index), ..heads };
        match unrotated.contains(index) {
            true => Heads(HeadsSpec { growth, ..of }, None),
            false => Heads(HeadsSpec { qk_norm, rotates_first: qk_norm.is_some(), ..of }, Some(rope)),
        }
    };
    let (routed, experts) = (routed_layers(file, common.layers)?, experts(file, common.mlp.activation)?);
    let mlp = MlpSpec { hidden: size(file, "intermediate_size_mlp")?, ..common.mlp };
    let sizes = common
        .named(&NAMES)
        .sequential(|index| [attention(index), if routed.contains(index) { Experts(experts) } else { Mlp(mlp) }]);
    ignore_router_logits(file, sizes)
}

/// Returns the size of the chunks of each layer: of layers with rotary positions, unless the file lists other layers.
fn chunk<'a>(
    file: &ConfigFile,
    layers: usize,
    unrotated: &'a LayerSet,
) -> Result<impl Fn(usize) -> Option<usize> + use<'a>> {
    let size: Option<usize> = file.nullable("attention_chunk_size")?;
    let listed = LayerSet::of_types(file, "layer_types", layers, ["full_attention", "chunked_attention"])?;
    let has_chunks = listed.as_ref().is_some_and(|listed| (0..layers).any(|layer| listed.contains(layer)));
    match size {
        Some(0) => Err(file.error("`attention_chunk_size` is 0; it is a number of tokens")),
        None if has_chunks => Err(file.error(
            "`layer_types` has \"chunked_attention\", and `attention_chunk_size` is null; set it, or the types to \"full_attention\"",
        )),
        _ => Ok(move |index| {
            size.filter(|_| listed.as_ref().map_or(!unrotated.contains(index), |listed| listed.contains(index)))
        }),
    }
}

/// Returns the growth of queries in layers without rotary positions.
fn growth(file: &ConfigFile) -> Result<Option<QueryGrowth>> {
    if !file.required::<bool>("attn_temperature_tuning")? {
        return Ok(None);
    }
    let (beta, original_max_positions): (f64, f64) = (file.required("attn_scale")?, file.required("floor_scale")?);
    match beta.is_finite() && original_max_positions > 0.0 {
        true => Ok(Some(QueryGrowth { beta, original_max_positions, first: 1 })),
        false => Err(file.error(&format!("`attn_scale` is {beta}, for `floor_scale` {original_max_positions}"))),
    }
}

/// Returns the layers that have experts.
fn routed_layers(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
    match file.nullable::<BTreeSet<usize>>("moe_layers")? {
        Some(listed) => Ok(LayerSet::Listed((0..layers).map(|layer| listed.contains(&layer)).collect())),
        None => match file.required("interleave_moe_layer_step")? {
            0 => {
                Err(file
                    .error("`interleave_moe_layer_step` is 0; it is a number of layers, the last of which has experts"))
            }
            step => Ok(LayerSet::Every(step)),
        },
    }
}

fn experts(file: &ConfigFile, activation: Activation) -> Result<ExpertsSpec> {
    let (count, hidden) = (file.required("num_local_experts")?, size(file, "intermediate_size")?);
    // The sigmoid keeps the order of logits, by which transformers chooses.
    let routing = Routing { scores: RouterScores::Sigmoid, ..softmax_routing(file, false)? };
    Ok(ExpertsSpec {
        router: "router",
        stacks: Some(ExpertStacks::new(StackOrder::InputsFirst)),
        adapter_order: StackOrder::InputsFirst,
        weighs_inputs: true,
        shared: Some(SharedExpert { name: "shared_expert", hidden, gate: None, is_in_block: false }),
        ..ExpertsSpec::new(count, hidden, activation, routing)
    })
}
