//! Gemma 2: norms with the factor `1 + weight` before and after each sublayer, soft caps of scores and logits, a sliding window in every second
//! layer, and a scaled and tied embedding. Team Gemma 2024, arXiv:2408.00118.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, window_in};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, Names};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use ottava_tensor::ops::NormKind;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    reward_model: Some("Gemma2ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": null, "max_position_embeddings": 8192, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "tie_word_embeddings": true,
    })
}

static NAMES: Names = Names {
    attention_norms: BranchNorms::around("input_layernorm", "post_attention_layernorm"),
    mlp_norms: BranchNorms::around("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ..LLAMA
};

/// Applies the settings that Gemma 2 and Gemma 3 share.
pub(super) fn gemma(file: &ConfigFile, common: Common) -> Result<Common> {
    if file.optional("use_bidirectional_attention", false)? {
        return Err(file.error("`use_bidirectional_attention` is true; attention to later tokens is not implemented"));
    }
    let mut gemma = common.named(&NAMES);
    let (stream, bias) = (&mut gemma.model.stream, file.required("attention_bias")?);
    stream.norm.kind = NormKind::RmsPlusOne;
    gemma.model.embedding.scale = (stream.channels as f64).sqrt() as f32;
    gemma.model.head.cap = file.nullable("final_logit_softcapping")?;
    let scalar: f64 = file.required("query_pre_attn_scalar")?;
    gemma.heads = HeadsSpec { qkv_bias: bias, output_bias: bias, scale: Some(scalar.powf(-0.5)), ..gemma.heads };
    Ok(gemma)
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let gemma = gemma(file, common(file)?)?;
    let window = window_in(file, gemma.layers, LayerSet::AllButEvery(2))?;
    let heads = HeadsSpec { soft_cap: file.nullable("attn_logit_softcapping")?, ..gemma.heads };
    let (rope, mlp) = (Some(gemma.rope), gemma.mlp);
    Ok(gemma.sequential(|index| [Heads(HeadsSpec { window: window.at(index), ..heads }, rope), Mlp(mlp)]))
}
