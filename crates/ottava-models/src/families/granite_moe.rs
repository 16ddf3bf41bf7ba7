//! Granite with mixtures of experts, and with an MLP beside the mixture that all tokens share. A folder has one tensor for all experts of a layer.
//! Granite Team, IBM 2024, "Granite 3.0 Language Models", and `transformers`.

use super::granite::{self, scaled};
use crate::SublayerSpec::{Experts, Heads};
use crate::family::{Common, Family, ignore_router_logits, softmax_routing};
use crate::layers::{ExpertStacks, ExpertsSpec, LLAMA, Names, SharedExpert};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use ottava_recipe::param::StackOrder;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GraniteMoeForCausalLM",
    model_type: "granitemoe",
    reward_model: None,
    defaults,
    aliases: &[],
    read: |file| read(file, 0),
};

/// Granite with an MLP that all tokens share.
pub(super) const SHARED: Family = Family {
    architecture: "GraniteMoeSharedForCausalLM",
    model_type: "granitemoeshared",
    defaults: || {
        let mut all = defaults();
        all["shared_intermediate_size"] = json!(0);
        all
    },
    read: |file| read(file, file.required("shared_intermediate_size")?),
    ..FAMILY
};

pub(super) fn defaults() -> Value {
    let mut all = granite::defaults();
    all.as_object_mut().expect("an object").remove("mlp_bias");
    (all["num_local_experts"], all["num_experts_per_tok"]) = (json!(8), json!(2));
    all
}

pub(super) const NAMES: Names = Names {
    mlp: "block_sparse_moe",
    gate_up: &["input_linear"],
    gate_up_stack: "input_linear",
    down: "output_linear",
    ..LLAMA
};

fn read(file: &ConfigFile, shared: usize) -> Result<DecoderConfig> {
    let (common, heads) = scaled(file)?;
    let (experts, rope) = (experts(file, &common, shared)?, Some(common.rope));
    let sizes = common.named(&NAMES).sequential(|_| [Heads(heads, rope), Experts(experts)]);
    ignore_router_logits(file, sizes)
}

/// Reads the experts of a layer, beside an MLP of the width `shared` that all tokens share. 0 is no such MLP.
pub(super) fn experts(file: &ConfigFile, common: &Common, shared: usize) -> Result<ExpertsSpec> {
    // The softmax over the chosen logits equals the softmax over all logits, divided by its sum over the chosen experts.
    let routing = softmax_routing(file, true)?;
    let (count, activation) = (file.required("num_local_experts")?, common.mlp.activation);
    let of_shared = SharedExpert { name: "shared_mlp", is_in_block: true, hidden: shared, gate: None };
    Ok(ExpertsSpec {
        router: "router.layer",
        stacks: Some(ExpertStacks {
            names: ["input_linear.weight", "output_linear.weight"],
            order: StackOrder::OutputsFirst,
        }),
        shared: (shared > 0).then_some(of_shared),
        ..ExpertsSpec::new(count, common.mlp.hidden, activation, routing)
    })
}
