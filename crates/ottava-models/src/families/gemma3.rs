//! The text model of Gemma 3: Gemma 2 with normalised queries and keys instead of soft caps. Five of six layers have a window, and their rotary
//! positions have a different base. Team Gemma 2025, arXiv:2503.19786.

use super::gemma2::gemma;
use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, local_layers, window_in};
use crate::layers::{HeadsSpec, NormScope};
use crate::rope::{by_layer_types, without_ropes};
use crate::{ConfigFile, DecoderConfig, RopeSpec};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    reward_model: Some("Gemma3TextForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": null, "max_position_embeddings": 131_072,
        "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": true,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let local = local_layers(file, file.required("sliding_window_pattern")?)?;
    let others = without_ropes(file);
    let mut gemma = gemma(file, common(&others)?)?;
    gemma.model.ropes = by_layer_types(file, &others, ["rope_theta", "rope_local_base_freq"])?;
    let window = window_in(file, gemma.layers, local)?;
    let Common { heads, rope, mlp, .. } = gemma;
    Ok(gemma.sequential(|index| {
        let heads = HeadsSpec { qk_norm: Some(NormScope::Head), window: window.at(index), ..heads };
        let rope = RopeSpec { rope: usize::from(window.layers.contains(index)), ..rope };
        [Heads(heads, Some(rope)), Mlp(mlp)]
    }))
}
