//! The text model of Gemma 3: Gemma 2 with normalised queries and keys instead of soft caps. Five of six layers have a window, and their rotary
//! positions have a different base. Team Gemma 2025, arXiv:2503.19786.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common, window_in};
use crate::gemma2::gemma;
use crate::layers::{HeadsSpec, NormScope};
use crate::rope::NESTED;
use crate::{ConfigFile, DecoderConfig, LayerSet, RopeScaling, RopeSpec};
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
    let pattern: usize = file.required("sliding_window_pattern")?;
    if pattern == 0 {
        return Err(file.error("`sliding_window_pattern` is 0; it is a number of layers"));
    }
    // The rotary positions are read below, because `common` can read only one kind for all layers.
    let mut others = file.values().clone();
    for key in ["rope_parameters", "rope_scaling", "original_max_position_embeddings"] {
        others.remove(key);
    }
    let others = file.with_values(others);
    let mut gemma = gemma(file, common(&others)?)?;
    gemma.model.ropes = ropes(file, &others)?;
    let window = window_in(file, gemma.layers, LayerSet::AllButEvery(pattern))?;
    let Common { heads, rope, mlp, .. } = gemma;
    Ok(gemma.sequential(|index| {
        let heads = HeadsSpec { qk_norm: Some(NormScope::Head), window: window.at(index), ..heads };
        let rope = RopeSpec { rope: usize::from(window.layers.contains(index)), ..rope };
        [Heads(heads, Some(rope)), Mlp(mlp)]
    }))
}

/// Returns the rotary positions of the layers that see the whole context, and of the layers with a window. Keys of `rope_scaling` apply to the
/// layers that see the whole context, in addition to the keys of `rope_parameters`. If `rope_parameters` is one object for all layers, it is ignored,
/// as in transformers.
fn ropes(file: &ConfigFile, others: &ConfigFile) -> Result<Vec<RopeScaling>> {
    let [mut full, local] = match file.section("rope_parameters")? {
        Some(parameters) => [parameters.section(NESTED[0])?, parameters.section(NESTED[1])?],
        None => [None, None],
    };
    if let Some(scaling) = file.section("rope_scaling")? {
        let [had, has] = [full.as_ref(), Some(&scaling)].map(|section| section.map(stated_type).transpose());
        let (had, has) = (had?.flatten(), has?.flatten());
        let differ = had.as_deref().is_some_and(|had| had != "default" && has.as_deref().is_some_and(|has| has != had));
        let [theta, new_theta] =
            [full.as_ref(), Some(&scaling)].map(|section| section.and_then(|s| s.values().get("rope_theta")));
        if differ || (theta.is_some() && new_theta.is_some() && theta != new_theta) {
            return Err(
                file.error("`rope_scaling` and `rope_parameters` say different rotary positions; remove one of them")
            );
        }
        if has.is_some() && !scaling.has("rope_type") {
            return Err(
                scaling.error("the key `type` is not read for Gemma 3, neither by transformers; call it `rope_type`")
            );
        }
        let mut values = full.map(|full| full.values().clone()).unwrap_or_default();
        values.extend(scaling.values().clone());
        full = Some(scaling.with_values(values));
    }
    let of = |section: Option<ConfigFile>, theta: &str| {
        RopeScaling::of_section(others, section.as_ref(), file.required(theta)?)
    };
    Ok(vec![of(full, "rope_theta")?, of(local, "rope_local_base_freq")?])
}

/// Returns the type of rotary positions that a section names.
fn stated_type(section: &ConfigFile) -> Result<Option<String>> {
    section.optional("rope_type", section.optional("type", None)?)
}
