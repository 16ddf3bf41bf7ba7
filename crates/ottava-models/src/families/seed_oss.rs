//! Seed-OSS: Llama's blocks with biases of Q, K and V. ByteDance Seed 2025, and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, ignored_dropout};
use crate::layers::{HeadsSpec, MlpSpec};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "SeedOssForCausalLM",
    model_type: "seed_oss",
    reward_model: Some("SeedOssForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": true, "attention_out_bias": false, "head_dim": 128, "max_position_embeddings": 524_288, "mlp_bias": false,
        "num_key_value_heads": 8, "pad_token_id": 1,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut common = common(file)?;
    common.model.folder.untrainable.clear();
    common.model.folder.ignored = ignored_dropout(file, &["attention_dropout", "residual_dropout"])?;
    let heads = HeadsSpec {
        qkv_bias: file.required("attention_bias")?,
        output_bias: file.required("attention_out_bias")?,
        ..common.heads
    };
    let (rope, mlp) = (Some(common.rope), MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp });
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}
