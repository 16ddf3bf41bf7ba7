//! Cohere's Command-R: LayerNorm without bias, attention and MLP that read one norm, interleaved rotary positions, a tied head and scaled
//! logits. Cohere 2024, "Command R", and `transformers`.

use super::family::{Family, common};
use super::{ConfigFile, DecoderConfig, Positions};
use crate::error::Result;
use crate::layers::NormScope;
use ottava_tensor::ops::{NormKind, RopePairs};

pub(super) const FAMILY: Family =
    Family { architecture: "CohereForCausalLM", model_type: "cohere", reward_model: None, read };

/// A Command-R of these sizes.
pub fn cohere(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig {
        tied: true,
        norm: NormKind::Layer,
        positions: Positions::Rotary(RopePairs::Neighbours),
        parallel: true,
        logit_scale: 0.0625,
        ..sizes
    }
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let bias = file.optional("attention_bias", false)?;
    Ok(DecoderConfig {
        qk_norm: file.optional("use_qk_norm", false)?.then_some(NormScope::Head),
        qkv_bias: bias,
        output_bias: bias,
        max_positions: file.optional("max_position_embeddings", 8192)?,
        norm_eps: file.optional("layer_norm_eps", 1e-5)?,
        tied: file.optional("tie_word_embeddings", true)?,
        logit_scale: file.optional("logit_scale", 0.0625)?,
        ..cohere(common(file)?)
    })
}
