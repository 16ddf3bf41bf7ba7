//! Llama 2 and 3. Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common};
use crate::layers::{HeadsSpec, MlpSpec};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    reward_model: Some("LlamaForSequenceClassification"),
    defaults: || json!({"attention_bias": false, "mlp_bias": false}),
    aliases: &[],
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, bias) = (common(file)?, file.required("attention_bias")?);
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let mlp = MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp };
    let rope = Some(common.rope);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}
