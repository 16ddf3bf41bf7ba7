//! MiniMax-M2: one norm over all queries and one over all keys of a token, rotary positions in a part of each head, and experts with sigmoid scores.
//! MiniMax 2025, and `transformers`.

use super::mixtral::NAMES;
use crate::SublayerSpec::{Experts, Heads};
use crate::family::{Family, common, ignore_router_logits, softmax_routing, untrainable};
use crate::layers::{ChoiceBias, ExpertsSpec, HeadsSpec, NormScope};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_tensor::ops::{RouterScores, Routing};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "MiniMaxM2ForCausalLM",
    model_type: "minimax_m2",
    reward_model: None,
    defaults,
    aliases: &[("num_experts", "num_local_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "head_dim": 128, "max_position_embeddings": 196_608, "num_experts_per_tok": 8, "num_key_value_heads": 8, "num_local_experts": 256,
        "partial_rotary_factor": 1.0, "rope_theta": 5_000_000.0, "rotary_dim": null,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut common = common(&with_partial(file)?)?.named(&NAMES);
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "router_jitter_noise"])?;
    let heads = HeadsSpec { qk_norm: Some(NormScope::Projection), ..common.heads };
    let routing = Routing { scores: RouterScores::Sigmoid, normalise: Some(0.0), ..softmax_routing(file, false)? };
    let experts = ExpertsSpec {
        bias: Some(ChoiceBias::vector("e_score_correction_bias")),
        ..ExpertsSpec::new(file.required("num_local_experts")?, common.mlp.hidden, common.mlp.activation, routing)
    };
    let rope = Some(common.rope);
    ignore_router_logits(file, common.sequential(|_| [Heads(heads, rope), Experts(experts)]))
}

/// Returns `file` with `partial_rotary_factor` in place of `rotary_dim`, the number of rotated elements of a head.
fn with_partial(file: &ConfigFile) -> Result<ConfigFile> {
    let (rotated, head_dim): (Option<f64>, f64) = (file.nullable("rotary_dim")?, file.required("head_dim")?);
    let Some(rotated) = rotated.filter(|_| !file.has("partial_rotary_factor")) else { return Ok(file.clone()) };
    let mut values = file.values().clone();
    values.insert("partial_rotary_factor".into(), json!(rotated / head_dim));
    Ok(file.with_values(values))
}
