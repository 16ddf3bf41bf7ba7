//! ERNIE 4.5 without experts: Llama's blocks with rotary positions of neighbouring elements. Baidu 2025, and `transformers`.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common};
use crate::layers::{HeadsSpec, MlpSpec};
use crate::{ConfigFile, DecoderConfig, RopeSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::RopePairs;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Ernie4_5ForCausalLM",
    model_type: "ernie4_5",
    reward_model: None,
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": true, "use_bias": false,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, bias) = (common(file)?, file.required("use_bias")?);
    let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
    let rope = RopeSpec { pairs: RopePairs::Neighbours, ..common.rope };
    let mlp = MlpSpec { bias, ..common.mlp };
    Ok(common.sequential(|_| [Heads(heads, Some(rope)), Mlp(mlp)]))
}
