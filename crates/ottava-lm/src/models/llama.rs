//! Llama 2 and 3. Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783.

use super::family::{Family, common};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    reward_model: Some("LlamaForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.optional("attention_bias", false)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: file.optional("mlp_bias", false)?,
        ..common(file)?
    })
}
