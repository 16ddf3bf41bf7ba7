//! Qwen3-Next: gated delta nets in most layers, and attention with a gated output in the others. Qwen Team 2025; Yang et al. 2024,
//! arXiv:2412.06464; Qiu et al. 2025, arXiv:2505.06708.

use crate::SublayerSpec::{Delta, Experts, Heads, Mlp};
use crate::family::{Common, Family, common, ignore_router_logits, routed_layers, size, softmax_routing};
use crate::layers::{DeltaNetSpec, ExpertsSpec, HeadsSpec, NormConfig, NormScope, ProjectionLayout, SharedExpert};
use crate::{ConfigFile, DecoderConfig, LayerSet, SublayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, DeltaSpec, NormKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    reward_model: Some("Qwen3NextForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "layer_types": null,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 32_768, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": true, "num_experts": 512, "num_experts_per_tok": 10, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25, "shared_expert_intermediate_size": 512,
    })
}

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let hybrid = Hybrid::read(file, ProjectionLayout::ByKeyHead)?;
    let experts = experts(file, hybrid.common.mlp.activation, file.required("norm_topk_prob")?)?;
    let (routed, mlp) = (routed_layers(file, hybrid.common.layers)?, hybrid.common.mlp);
    let sizes = hybrid.sequential(|index| if routed.contains(index) { Experts(experts) } else { Mlp(mlp) });
    ignore_router_logits(file, sizes)
}

/// Reads the experts of a layer. If `normalised`, the weights of the chosen experts sum to 1.
pub(super) fn experts(file: &ConfigFile, activation: Activation, normalised: bool) -> Result<ExpertsSpec> {
    let routing = softmax_routing(file, normalised)?;
    let (count, hidden) = (file.required("num_experts")?, file.required("moe_intermediate_size")?);
    let of_shared = file.required("shared_expert_intermediate_size")?;
    let shared =
        SharedExpert { name: "shared_expert", hidden: of_shared, gate: Some("shared_expert_gate"), is_in_block: false };
    Ok(ExpertsSpec { shared: Some(shared), ..ExpertsSpec::new(count, hidden, activation, routing) })
}

/// The parts of a model with gated delta nets and attention.
pub(super) struct Hybrid {
    pub(super) common: Common,
    delta: DeltaNetSpec,
    /// The layers with a gated delta net.
    recurrent: LayerSet,
}

impl Hybrid {
    /// Reads the parts. A folder stores the projections of gated delta nets in `layout`.
    ///
    /// Errors if the activation is not SiLU, which convolutions also have.
    pub(super) fn read(file: &ConfigFile, layout: ProjectionLayout) -> Result<Hybrid> {
        let mut common = common(file)?;
        if common.mlp.activation != Activation::SwiGlu {
            return Err(file.error("`hidden_act` is not \"silu\"; only convolutions with SiLU are implemented"));
        }
        let norm = &mut common.model.stream.norm;
        *norm = NormConfig { kind: NormKind::RmsPlusOne, ..*norm };
        let bias = file.required("attention_bias")?;
        let (qk_norm, output_gate) = (Some(NormScope::Head), true);
        common.heads = HeadsSpec { qk_norm, output_gate, qkv_bias: bias, output_bias: bias, ..common.heads };
        let heads = DeltaSpec {
            key_heads: size(file, "linear_num_key_heads")?,
            value_heads: size(file, "linear_num_value_heads")?,
            key_dim: size(file, "linear_key_head_dim")?,
            value_dim: size(file, "linear_value_head_dim")?,
        };
        let delta = DeltaNetSpec { heads, taps: file.required("linear_conv_kernel_dim")?, layout };
        let types = ["full_attention", "linear_attention"];
        let recurrent = match LayerSet::of_types(file, "layer_types", common.layers, types)? {
            Some(listed) => listed,
            None => by_interval(file)?,
        };
        Ok(Hybrid { common, delta, recurrent })
    }

    /// Returns the model with `mlp(index)` after the gated delta net or the attention of layer `index`.
    pub(super) fn sequential(self, mlp: impl Fn(usize) -> SublayerSpec) -> DecoderConfig {
        let Hybrid { common, delta, recurrent } = self;
        let (heads, rope) = (common.heads, Some(common.rope));
        let mixer = |index| if recurrent.contains(index) { Delta(delta) } else { Heads(heads, rope) };
        common.sequential(|index| [mixer(index), mlp(index)]).with_carried("mtp.")
    }
}

/// Returns all layers except the last of each group of `full_attention_interval` layers.
fn by_interval(file: &ConfigFile) -> Result<LayerSet> {
    match file.required("full_attention_interval")? {
        0 => {
            Err(file.error("`full_attention_interval` is 0; it is a number of layers, the last of which has attention"))
        }
        count => Ok(LayerSet::AllButEvery(count)),
    }
}
