//! Granite 4: Granite's factors, Mamba-2 layers, and attention in some layers, with or without rotary positions. Layers have an MLP, or experts beside an
//! MLP that all tokens share. Granite Team, IBM 2025, "Granite 4.0 Language Models", and `transformers`.

use super::bamba::{mamba, mamba_defaults, width};
use super::granite::scaled;
use super::granite_moe::{self, experts};
use crate::SublayerSpec::{Experts, Heads, Mamba, Mlp};
use crate::family::{Family, ignore_router_logits, size};
use crate::layers::{MlpSpec, Names};
use crate::{ConfigFile, DecoderConfig, LayerSet};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    reward_model: None,
    defaults,
    aliases: &[("layers_block_type", "layer_types")],
    read,
};

fn defaults() -> Value {
    let mut all = granite_moe::defaults();
    let own = json!({
        "intermediate_size": 11_008, "layer_types": null, "position_embedding_type": null, "shared_intermediate_size": 1024,
    });
    for more in [mamba_defaults(), own] {
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    }
    all
}

/// The names of a model with experts.
static WITH_EXPERTS: Names = Names { recurrent: "mamba", ..granite_moe::NAMES };
/// The names of a model whose layers have an MLP alone.
static DENSE: Names = Names { mlp: "shared_mlp", ..WITH_EXPERTS };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (mut common, heads) = scaled(file)?;
    let mamba = mamba(file, width(file, common.model.stream.channels)?, common.mlp.activation)?;
    let types = ["full_attention", "linear_attention"];
    let recurrent = LayerSet::of_types(file, "layer_types", common.layers, types)?.unwrap_or(LayerSet::All);
    let position: Option<String> = file.nullable("position_embedding_type")?;
    let rope = position.is_some_and(|position| position == "rope").then_some(common.rope);
    if rope.is_none() {
        common.model.ropes.clear();
    }
    let shared = size(file, "shared_intermediate_size")?;
    let (names, mlp) = match file.required("num_local_experts")? {
        0 => (&DENSE, Mlp(MlpSpec { hidden: shared, ..common.mlp })),
        _ => (&WITH_EXPERTS, Experts(experts(file, &common, shared)?)),
    };
    let mixer = |index| if recurrent.contains(index) { Mamba(mamba) } else { Heads(heads, rope) };
    ignore_router_logits(file, common.named(names).sequential(|index| [mixer(index), mlp]))
}
