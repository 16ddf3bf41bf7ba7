//! Mistral: Llama's blocks; early versions attend to a sliding window. Jiang et al. 2023, arXiv:2310.06825.

use super::family::{Family, common, sliding_window};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    reward_model: Some("MistralForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    Ok(DecoderConfig { window: sliding_window(file, Some(4096))?, ..common(file)? })
}
