//! Cohere's Command-R: LayerNorm without bias, attention and MLP that read one norm, interleaved rotary positions, a tied head and scaled
//! logits. Cohere 2024, "Command R", and `transformers`.

use crate::family::{Family, common};
use crate::layers::NormScope;
use crate::{ConfigFile, DecoderConfig, Positions};
use ottava_common::error::Result;
use ottava_tensor::ops::{NormKind, RopePairs};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "CohereForCausalLM",
    model_type: "cohere",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
        "tie_word_embeddings": true, "use_qk_norm": false,
    })
}

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
    let bias = file.required("attention_bias")?;
    Ok(DecoderConfig {
        qk_norm: file.required::<bool>("use_qk_norm")?.then_some(NormScope::Head),
        qkv_bias: bias,
        output_bias: bias,
        norm_eps: file.required("layer_norm_eps")?,
        tied: file.required("tie_word_embeddings")?,
        logit_scale: file.required("logit_scale")?,
        ..cohere(common(file)?)
    })
}
