//! The text models of Gemma 4: layers that see the whole text have larger heads than layers with a window, the last layers may read the keys and
//! values of earlier layers, and small models have per-layer embeddings. Google DeepMind 2026, and `transformers` 5.24.

use crate::SublayerSpec::{Experts, GatedEmbedding, Heads, Mlp};
use crate::family::{Common, Family, common, size, softmax_routing, window_in};
use crate::layer_set::Window;
use crate::layers::{
    BranchNorms, ExpertInput, ExpertStacks, ExpertsSpec, GatedEmbeddingSpec, HeadsSpec, KeysAndValues, LLAMA,
    LayerEmbeddingsSpec, MlpSpec, Names, NormScope, RouterScales,
};
use crate::rope::without_ropes;
use crate::{BranchSpec, ConfigFile, DecoderConfig, LayerSet, LayerSpec, RopeKind, RopeScaling, RopeSpec};
use ottava_common::error::Result;
use ottava_recipe::param::StackOrder;
use serde_json::{Map, Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma4ForCausalLM",
    model_type: "gemma4_text",
    reward_model: None,
    defaults,
    aliases: &[("top_k_experts", "num_experts_per_tok")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "attention_k_eq_v": false, "enable_moe_block": false, "final_logit_softcapping": null, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216, "layer_types": null, "max_position_embeddings": 131_072, "moe_intermediate_size": null,
        "num_attention_heads": 8, "num_experts": null, "num_global_key_value_heads": null, "num_hidden_layers": 30, "num_key_value_heads": 4,
        "num_kv_shared_layers": 0, "pad_token_id": 0, "partial_rotary_factor": 1.0, "sliding_window": 512, "tie_word_embeddings": true,
        "use_bidirectional_attention": null, "use_double_wide_mlp": false, "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
    })
}

static NAMES: Names = Names {
    attention_norms: BranchNorms::around("input_layernorm", "post_attention_layernorm"),
    mlp_norms: BranchNorms::around("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ..LLAMA
};

/// The key of the settings that differ between layers.
const BY_LAYER: &str = "per_layer_config";
/// The kinds of layers, in `layer_types` and `rope_parameters`.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    if file.nullable::<String>("use_bidirectional_attention")?.is_some_and(|of| of == "all") {
        return Err(
            file.error("`use_bidirectional_attention` is \"all\"; attention to later tokens is not implemented")
        );
    }
    let mut gemma = common(&without_layers(file))?.named(&NAMES);
    let (count, bias) = (gemma.layers, file.required("attention_bias")?);
    let window = window(file, count)?;
    gemma.model.ropes = ropes(file)?;
    gemma.model.embedding.scale = (gemma.model.stream.channels as f64).sqrt() as f32;
    gemma.model.embedding.of_layers = layer_embeddings(file, gemma.model.vocabulary)?;
    gemma.model.head.cap = file.nullable("final_logit_softcapping")?;
    let plain = HeadsSpec {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: Some(NormScope::HeadAndValues),
        scale: Some(1.0),
        ..gemma.heads
    };
    let heads = sharing(file, heads(file, plain, &window, count)?, &window)?;
    let wide = if file.required("use_double_wide_mlp")? { 2 } else { 1 };
    let experts = file.required::<bool>("enable_moe_block")?.then(|| experts(file, &gemma)).transpose()?;
    for key in ["num_experts", "moe_intermediate_size"].into_iter().filter(|key| experts.is_none() && file.has(key)) {
        if size(file, key)? > 0 {
            let sentence = format!("`{key}` is ignored, as in transformers: `enable_moe_block` is false");
            gemma.model.folder.ignored.push(sentence);
        }
    }
    let Common { mut model, rope, mlp, .. } = gemma;
    let width = model.embedding.of_layers.map(|of| of.width);
    let layer = |(index, heads): (usize, HeadsSpec)| {
        let rope = RopeSpec { rope: usize::from(window.layers.contains(index)), ..rope };
        let has_own_keys = !matches!(heads.source, KeysAndValues::OfBlock(_));
        let mlp = MlpSpec { hidden: mlp.hidden * if has_own_keys { 1 } else { wide }, ..mlp };
        let mut branches =
            vec![BranchSpec::new(NAMES.attention_norms, vec![Heads(heads, Some(rope))]), feed_forward(mlp, experts)];
        branches.extend(width.map(|width| {
            let embedding = GatedEmbeddingSpec { width, activation: mlp.activation };
            BranchSpec::new(BranchNorms::after("post_per_layer_input_norm"), vec![GatedEmbedding(embedding)])
        }));
        LayerSpec { scale: Some("layer_scalar"), ..LayerSpec::of(branches) }
    };
    let [_, key, value] = NAMES.qkv else { unreachable!("three projections") };
    // Published folders have projections and norms that no model reads.
    let unread = [*key, *value, NAMES.head_norms[1], "v_norm"];
    for index in (0..heads.len()).filter(|&index| matches!(heads[index].source, KeysAndValues::OfBlock(_))) {
        for name in unread {
            model = model.with_carried(&format!("{}.{index}.{}.{name}.", NAMES.blocks, NAMES.attention));
        }
    }
    let layers = heads.into_iter().enumerate().map(layer).collect();
    Ok(DecoderConfig { layers, ..model })
}

/// Returns `file` without the keys that differ between layers, which [`common`] does not read.
fn without_layers(file: &ConfigFile) -> ConfigFile {
    let others = without_ropes(file);
    let mut values = others.values().clone();
    values.shift_remove(BY_LAYER);
    others.with_values(values)
}

/// Returns the window and its layers. The last layer never has a window.
fn window(file: &ConfigFile, layers: usize) -> Result<Window> {
    let Window { size, layers: local } = window_in(file, layers, LayerSet::AllButEvery(6))?;
    let listed = (0..layers).map(|layer| layer + 1 < layers && local.contains(layer)).collect();
    Ok(Window { size, layers: LayerSet::Listed(listed) })
}

/// Reads the rotary positions of layers that see the whole text, and of layers with a window.
fn ropes(file: &ConfigFile) -> Result<Vec<RopeScaling>> {
    if file.has("rope_scaling") {
        return Err(file.error("`rope_scaling` is set, which would hold for all layers; `rope_parameters` has the rotary positions of each kind of layers"));
    }
    let full = RopeScaling { partial: 0.25, kind: RopeKind::Proportional { factor: 1.0 }, ..RopeScaling::plain(1e6) };
    let Some(parameters) = file.section("rope_parameters")? else { return Ok(vec![full, RopeScaling::plain(1e4)]) };
    let of = |kind: &str| match parameters.section(kind)? {
        Some(section) if section.has("rope_theta") => {
            let rope = RopeScaling::of_section(file, Some(&section), section.required("rope_theta")?)?;
            match rope.kind {
                RopeKind::Default | RopeKind::Proportional { .. } => Ok(rope),
                _ => {
                    Err(section.error("`rope_type` is implemented as \"default\" and \"proportional\" for this family"))
                }
            }
        }
        _ => Err(parameters.error(&format!(
            "`{kind}` with `rope_theta` is missing; the layers of each kind have rotary positions of their own"
        ))),
    };
    KINDS.into_iter().map(of).collect()
}

/// Returns the attention of each layer, without sharing: the sizes that `per_layer_config` lists, or larger heads in layers that see the whole text.
fn heads(file: &ConfigFile, plain: HeadsSpec, window: &Window, layers: usize) -> Result<Vec<HeadsSpec>> {
    let listed: Option<Map<String, Value>> = file.nullable(BY_LAYER)?;
    let has_one_projection: bool = file.required("attention_k_eq_v")?;
    let (head_dim, kv_heads): (_, Option<_>) =
        (size(file, "global_head_dim")?, file.nullable("num_global_key_value_heads")?);
    for (key, value) in listed.iter().flatten() {
        let is_layer = KINDS.contains(&key.as_str()) || key.parse().is_ok_and(|index: usize| index < layers);
        if !is_layer || !value.is_object() {
            return Err(file.error(&format!(
                "`{BY_LAYER}` has `{key}`: {value}; its keys are numbers of layers below {layers} or kinds of layers, and its values are objects"
            )));
        }
    }
    let of_layer = |index: usize| {
        let (is_local, mut heads) = (window.layers.contains(index), HeadsSpec { window: window.at(index), ..plain });
        if has_one_projection && !is_local {
            heads.source = KeysAndValues::OneProjection;
        }
        match &listed {
            None if is_local => {}
            None => {
                let kv_heads = kv_heads.filter(|_| has_one_projection).unwrap_or(plain.kv_heads);
                (heads.head_dim, heads.kv_heads) = (head_dim, kv_heads);
            }
            Some(listed) => {
                let kind = KINDS[usize::from(is_local)];
                let of = listed.get(&index.to_string()).or_else(|| listed.get(kind));
                for (key, value) in of.and_then(Value::as_object).into_iter().flatten() {
                    let number = value.as_u64().map(|number| number as usize);
                    match (key.as_str(), number) {
                        ("head_dim", Some(dim)) => heads.head_dim = dim,
                        ("num_key_value_heads", Some(kv)) => heads.kv_heads = kv,
                        _ => {
                            return Err(file.error(&format!(
                                "`{BY_LAYER}` gives layer {index} `{key}` {value}; `head_dim` and `num_key_value_heads` can differ between layers"
                            )));
                        }
                    }
                }
            }
        }
        Ok(heads)
    };
    (0..layers).map(of_layer).collect()
}

/// Makes the last `num_kv_shared_layers` layers read the keys and values of the last earlier layer of their kind.
fn sharing(file: &ConfigFile, mut heads: Vec<HeadsSpec>, window: &Window) -> Result<Vec<HeadsSpec>> {
    let shared: usize = file.required("num_kv_shared_layers")?;
    let own = heads.len().saturating_sub(shared);
    for index in own..heads.len() {
        let is_local = window.layers.contains(index);
        let Some(of) = (0..own).rev().find(|&of| window.layers.contains(of) == is_local) else {
            return Err(file.error(&format!(
                "`num_kv_shared_layers` is {shared}, and no layer before layer {own} is of the kind `{}` of layer {index}, whose keys and values it reads",
                KINDS[usize::from(is_local)]
            )));
        };
        let [reader, lender] = [heads[index], heads[of]];
        if (reader.head_dim, reader.kv_heads) != (lender.head_dim, lender.kv_heads) {
            return Err(
                file.error(&format!("layer {index} reads the keys and values of layer {of}, which have other sizes"))
            );
        }
        heads[index].source = KeysAndValues::OfBlock(of);
        heads[of].is_shared = true;
    }
    Ok(heads)
}

/// Reads the sizes of per-layer embeddings. 0 elements are no such embeddings.
fn layer_embeddings(file: &ConfigFile, vocabulary: usize) -> Result<Option<LayerEmbeddingsSpec>> {
    let width: usize = file.nullable("hidden_size_per_layer_input")?.unwrap_or(0);
    let rows = size(file, "vocab_size_per_layer_input")?;
    match width > 0 && rows < vocabulary {
        true => Err(file.error(&format!(
            "`vocab_size_per_layer_input` is {rows}, fewer than the {vocabulary} tokens of `vocab_size`; each token has an embedding for each layer"
        ))),
        false => Ok((width > 0).then_some(LayerEmbeddingsSpec { vocabulary: rows, width })),
    }
}

/// Returns the branch of the MLP, or the sum of MLP and experts, with norms of their own.
fn feed_forward(mlp: MlpSpec, experts: Option<ExpertsSpec>) -> BranchSpec {
    let BranchNorms { before, after, .. } = NAMES.mlp_norms;
    match experts {
        None => BranchSpec::new(NAMES.mlp_norms, vec![Mlp(mlp)]),
        Some(experts) => BranchSpec {
            sublayer_norms: vec![
                BranchNorms { before, after: Some("post_feedforward_layernorm_1"), ..BranchNorms::NONE },
                BranchNorms::after("post_feedforward_layernorm_2"),
            ],
            ..BranchSpec::new(BranchNorms { after, ..BranchNorms::NONE }, vec![Mlp(mlp), Experts(experts)])
        },
    }
}

fn experts(file: &ConfigFile, common: &Common) -> Result<ExpertsSpec> {
    let routing = softmax_routing(file, true)?;
    let (count, hidden) = (file.required("num_experts")?, size(file, "moe_intermediate_size")?);
    Ok(ExpertsSpec {
        router: "router.proj",
        stacks: Some(ExpertStacks::new(StackOrder::OutputsFirst)),
        input: ExpertInput::Normed("pre_feedforward_layernorm_2"),
        scales: Some(RouterScales { input: "router.scale", experts: "router.per_expert_scale" }),
        is_in_block: true,
        ..ExpertsSpec::new(count, hidden, common.mlp.activation, routing)
    })
}
