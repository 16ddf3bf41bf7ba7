//! Qwen2 and Qwen2.5: Llama's blocks with biases on queries, keys and values. Yang et al. 2024, arXiv:2407.10671.

use super::family::{Family, common};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;

pub(super) const FAMILY: Family = Family { architecture: "Qwen2ForCausalLM", model_type: "qwen2", read };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let uses_window = file.optional("use_sliding_window", false)?;
    let window = file.optional("sliding_window", None)?.filter(|_| uses_window);
    Ok(DecoderConfig { qkv_bias: true, window, ..common(file)? })
}
