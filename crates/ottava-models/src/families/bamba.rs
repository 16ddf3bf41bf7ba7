//! Bamba: Mamba-2 layers, and attention in some layers. IBM, Princeton, CMU and UIUC 2024; Dao and Gu 2024, arXiv:2405.21060.

use crate::SublayerSpec::{Heads, Mamba, Mlp};
use crate::family::{Family, common, size};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, MambaSpec, MlpSpec, Names};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, SsdSpec};
use serde_json::{Value, json};

pub(super) const FAMILY: Family =
    Family { architecture: "BambaForCausalLM", model_type: "bamba", reward_model: None, defaults, aliases: &[], read };

fn defaults() -> Value {
    let mut all = mamba_defaults();
    let own = json!({
        "attention_bias": false, "attn_layer_indices": null, "max_position_embeddings": 262_144, "mlp_bias": false, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    });
    all.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    all
}

/// Returns the defaults of the keys that [`mamba`] reads.
pub(super) fn mamba_defaults() -> Value {
    json!({
        "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 128, "mamba_proj_bias": false, "time_step_limit": [0.0, "Infinity"],
    })
}

/// The names of Bamba and of Falcon-H1.
pub(super) static NAMES: Names = Names {
    mlp_norms: BranchNorms::before("pre_ff_layernorm"),
    recurrent: "mamba",
    mlp: "feed_forward",
    norm: "model.final_layernorm",
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let common = common(file)?.named(&NAMES);
    let mamba = mamba(file, width(file, common.model.stream.channels)?, common.mlp.activation)?;
    let bias = file.required("attention_bias")?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let (rope, mlp) = (Some(common.rope), MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp });
    let attention: Vec<usize> = file.nullable("attn_layer_indices")?.unwrap_or_default();
    let mixer = |index| if attention.contains(&index) { Heads(heads, rope) } else { Mamba(mamba) };
    Ok(common.sequential(|index| [mixer(index), Mlp(mlp)]))
}

/// Returns the width of the state space in a residual stream of `channels`.
pub(super) fn width(file: &ConfigFile, channels: usize) -> Result<usize> {
    Ok(size(file, "mamba_expand")?.saturating_mul(channels))
}

/// Reads a Mamba-2 layer whose state space has this `width`.
///
/// Errors if the activation is not SiLU, or if the heads do not have this width together.
pub(super) fn mamba(file: &ConfigFile, width: usize, activation: Activation) -> Result<MambaSpec> {
    if activation != Activation::SwiGlu {
        return Err(file.error("`hidden_act` is not \"silu\"; only convolutions with SiLU are implemented"));
    }
    let heads = size(file, "mamba_n_heads")?;
    let head_dim = match file.required::<Value>("mamba_d_head")? {
        Value::String(auto) if auto == "auto" => width.checked_div(heads).unwrap_or(0),
        _ => size(file, "mamba_d_head")?,
    };
    if heads.saturating_mul(head_dim) != width {
        let text = format!(
            "`mamba_n_heads` {heads} times `mamba_d_head` {head_dim} is not {width}, the width of the state space"
        );
        return Err(file.error(&text));
    }
    let heads = SsdSpec {
        heads,
        groups: size(file, "mamba_n_groups")?,
        head_dim,
        state_dim: size(file, "mamba_d_state")?,
        dt_limits: file.limits("time_step_limit")?,
    };
    let (conv_bias, biases) = (file.required("mamba_conv_bias")?, [file.required("mamba_proj_bias")?; 2]);
    Ok(MambaSpec { conv_bias, biases, ..MambaSpec::new(heads, file.required("mamba_d_conv")?) })
}
