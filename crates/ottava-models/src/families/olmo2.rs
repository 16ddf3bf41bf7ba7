//! OLMo 2: Llama's sublayers with a norm after each sublayer instead of before it. One norm covers all queries of a token, and one covers all keys.
//! OLMo Team 2025, arXiv:2501.00656.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, Names, NormScope};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    reward_model: Some("Olmo2ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({"attention_bias": false, "rms_norm_eps": 1e-5})
}

/// Llama's names, with norms after sublayers.
pub(super) static AFTER: Names = Names {
    attention_norms: BranchNorms::after("post_attention_layernorm"),
    mlp_norms: BranchNorms::after("post_feedforward_layernorm"),
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?.named(&AFTER);
    let heads = attention(file, common.heads)?;
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}

/// Adds OLMo's biases and norms to `heads`.
pub(super) fn attention(file: &ConfigFile, heads: HeadsSpec) -> Result<HeadsSpec> {
    let bias = file.required("attention_bias")?;
    Ok(HeadsSpec { qk_norm: Some(NormScope::Projection), qkv_bias: bias, output_bias: bias, ..heads })
}
