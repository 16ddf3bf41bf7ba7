//! Qwen3, dense: Llama's blocks with normalised queries and keys, and heads of a size of their own. Yang et al. 2025, arXiv:2505.09388.

use super::family::{Family, common, qwen_window};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;
use crate::layers::NormScope;

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    reward_model: Some("Qwen3ForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    let (window, local) = qwen_window(file, sizes.layers)?;
    dense(file, DecoderConfig { window, local, ..sizes })
}

/// The sizes with Qwen3's attention.
pub(super) fn dense(file: &ConfigFile, sizes: DecoderConfig) -> Result<DecoderConfig> {
    let bias = file.optional("attention_bias", false)?;
    // The default size of a head is 128, for any width of the residual stream.
    let head_dim = file.optional("head_dim", 128)?;
    Ok(DecoderConfig { head_dim, qk_norm: Some(NormScope::Head), qkv_bias: bias, output_bias: bias, ..sizes })
}
