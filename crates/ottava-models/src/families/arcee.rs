//! Arcee's AFM: Llama's blocks with a squared ReLU instead of a gate. Arcee AI 2025, and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common_with};
use crate::layers::{HeadsSpec, LLAMA, MlpSpec, Names};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::Activation;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "ArceeForCausalLM",
    model_type: "arcee",
    reward_model: Some("ArceeForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "hidden_act": "relu2", "max_position_embeddings": 4096, "mlp_bias": false, "rms_norm_eps": 1e-5,
    })
}

const UP: &str = LLAMA.gate_up[1];
static NAMES: Names = Names { gate_up: &[UP], gate_up_stack: UP, ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let name: String = file.required("hidden_act")?;
    if name != "relu2" {
        return Err(file.error(&format!("`hidden_act` is \"{name}\"; \"relu2\" is implemented for this family")));
    }
    let common = common_with(file, Activation::Relu2, file.required("rms_norm_eps")?)?.named(&NAMES);
    let bias = file.required("attention_bias")?;
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let (rope, mlp) = (Some(common.rope), MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp });
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}
