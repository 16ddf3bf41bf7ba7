//! Mixtral: Mistral's blocks with mixtures of experts. Jiang et al. 2024, arXiv:2401.04088.

use super::family::{Family, common, ignore_router_logits, sliding_window, softmax_routing};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;
use crate::layers::{ExpertsConfig, LLAMA, Names};

pub(super) const FAMILY: Family = Family {
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    reward_model: Some("MixtralForSequenceClassification"),
    read,
};

static NAMES: Names = Names { mlp: "block_sparse_moe", gate_up: &["w1", "w3"], down: "w2", ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let jitter: f64 = file.optional("router_jitter_noise", 0.0)?;
    if jitter != 0.0 {
        return Err(file.error("`router_jitter_noise` is not 0; noise of routers is not implemented"));
    }
    let sizes = common(file)?;
    let count = file.required("num_local_experts")?;
    let experts = ExpertsConfig::new(count, sizes.hidden, softmax_routing(file, true)?);
    let sizes = DecoderConfig {
        norm_eps: file.optional("rms_norm_eps", 1e-5)?,
        window: sliding_window(file, None)?,
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
