//! Nemotron-H and Nemotron 3: a layer is one Mamba-2 layer, attention without rotary positions, an MLP with the squared ReLU, or experts with it. NVIDIA
//! 2025, arXiv:2504.03624 and arXiv:2512.20848.

use super::deepseek_v3::{CHOICE_BIAS, routing};
use crate::SublayerSpec::{Experts, Heads, Mamba, Mlp};
use crate::family::{Common, Family, common_with, ignore_router_logits, size, untrainable};
use crate::layer_set::type_of;
use crate::layers::{BranchNorms, ExpertInput, ExpertsSpec, HeadsSpec, LLAMA, MambaSpec, MlpSpec, Names, SharedExpert};
use crate::{BranchSpec, ConfigFile, DecoderConfig, LayerSpec, SublayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, SsdSpec};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "NemotronHForCausalLM",
    model_type: "nemotron_h",
    reward_model: None,
    defaults,
    aliases: &[
        ("layer_norm_epsilon", "rms_norm_eps"),
        ("layers_block_type", "layer_types"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_dt_limit", "time_step_limit"),
        ("mamba_n_groups", "n_groups"),
        ("num_local_experts", "n_routed_experts"),
    ],
    read,
};

fn defaults() -> Value {
    json!({
        "attention_bias": false, "conv_kernel": 4, "head_dim": 128, "hybrid_override_pattern": null, "intermediate_size": 21_504,
        "layer_types": null, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128, "max_position_embeddings": 4096,
        "mlp_bias": false, "mlp_hidden_act": "relu2", "moe_intermediate_size": 7688, "moe_latent_size": null,
        "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "n_groups": 8, "n_routed_experts": 8,
        "norm_topk_prob": true, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0,
        "ssm_state_size": 128, "time_step_limit": [0.0, "Infinity"], "topk_group": 1, "use_bias": false, "use_conv_bias": true,
    })
}

const UP: &str = LLAMA.gate_up[1];
/// The names of tensors. The sublayer of each layer has the same name.
static NAMES: Names = Names {
    embedding: "backbone.embeddings",
    blocks: "backbone.layers",
    attention_norms: BranchNorms::before("norm"),
    mlp_norms: BranchNorms::before("norm"),
    attention: "mixer",
    recurrent: "mixer",
    mlp: "mixer",
    gate_up: &[UP],
    gate_up_stack: UP,
    norm: "backbone.norm_f",
    ..LLAMA
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let kinds = kinds(file)?;
    let mut values = file.values().clone();
    values.insert("num_hidden_layers".into(), json!(kinds.len()));
    let file = &file.with_values(values);
    for (key, known) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        let name: String = file.required(key)?;
        if name != known {
            return Err(file.error(&format!("`{key}` is \"{name}\"; \"{known}\" is implemented for this family")));
        }
    }
    let mut common = common_with(file, Activation::Relu2, file.required("rms_norm_eps")?)?.named(&NAMES);
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "hidden_dropout"])?;
    // Attention has no rotary positions.
    common.model.ropes.clear();
    // Layers that predict further tokens.
    common.model.folder.carried = vec!["mtp.".into()];
    if file.required("mlp_bias")? && kinds.iter().any(|kind| matches!(kind, Kind::Experts)) {
        return Err(file.error("`mlp_bias` is true; biases of experts are not implemented for this family"));
    }
    let sublayers = Sublayers::read(file, &common)?;
    let layer = |kind: &Kind| LayerSpec::single(BranchSpec::new(NAMES.attention_norms, vec![sublayers.of(*kind)]));
    let layers = kinds.iter().map(layer).collect();
    let mut sizes = ignore_router_logits(file, DecoderConfig { layers, ..common.model })?;
    if file.optional("residual_in_fp32", false)? {
        sizes.folder.ignored.push("`residual_in_fp32` is ignored: the residual stream has the compute type".into());
    }
    Ok(sizes)
}

/// The kind of a layer.
#[derive(Clone, Copy)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

/// Returns the kind of each layer: a list of names, or a letter for each layer in older folders.
fn kinds(file: &ConfigFile) -> Result<Vec<Kind>> {
    let of = |name: &str| match name {
        "M" | "linear_attention" => Some(Kind::Mamba),
        "*" | "full_attention" => Some(Kind::Attention),
        "-" | "mlp" => Some(Kind::Mlp),
        "E" | "moe" => Some(Kind::Experts),
        _ => None,
    };
    let (key, names): (_, Vec<String>) = match file.nullable("layer_types")? {
        Some(list) => ("layer_types", list),
        None => match file.nullable::<String>("hybrid_override_pattern")? {
            Some(pattern) => ("hybrid_override_pattern", pattern.chars().map(String::from).collect()),
            None => {
                let text = "the keys `layers_block_type` and `hybrid_override_pattern` are missing; one of them names the kind of each layer";
                return Err(file.error(text));
            }
        },
    };
    let kind = |name: &String| {
        let text = || format!("`{key}` has \"{name}\"; mamba (M), attention (*), mlp (-) and moe (E) are implemented");
        of(type_of(name)).ok_or_else(|| file.error(&text()))
    };
    let kinds: Vec<Kind> = names.iter().map(kind).collect::<Result<_>>()?;
    // Files of transformers 5 lack the number.
    match file.optional("num_hidden_layers", kinds.len())? {
        layers if layers == kinds.len() => Ok(kinds),
        layers => Err(file.error(&format!("`{key}` has {} entries, and `num_hidden_layers` is {layers}", kinds.len()))),
    }
}

/// The sublayer of each kind.
struct Sublayers {
    mamba: MambaSpec,
    heads: HeadsSpec,
    mlp: MlpSpec,
    experts: ExpertsSpec,
}

impl Sublayers {
    fn read(file: &ConfigFile, common: &Common) -> Result<Sublayers> {
        let heads = SsdSpec {
            heads: size(file, "mamba_num_heads")?,
            groups: size(file, "n_groups")?,
            head_dim: size(file, "mamba_head_dim")?,
            state_dim: size(file, "ssm_state_size")?,
            dt_limits: file.limits("time_step_limit")?,
        };
        let (conv_bias, biases) = (file.required("use_conv_bias")?, [file.required("use_bias")?; 2]);
        let mamba = MambaSpec { conv_bias, biases, ..MambaSpec::new(heads, file.required("conv_kernel")?) };
        let bias = file.required("attention_bias")?;
        let heads = HeadsSpec { qkv_bias: bias, output_bias: bias, ..common.heads };
        let mlp = MlpSpec { bias: file.required("mlp_bias")?, ..common.mlp };
        Ok(Sublayers { mamba, heads, mlp, experts: experts(file)? })
    }

    fn of(&self, kind: Kind) -> SublayerSpec {
        match kind {
            Kind::Mamba => Mamba(self.mamba),
            Kind::Attention => Heads(self.heads, None),
            Kind::Mlp => Mlp(self.mlp),
            Kind::Experts => Experts(self.experts),
        }
    }
}

fn experts(file: &ConfigFile) -> Result<ExpertsSpec> {
    let hidden = size(file, "moe_shared_expert_intermediate_size")?;
    let shared = SharedExpert { name: "shared_experts", hidden, gate: None, is_in_block: false };
    let (count, hidden) = (file.required("n_routed_experts")?, size(file, "moe_intermediate_size")?);
    let input = file.nullable("moe_latent_size")?.map_or(ExpertInput::Tokens, ExpertInput::Latent);
    let spec = ExpertsSpec::new(count, hidden, Activation::Relu2, routing(file)?);
    Ok(ExpertsSpec { bias: Some(CHOICE_BIAS), shared: Some(shared), input, ..spec })
}
