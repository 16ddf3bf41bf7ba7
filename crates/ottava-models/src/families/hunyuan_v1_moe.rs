//! Hunyuan-A13B: the attention of Hunyuan's dense models, and experts with a shared expert. Tencent 2025, and `transformers`.

use super::hunyuan_v1_dense::attention;
use crate::SublayerSpec::Experts;
use crate::family::{Family, ignore_router_logits};
use crate::layers::{ExpertsSpec, SharedExpert};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::{RouterScores, Routing};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "HunYuanMoEV1ForCausalLM",
    model_type: "hunyuan_v1_moe",
    reward_model: Some("HunYuanMoEV1ForSequenceClassification"),
    defaults,
    aliases: &[("num_local_experts", "num_experts"), ("num_experts_per_tok", "moe_topk")],
    read,
};

fn defaults() -> Value {
    json!({"attention_bias": false, "moe_topk": 1, "num_experts": 1, "pad_token_id": 0, "rms_norm_eps": 1e-5})
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (common, attention) = attention(file)?;
    let count: usize = file.required("num_experts")?;
    let chosen = of_layers(file, "moe_topk", common.layers)?;
    let (hidden, activation) = (common.mlp.hidden, common.mlp.activation);
    let sizes = common.sequential(|index| {
        let routing = Routing {
            chosen: chosen[index],
            scores: RouterScores::Softmax,
            normalise: Some(0.0),
            scale: 1.0,
            groups: None,
        };
        let experts = ExpertsSpec {
            router: "gate.wg",
            shared: Some(SharedExpert { name: "shared_mlp", is_in_block: false, hidden, gate: None }),
            ..ExpertsSpec::new(count, hidden, activation, routing)
        };
        [attention, Experts(experts)]
    });
    ignore_router_logits(file, sizes)
}

/// Returns a number for each layer: `key` is one number for all layers, or a list.
fn of_layers(file: &ConfigFile, key: &str, layers: usize) -> Result<Vec<usize>> {
    let numbers = match file.required::<Value>(key)? {
        Value::Array(_) => file.required(key)?,
        _ => vec![file.required(key)?; layers],
    };
    match numbers.len() < layers {
        true => {
            let entries = numbers.len();
            Err(file.error(&format!("`{key}` has {entries} entries, and `num_hidden_layers` is {layers}")))
        }
        false => Ok(numbers),
    }
}
