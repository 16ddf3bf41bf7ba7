//! Mixtral: Mistral's blocks with mixtures of experts. Jiang et al. 2024, arXiv:2401.04088.

use crate::family::{Family, common, ignore_router_logits, sliding_window, softmax_routing, untrainable};
use crate::layers::{ExpertsConfig, LLAMA, Names};
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

static NAMES: Names = Names { mlp: "block_sparse_moe", gate_up: &["w1", "w3"], down: "w2", ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = common(file)?;
    let count = file.required("num_local_experts")?;
    let experts = ExpertsConfig::new(count, sizes.hidden, softmax_routing(file, true)?);
    let sizes = DecoderConfig {
        window: sliding_window(file)?,
        untrainable: untrainable(file, &["attention_dropout", "router_jitter_noise"])?,
        experts: Some(experts),
        names: &NAMES,
        ..sizes
    };
    ignore_router_logits(file, sizes)
}

/// The sizes with Mixtral's names.
pub fn mixtral(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig { names: &NAMES, ..sizes }
}
