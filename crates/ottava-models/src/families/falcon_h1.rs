//! Falcon-H1: a Mamba-2 layer and attention read the same norm in each layer, and parts of a layer have constant factors. TII 2025, arXiv:2507.22448.

use super::bamba::{NAMES, mamba, mamba_defaults, width};
use crate::SublayerSpec::{Heads, Mamba, Mlp};
use crate::family::{Family, common, size};
use crate::layers::{HeadsSpec, MambaSpec, MlpSpec};
use crate::{BranchSpec, ConfigFile, DecoderConfig, LayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::GateOrder;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "FalconH1ForCausalLM",
    model_type: "falcon_h1",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    let mut all = mamba_defaults();
    let own = json!({
        "attention_bias": false, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "embedding_multiplier": 1.0,
        "key_multiplier": 1.0, "lm_head_multiplier": 1.0, "mamba_d_ssm": 1024, "mamba_norm_before_gate": true, "mamba_rms_norm": false,
        "max_position_embeddings": 8192, "mlp_bias": false, "mlp_multipliers": [1.0, 1.0], "num_key_value_heads": 8, "projectors_bias": false,
        "rms_norm_eps": 1e-5, "ssm_in_multiplier": 1.0, "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0], "ssm_out_multiplier": 1.0,
    });
    all.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
    all
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut common = common(file)?.named(&NAMES);
    common.model.embedding.scale = file.required("embedding_multiplier")?;
    common.model.head.scale = file.required("lm_head_multiplier")?;
    let (mamba, of_mamba) =
        (state_space(file, common.model.stream.channels, common.mlp)?, file.required("ssm_out_multiplier")?);
    let (heads, of_heads) = heads(file, common.heads)?;
    let [gate_factor, of_mlp]: [f32; 2] = file.required("mlp_multipliers")?;
    let mlp = MlpSpec { bias: file.required("mlp_bias")?, gate_factor, ..common.mlp };
    let mixers = BranchSpec {
        factors: vec![of_mamba, of_heads],
        ..BranchSpec::new(NAMES.attention_norms, vec![Mamba(mamba), Heads(heads, Some(common.rope))])
    };
    let mlp = BranchSpec { factors: vec![of_mlp], ..BranchSpec::new(NAMES.mlp_norms, vec![Mlp(mlp)]) };
    let layer = LayerSpec::of(vec![mixers, mlp]);
    Ok(DecoderConfig { layers: vec![layer; common.layers], ..common.model })
}

/// Reads the Mamba-2 layer. The factor of its operand is a part of the factors of its projection.
fn state_space(file: &ConfigFile, channels: usize, mlp: MlpSpec) -> Result<MambaSpec> {
    let width = match file.nullable::<usize>("mamba_d_ssm")? {
        Some(_) => size(file, "mamba_d_ssm")?,
        None => width(file, channels)?,
    };
    let mamba = mamba(file, width, mlp.activation)?;
    let of_operand = operand_factor(file, "ssm_in_multiplier", "mamba_proj_bias")?;
    let factors = file.required::<[f32; 5]>("ssm_multipliers")?.map(|factor| factor * of_operand);
    let order = match file.required("mamba_norm_before_gate")? {
        true => GateOrder::AfterNorm,
        false => GateOrder::BeforeNorm,
    };
    let norm = file.required::<bool>("mamba_rms_norm")?.then_some(order);
    let biases = [mamba.biases[0], file.required("projectors_bias")?];
    Ok(MambaSpec { norm, factors, biases, ..mamba })
}

/// Reads attention and the factor of its output. The factor `f` of its operand multiplies queries, keys and values, so it multiplies scores by `f²` and
/// the output by `f`. The factor of keys multiplies scores.
fn heads(file: &ConfigFile, heads: HeadsSpec) -> Result<(HeadsSpec, f32)> {
    let (of_operand, of_keys) =
        (operand_factor(file, "attention_in_multiplier", "attention_bias")?, file.required::<f64>("key_multiplier")?);
    let scale = (heads.head_dim as f64).sqrt().recip() * f64::from(of_operand).powi(2) * of_keys;
    let (bias, of_output) = (file.required("attention_bias")?, file.required::<f32>("attention_out_multiplier")?);
    Ok((HeadsSpec { qkv_bias: bias, output_bias: bias, scale: Some(scale), ..heads }, of_operand * of_output))
}

/// Returns the factor of an operand under `key`, which also multiplies the products with the operand.
///
/// Errors if the key `bias` adds biases to these products, which the factor does not multiply.
fn operand_factor(file: &ConfigFile, key: &str, bias: &str) -> Result<f32> {
    let factor = file.required(key)?;
    match factor != 1.0 && file.required(bias)? {
        true => {
            Err(file.error(&format!("`{bias}` is true and `{key}` is {factor}; together they are not implemented")))
        }
        false => Ok(factor),
    }
}
