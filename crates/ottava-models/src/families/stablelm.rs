//! StableLM 2: LayerNorm with biases, and rotary positions in a part of each head. Bellagente et al. 2024, arXiv:2402.17834.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common_with, gated, untrainable};
use crate::layers::{HeadsSpec, LLAMA, Names, NormConfig, NormScope};
use crate::{ConfigFile, DecoderConfig, LayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::NormKind;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "StableLmForCausalLM",
    model_type: "stablelm",
    reward_model: Some("StableLmForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
        "qk_layernorm": false, "use_parallel_residual": false, "use_qkv_bias": false,
    })
}

static NAMES: Names = Names { head_norms: ["q_layernorm.norms.{}", "k_layernorm.norms.{}"], ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let qk_norm = file.required::<bool>("qk_layernorm")?.then_some(NormScope::Head);
    let eps = file.required("layer_norm_eps")?;
    let mut common = common_with(file, gated(file, "hidden_act")?, eps)?.named(&NAMES);
    common.model.stream.norm = NormConfig { kind: NormKind::Layer, bias: true, eps };
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "hidden_dropout"])?;
    let heads = HeadsSpec { qkv_bias: file.required("use_qkv_bias")?, qk_norm, ..common.heads };
    let sublayers = [Heads(heads, Some(common.rope)), Mlp(common.mlp)];
    if !file.required::<bool>("use_parallel_residual")? {
        return Ok(common.sequential(|_| sublayers));
    }
    let layer = LayerSpec::parallel(common.model.stream.names, sublayers);
    Ok(DecoderConfig { layers: vec![layer; common.layers], ..common.model })
}
