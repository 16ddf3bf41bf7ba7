//! Ranks that divide data, layers, sequences and heads of recurrent layers train as one rank does, up to rounding.

use crate::parallel::divided::{CODES, F32, Fault, Setup, adapters, apart, llama, train};
use crate::parallel::mesh::distance;
use crate::setup::config;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::recompute::Recompute;
use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::plan::MemoryPlan;
use serde_json::{Value, json};

/// Returns models with gated delta nets and with Mamba-2 layers. Of the former, projections are by key heads or flat, values are larger than keys, and
/// value heads share key heads. Of the latter, a state space is beside attention or alone in its layer, and experts read a latent.
fn models() -> [(&'static str, Value); 4] {
    let of = |architecture: &str| {
        llama(json!({
            "architectures": [architecture], "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "mlp_only_layers": [0, 1],
        }))
    };
    let falcon = llama(json!({
        "architectures": ["FalconH1ForCausalLM"], "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_d_state": 6, "mamba_rms_norm": true, "mamba_norm_before_gate": false, "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.8],
        "mlp_multipliers": [0.9, 1.5], "attention_out_multiplier": 1.3,
    }));
    let nemotron = llama(json!({
        "architectures": ["NemotronHForCausalLM"], "head_dim": 16, "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "mamba_num_heads": 8,
        "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_latent_size": 40, "moe_shared_expert_intermediate_size": 48,
    }));
    let delta = [("qwen3-next", of("Qwen3NextForCausalLM")), ("qwen3-5", of("Qwen3_5ForCausalLM"))];
    [delta[0].clone(), delta[1].clone(), ("falcon-h1", falcon), ("nemotron-h", nemotron)]
}

#[test]
fn ranks_of_every_axis_train_as_one_rank() {
    for (name, keys) in models() {
        for (mesh, zero) in [
            ([1, 1, 1, 2], Zero::Nothing),
            ([2, 1, 1, 1], Zero::OptimizerStates),
            ([1, 2, 1, 1], Zero::Nothing),
            ([2, 1, 1, 2], Zero::Weights),
            ([1, 1, 2, 1], Zero::Nothing),
            ([2, 1, 2, 1], Zero::OptimizerStates),
            ([1, 1, 2, 2], Zero::Nothing),
            // Each key head, and each group of heads, is sent to two ranks.
            ([1, 1, 4, 1], Zero::Nothing),
        ] {
            let mut alone = Setup { documents: true, ..Setup::new(keys.clone(), RecipeName::Fp32) };
            alone.mesh.zero = zero;
            let (apart, tensor) = apart(&alone, mesh);
            assert!(apart < F32, "{name} on {mesh:?}, {zero:?}: {tensor} is {apart:.1e} apart");
        }
    }
}

#[test]
fn adapters_train_as_on_one_rank() {
    for (name, keys) in models() {
        let mut alone = Setup::new(keys, RecipeName::Fp32);
        alone.mesh.sizes.lora = adapters(false);
        for mesh in [[1, 1, 1, 2], [1, 1, 2, 1]] {
            let (apart, tensor) = apart(&alone, mesh);
            assert!(apart < F32, "{name} on {mesh:?}: {tensor} is {apart:.1e} apart");
        }
    }
}

#[test]
fn recomputation_on_divided_sequences_trains_as_one_rank() {
    for recompute in Recompute::ALL {
        for (name, keys) in models() {
            let mut alone = Setup { documents: true, ..Setup::new(keys, RecipeName::Fp32) };
            alone.mesh.memory.recompute = recompute;
            let (apart, tensor) = apart(&alone, [1, 1, 2, 1]);
            assert!(apart < F32, "{name}, {}: {tensor} is {apart:.1e} apart", recompute.as_str());
        }
    }
}

/// Without attention, only recurrent layers exchange tokens for heads.
#[test]
fn faults_of_the_exchange_are_found() {
    for (name, mut keys) in models().into_iter().skip(1).step_by(2) {
        match name {
            "qwen3-5" => keys["layer_types"] = json!(["linear_attention", "linear_attention"]),
            _ => keys["hybrid_override_pattern"] = json!("M-M-"),
        }
        let alone = Setup::new(keys, RecipeName::Fp32);
        let expected = train(&alone);
        for fault in [Fault::MissingExchange, Fault::SwappedTokens] {
            let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..alone.on([1, 1, 2, 1]) }));
            assert!(apart > CODES, "{name}, {fault:?}: {apart:.1e}");
        }
    }
}

/// Each rank has whole heads.
#[test]
fn ranks_that_cannot_divide_a_layer_are_refused() {
    for (name, keys) in models() {
        let error = |[context, tensor]: [usize; 2]| {
            let mut run = RunConfig::default();
            run.data.max_length = 32;
            (run.parallel.context, run.parallel.tensor) = (context, tensor);
            let plan = MemoryPlan::new(&ResolvedConfig::fastest(&run), &config(keys.clone()), &Device::Cpu);
            plan.expect_err("it is refused").to_string()
        };
        let [context, tensor] = [[16, 1], [1, 4]].map(error);
        let (heads, groups) = match name {
            "qwen3-next" | "qwen3-5" => ("`model.layers.0.linear_attn` has 4 value heads", "2 key heads"),
            "falcon-h1" => ("`model.layers.0.mamba` has 8 heads", "2 groups of heads"),
            _ => ("`backbone.layers.0.mixer` has 8 heads", "2 groups of heads"),
        };
        assert!(context.contains(&format!("{heads}, which 16 ranks cannot divide")), "{name}: {context}");
        assert!(context.contains("set `parallel.context` to a divisor of"), "{name}: {context}");
        assert!(tensor.contains(&format!("{groups}, which 4 ranks cannot divide")), "{name}: {tensor}");
    }
}
