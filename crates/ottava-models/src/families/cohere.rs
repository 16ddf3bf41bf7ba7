//! Cohere's Command-R: LayerNorm without bias, attention and MLP that read the same norm, interleaved rotary positions, a tied head and scaled
//! logits. Cohere 2024, "Command R", and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Common, Family, common};
use crate::layers::{HeadsSpec, NormConfig, NormScope};
use crate::{ConfigFile, DecoderConfig, LayerSpec, RopeSpec};
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
        "attention_bias": false, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
        "tie_word_embeddings": true, "use_qk_norm": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (Common { mut model, layers, heads, rope, mlp }, bias) = (common(file)?, file.required("attention_bias")?);
    stream(file, &mut model)?;
    let qk_norm = file.required::<bool>("use_qk_norm")?.then_some(NormScope::Head);
    let heads = HeadsSpec { qk_norm, qkv_bias: bias, output_bias: bias, ..heads };
    let rope = RopeSpec { pairs: RopePairs::Neighbours, ..rope };
    let layer = LayerSpec::parallel(model.stream.names, [Heads(heads, Some(rope)), Mlp(mlp)]);
    Ok(DecoderConfig { layers: vec![layer; layers], ..model })
}

/// Sets Cohere's norms and the factor of logits.
pub(super) fn stream(file: &ConfigFile, model: &mut DecoderConfig) -> Result<()> {
    model.stream.norm = NormConfig { kind: NormKind::Layer, bias: false, eps: file.required("layer_norm_eps")? };
    model.head.scale = file.required("logit_scale")?;
    Ok(())
}
