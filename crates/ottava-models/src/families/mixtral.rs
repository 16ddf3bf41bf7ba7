//! Mixtral: Mistral's blocks with mixtures of experts. Jiang et al. 2024, arXiv:2401.04088.

use crate::SublayerSpec::{Experts, Heads};
use crate::family::{Family, common, ignore_router_logits, softmax_routing, untrainable, window};
use crate::layers::{ExpertsSpec, HeadsSpec, LLAMA, Names};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    reward_model: Some("MixtralForSequenceClassification"),
    defaults,
    aliases: &[("num_experts", "num_local_experts")],
    read,
};

fn defaults() -> Value {
    json!({
        "max_position_embeddings": 131_072, "num_experts_per_tok": 2, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": null,
    })
}

pub(super) static NAMES: Names = Names { mlp: "block_sparse_moe", gate_up: &["w1", "w3"], down: "w2", ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut common = common(file)?.named(&NAMES);
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "router_jitter_noise"])?;
    let heads = HeadsSpec { window: window(file)?.size, ..common.heads };
    let (count, routing) = (file.required("num_local_experts")?, softmax_routing(file, true)?);
    let experts = ExpertsSpec::new(count, common.mlp.hidden, common.mlp.activation, routing);
    let rope = Some(common.rope);
    ignore_router_logits(file, common.sequential(|_| [Heads(heads, rope), Experts(experts)]))
}
