//! Hunyuan's dense models: Llama's blocks, whose queries and keys are rotated and then normalised per head. Tencent 2025, and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common};
use crate::layers::{HeadsSpec, LLAMA, Names, NormScope};
use crate::{ConfigFile, DecoderConfig, SublayerSpec};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "HunYuanDenseV1ForCausalLM",
    model_type: "hunyuan_v1_dense",
    reward_model: Some("HunYuanDenseV1ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({"attention_bias": false, "pad_token_id": 0, "rms_norm_eps": 1e-5})
}

static NAMES: Names = Names { head_norms: ["query_layernorm", "key_layernorm"], ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, attention) = attention(file)?;
    let mlp = common.mlp;
    Ok(common.sequential(|_| [attention, Mlp(mlp)]))
}

/// Returns the parts that Hunyuan's models share, and their attention.
pub(super) fn attention(file: &ConfigFile) -> Result<(Common, SublayerSpec)> {
    let common = common(&with_static_base(file)?)?.named(&NAMES);
    let bias = file.required("attention_bias")?;
    let qk_norm = Some(NormScope::Head);
    let heads = HeadsSpec { qk_norm, rotates_first: true, qkv_bias: bias, output_bias: bias, ..common.heads };
    let rope = Some(common.rope);
    Ok((common, Heads(heads, rope)))
}

/// Returns `file` with the base of rotary positions that the type "dynamic" with a constant `alpha` gives: `theta · alpha^(D / (D - 2))`. It does not
/// depend on the length of a sequence.
fn with_static_base(file: &ConfigFile) -> Result<ConfigFile> {
    let keys = ["rope_scaling", "rope_parameters"];
    let sections = keys.map(|key| file.section(key));
    for section in sections {
        let Some(section) = section? else { continue };
        let name: String = section.optional("rope_type", section.optional("type", String::new())?)?;
        let alpha: Option<f64> = section.optional("alpha", None)?;
        let Some(alpha) = alpha.filter(|alpha| name == "dynamic" && *alpha != 0.0) else { continue };
        let (channels, heads): (usize, usize) = (file.required("hidden_size")?, file.required("num_attention_heads")?);
        let dim = file.nullable("head_dim")?.unwrap_or(channels.checked_div(heads).unwrap_or(0)) as f64;
        let theta: f64 = section.optional("rope_theta", file.required("rope_theta")?)?;
        let mut values = file.values().clone();
        keys.iter().for_each(|key| drop(values.remove(*key)));
        values.insert(
            keys[1].into(),
            json!({"rope_type": "default", "rope_theta": theta * alpha.powf(dim / (dim - 2.0))}),
        );
        return Ok(file.with_values(values));
    }
    Ok(file.clone())
}
