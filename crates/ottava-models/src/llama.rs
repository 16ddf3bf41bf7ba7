//! Llama 2 and 3. Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783.

use crate::family::{Family, common};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    reward_model: Some("LlamaForSequenceClassification"),
    defaults: || json!({}),
    aliases: &[],
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.required("attention_bias")?;
    Ok(DecoderConfig { qkv_bias: bias, output_bias: bias, mlp_bias: file.required("mlp_bias")?, ..common(file)? })
}
