//! ModernBERT: an encoder with rotary positions, GeGLU, and norms before its sublayers, usually without biases. Two of three layers have a window to
//! both sides. Warner et al. 2024, arXiv:2412.13663.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common_with, gated, gelu, ignored_dropout};
use crate::layers::{
    BranchNorms, EmbeddingTailSpec, HeadsSpec, LLAMA, MlpSpec, Names, NormConfig, PoolerSpec, ScoreSpec,
};
use crate::rope::{by_layer_types, without_ropes};
use crate::spec::MAX_SIZE;
use crate::{BranchSpec, ConfigFile, DecoderConfig, LayerSet, LayerSpec, RopeSpec, is_classifier};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, NormKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "ModernBertModel",
    model_type: "modernbert",
    reward_model: Some("ModernBertForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "classifier_activation": "gelu", "classifier_bias": false, "classifier_pooling": "cls",
        "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "hidden_activation": "gelu", "layer_types": null,
        "local_attention": 128, "local_rope_theta": 10_000.0, "max_position_embeddings": 8192, "mlp_bias": false, "norm_bias": false,
        "norm_eps": 1e-5, "pad_token_id": 50_283, "tie_word_embeddings": true,
    })
}

static NAMES: Names = Names {
    embedding: "model.embeddings.tok_embeddings",
    attention_norms: BranchNorms::before("attn_norm"),
    mlp_norms: BranchNorms::before("mlp_norm"),
    attention: "attn",
    qkv: &["Wqkv"],
    qkv_stack: "Wqkv",
    output: "Wo",
    gate_up: &["Wi"],
    gate_up_stack: "Wi",
    down: "Wo",
    norm: "model.final_norm",
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let others = without_ropes(file);
    let eps = file.required("norm_eps")?;
    let mut common = common_with(&others, gated(file, "hidden_activation")?, eps)?.named(&NAMES);
    let model = &mut common.model;
    model.ropes = by_layer_types(file, &others, ["global_rope_theta", "local_rope_theta"])?;
    model.stream.norm = NormConfig { kind: NormKind::Layer, bias: file.required("norm_bias")?, eps };
    model.embedding.tail = Some(EmbeddingTailSpec { types: None, norm: "model.embeddings.norm" });
    model.head.scores = ScoreSpec { name: "classifier", bias: true };
    let is_scored = is_classifier(file)?;
    (model.head.tied, model.head.pooled) = (!is_scored, !is_scored);
    model.head.pooler = is_scored.then(|| pooler(file)).transpose()?;
    model.folder.other_heads = vec!["head.", "decoder.", "classifier."];
    model.folder.ignored = ignored_dropout(file, &["embedding_dropout", "mlp_dropout", "classifier_dropout"])?;
    let local = local_layers(file, common.layers)?;
    let window = window(file)?;
    let Common { model, layers, heads, rope, mlp } = common;
    let bias = file.required("attention_bias")?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, both_directions: true, ..heads };
    let mlp = MlpSpec { bias: file.required("mlp_bias")?, ..mlp };
    let layer = |index| {
        let is_local = local.contains(index);
        let heads = HeadsSpec { window: window.filter(|_| is_local), ..heads };
        let rope = RopeSpec { rope: usize::from(is_local), ..rope };
        // The norm of the embedding is before the first layer.
        let norms = if index == 0 { BranchNorms::NONE } else { NAMES.attention_norms };
        let attention = BranchSpec::new(norms, vec![Heads(heads, Some(rope))]);
        LayerSpec::of(vec![attention, BranchSpec::new(NAMES.mlp_norms, vec![Mlp(mlp)])])
    };
    Ok(DecoderConfig { layers: (0..layers).map(layer).collect(), ..model })
}

/// Returns the window of local layers to each side, the token itself included. `local_attention` counts the tokens of both sides.
fn window(file: &ConfigFile) -> Result<Option<usize>> {
    let both: usize = file.required("local_attention")?;
    Ok(Some((both / 2).min(MAX_SIZE) + 1))
}

/// Returns the layers with a window: by `layer_types`, or all but the first of each group of `global_attn_every_n_layers`.
fn local_layers(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
    let every: usize = file.required("global_attn_every_n_layers")?;
    if every == 0 {
        return Err(file.error("`global_attn_every_n_layers` is 0; it is a number of layers"));
    }
    let default = LayerSet::Listed((0..layers).map(|index| !index.is_multiple_of(every)).collect());
    LayerSet::with_window(file, layers, default)
}

/// Returns the layers before the scores of a classifier.
fn pooler(file: &ConfigFile) -> Result<PoolerSpec> {
    let pooling: String = file.required("classifier_pooling")?;
    let mean = match pooling.as_str() {
        "cls" => false,
        "mean" => true,
        _ => return Err(file.error(&format!("`classifier_pooling` is \"{pooling}\"; it is \"cls\" or \"mean\""))),
    };
    let name: String = file.required("classifier_activation")?;
    let Some(gelu) = gelu(&name) else {
        return Err(
            file.error(&format!("`classifier_activation` is \"{name}\"; only kinds of \"gelu\" are implemented"))
        );
    };
    let (bias, activation) = (file.required("classifier_bias")?, Activation::Gelu(gelu));
    Ok(PoolerSpec { mean, name: "head.dense", bias, activation, norm: Some("head.norm"), is_read: true })
}
