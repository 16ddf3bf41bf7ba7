//! Phi-3 and Phi-4: Llama's blocks with Q, K and V, and gate and up, in one tensor each; long contexts by LongRoPE; Phi-4-mini rotates a
//! part of each head. Abdin et al. 2024, arXiv:2404.14219 and arXiv:2412.08905.

use super::family::{Family, common, sliding_window};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;
use crate::layers::{LLAMA, Names};

pub(super) const FAMILY: Family = Family {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    reward_model: Some("Phi3ForSequenceClassification"),
    read,
};

static NAMES: Names = Names { qkv: &[LLAMA.qkv_stack], gate_up: &[LLAMA.gate_up_stack], ..LLAMA };

/// A Phi-3 of these sizes.
pub fn phi3(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig { names: &NAMES, ..sizes }
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    for key in ["resid_pdrop", "embd_pdrop"] {
        let dropout: f64 = file.optional(key, 0.0)?;
        if dropout != 0.0 {
            return Err(file.error(&format!("`{key}` is not 0; dropout is not implemented")));
        }
    }
    // This key replaces that of `rope_parameters`, even if only its default is known.
    let mut values = file.values().clone();
    values.entry("original_max_position_embeddings").or_insert(4096.into());
    let sizes = common(&file.with_values(values))?;
    Ok(DecoderConfig {
        max_positions: file.optional("max_position_embeddings", 4096)?,
        norm_eps: file.optional("rms_norm_eps", 1e-5)?,
        window: sliding_window(file, None)?,
        ..phi3(sizes)
    })
}
