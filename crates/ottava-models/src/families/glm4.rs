//! GLM-4-0414: norms on both sides of each sublayer, fused gate and up, and rotary positions of neighbouring elements in the first half of each
//! head. GLM Team 2024, arXiv:2406.12793, and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, Names};
use crate::{ConfigFile, DecoderConfig, RopeSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::RopePairs;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Glm4ForCausalLM",
    model_type: "glm4",
    reward_model: Some("Glm4ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": true, "head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    })
}

static NAMES: Names = Names {
    attention_norms: BranchNorms::around("input_layernorm", "post_self_attn_layernorm"),
    mlp_norms: BranchNorms::around("post_attention_layernorm", "post_mlp_layernorm"),
    gate_up: &[LLAMA.gate_up_stack],
    ..LLAMA
};

/// GLM-4 of 2024, with norms before sublayers only. GLM Team 2024, arXiv:2406.12793.
pub(super) const GLM: Family = Family {
    architecture: "GlmForCausalLM",
    model_type: "glm",
    reward_model: Some("GlmForSequenceClassification"),
    read: |file| layers(file, &NAMES_OF_GLM),
    ..FAMILY
};

static NAMES_OF_GLM: Names = Names { gate_up: &[LLAMA.gate_up_stack], ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    layers(file, &NAMES)
}

fn layers(file: &ConfigFile, names: &'static Names) -> Result<DecoderConfig> {
    let common = common(file)?.named(names);
    let heads = HeadsSpec { qkv_bias: file.required("attention_bias")?, ..common.heads };
    let (rope, mlp) = (RopeSpec { pairs: RopePairs::Neighbours, ..common.rope }, common.mlp);
    Ok(common.sequential(|_| [Heads(heads, Some(rope)), Mlp(mlp)]))
}
