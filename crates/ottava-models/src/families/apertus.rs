//! Apertus: Llama's blocks with norms of heads, and MLPs without a gate whose activation is learned. Apertus Team 2025, arXiv:2509.14233.

use crate::SublayerSpec::{Heads, Xielu};
use crate::family::{Family, common_with};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, Names, NormScope, XieluSpec};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, XIELU_BETA, XIELU_EPS};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "ApertusForCausalLM",
    model_type: "apertus",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "hidden_act": "xielu", "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    })
}

const UP: &str = LLAMA.gate_up[1];
static NAMES: Names = Names {
    attention_norms: BranchNorms::before("attention_layernorm"),
    mlp_norms: BranchNorms::before("feedforward_layernorm"),
    gate_up: &[UP],
    gate_up_stack: UP,
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let activation: String = file.required("hidden_act")?;
    if activation != "xielu" {
        return Err(file.error(&format!("`hidden_act` is \"{activation}\"; Apertus has \"xielu\"")));
    }
    // The activation is a part of the sublayer, so the settings of other MLPs are not used.
    let common = common_with(file, Activation::SwiGlu, file.required("rms_norm_eps")?)?;
    let bias = file.required("attention_bias")?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, qk_norm: Some(NormScope::Head), ..common.heads };
    let (rope, mlp) = (Some(common.rope), XieluSpec { hidden: common.mlp.hidden });
    let mut sizes = common.named(&NAMES).sequential(|_| [Heads(heads, rope), Xielu(mlp)]);
    for layer in 0..sizes.layers.len() {
        let activation = format!("{}.{layer}.{}.act_fn", NAMES.blocks, NAMES.mlp);
        sizes.folder.constants.push((format!("{activation}.beta"), XIELU_BETA as f32));
        sizes.folder.constants.push((format!("{activation}.eps"), XIELU_EPS as f32));
    }
    Ok(sizes)
}
