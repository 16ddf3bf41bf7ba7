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

static NAMES: Names = Names {
    attention_norms: BranchNorms::after("post_attention_layernorm"),
    mlp_norms: BranchNorms::after("post_feedforward_layernorm"),
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, bias) = (common(file)?.named(&NAMES), file.required("attention_bias")?);
    let qk_norm = Some(NormScope::Projection);
    let heads = HeadsSpec { qk_norm, qkv_bias: bias, output_bias: bias, ..common.heads };
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}
