//! GPT-NeoX and Pythia: LayerNorm, biases, and attention and MLP that both read the input of their layer, each through its own norm. Black et al. 2022,
//! arXiv:2204.06745.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common_with, gelu, untrainable};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, MlpSpec, Names, NormConfig};
use crate::{ConfigFile, DecoderConfig, LayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, NormKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GPTNeoXForCausalLM",
    model_type: "gpt_neox",
    reward_model: Some("GPTNeoXForSequenceClassification"),
    defaults,
    aliases: &[("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": true, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": true,
    })
}

static NAMES: Names = Names {
    embedding: "gpt_neox.embed_in",
    blocks: "gpt_neox.layers",
    attention_norms: BranchNorms::before("input_layernorm"),
    mlp_norms: BranchNorms::before("post_attention_layernorm"),
    attention: "attention",
    qkv: &["query_key_value"],
    qkv_stack: "query_key_value",
    output: "dense",
    gate_up: &["dense_h_to_4h"],
    gate_up_stack: "dense_h_to_4h",
    down: "dense_4h_to_h",
    norm: "gpt_neox.final_layer_norm",
    head: "embed_out",
    qkv_by_head: true,
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let name: String = file.required("hidden_act")?;
    let Some(gelu) = gelu(&name) else {
        return Err(file.error(&format!("`hidden_act` is \"{name}\"; only kinds of \"gelu\" are implemented")));
    };
    // transformers reads neither key for this family.
    let mut values = file.values().clone();
    ["head_dim", "num_key_value_heads"].iter().for_each(|key| drop(values.shift_remove(*key)));
    let eps = file.required("layer_norm_eps")?;
    let mut common = common_with(&file.with_values(values), Activation::Gelu(gelu), eps)?.named(&NAMES);
    common.model.stream.norm = NormConfig { kind: NormKind::Layer, bias: true, eps };
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "hidden_dropout"])?;
    let bias = file.required("attention_bias")?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let sublayers = [Heads(heads, Some(common.rope)), Mlp(MlpSpec { bias: true, ..common.mlp })];
    let layer = match file.required("use_parallel_residual")? {
        true => LayerSpec::parallel_branches(&NAMES, sublayers),
        false => LayerSpec::sequential(&NAMES, sublayers),
    };
    Ok(DecoderConfig { layers: vec![layer; common.layers], ..common.model })
}
