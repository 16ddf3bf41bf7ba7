//! Ranks of tensor parallelism also divide the experts of mixtures, and train as one rank does, up to rounding.

use crate::parallel::divided::{CODES, F32, Fault, Setup, adapters, train};
use crate::parallel::expert_ranks::{apart_on, f32_setup, llama4, on, routed};
use crate::parallel::mesh::{MeshRank, distance, rows};
use crate::setup::on_ranks;
use ottava_models::layers::{RouterLossFactors, SharedExpert};
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::storage::Storage;
use ottava_tensor::DType;
use serde_json::{Value, json};

/// Returns models of four experts. Each token chooses two of them. The models differ in the other parts: none, a shared expert with a factor by
/// token, norms of heads, biases with sinks, weights of choices that multiply inputs, and latent attention with a plain shared expert after a dense layer.
pub fn families() -> [(&'static str, Value); 8] {
    let experts = |name, more: Value| (name, routed_as(name, more));
    [
        experts("mixtral", json!({"num_local_experts": 4, "intermediate_size": 96})),
        experts("qwen2_moe", json!({"shared_expert_intermediate_size": 64})),
        experts("qwen3_moe", json!({})),
        experts("olmoe", json!({"intermediate_size": 64})),
        experts("gpt_oss", json!({"num_local_experts": 4, "intermediate_size": 64, "sliding_window": 7})),
        experts("llama4_text", llama4(json!({}))),
        experts(
            "deepseek_v32",
            json!({
                "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts": null, "n_group": 2, "topk_group": 1,
            }),
        ),
        experts(
            "deepseek_v2",
            json!({
                "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts": null, "norm_topk_prob": false,
            }),
        ),
    ]
}

fn routed_as(model_type: &str, more: Value) -> Value {
    let mut keys = routed(json!({"model_type": model_type, "num_key_value_heads": 4}));
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

#[test]
fn every_family_trains_as_on_one_rank() {
    for (name, keys) in families() {
        let alone = f32_setup(keys);
        let expected = train(&alone);
        for (mesh, expert) in [([1, 1, 1, 2], 1), ([1, 1, 1, 4], 1), ([2, 1, 1, 2], 2), ([2, 2, 1, 2], 1)] {
            let (apart, tensor) = distance(&expected, &train(&on(&alone, mesh, expert)));
            assert!(apart < F32, "{name} on {mesh:?}, {expert} of experts: {tensor} is {apart:.1e} apart");
        }
    }
}

/// An error of 1 % in one tensor is found.
#[test]
fn an_error_of_one_percent_is_found() {
    let [_, (_, keys), ..] = families();
    let expected = train(&f32_setup(keys));
    for name in expected.keys() {
        let mut wrong = expected.clone();
        wrong.get_mut(name).expect("a name").iter_mut().for_each(|value| *value *= 1.01);
        assert!(distance(&expected, &wrong).0 > F32, "{name}");
    }
}

/// The model has a shared expert that ranks hold whole. With several data ranks, it has its own bucket.
#[test]
fn zero_recomputation_and_adapters_train_as_on_one_rank() {
    let [_, (_, keys), ..] = families();
    for (mesh, expert) in [([2, 1, 1, 2], 1), ([2, 1, 1, 2], 2)] {
        for zero in [Zero::OptimizerStates, Zero::Gradients, Zero::Weights] {
            let mut alone = f32_setup(keys.clone());
            alone.mesh.zero = zero;
            let (apart, name) = apart_on(&alone, mesh, expert);
            assert!(apart < F32, "{mesh:?}, {zero:?}: {name} is {apart:.1e} apart");
        }
    }
    for (recompute, lora) in [(Recompute::Full, None), (Recompute::None, adapters(false))] {
        let mut alone = f32_setup(keys.clone());
        (alone.mesh.memory.recompute, alone.mesh.sizes.lora) = (recompute, lora);
        let (apart, name) = apart_on(&alone, [1, 1, 1, 2], 1);
        assert!(apart < F32, "{}: {name} is {apart:.1e} apart", recompute.as_str());
    }
}

/// An MLP that all tokens share, without a factor, is divided by columns as in a dense model.
#[test]
fn a_plain_shared_mlp_is_divided() {
    let mut alone = f32_setup(routed_as("qwen3_moe", json!({})));
    let shared = SharedExpert { name: "shared_experts", is_in_block: false, hidden: 64, gate: None };
    alone.mesh.sizes.experts_mut().for_each(|experts| experts.shared = Some(shared));
    for (mesh, expert) in [([1, 1, 1, 2], 1), ([2, 1, 1, 2], 2)] {
        let (apart, tensor) = apart_on(&alone, mesh, expert);
        assert!(apart < F32, "{mesh:?}: {tensor} is {apart:.1e} apart");
    }
}

/// Each loss is a mean over all tokens of a micro-batch, which ranks divide.
#[test]
fn losses_of_routers_are_those_of_one_rank() {
    let mut alone = f32_setup(routed_as("qwen3_moe", json!({})));
    let without = train(&alone);
    for (balance, z) in [(1.0, 0.0), (0.0, 0.1)] {
        alone.mesh.sizes.experts_mut().for_each(|experts| experts.losses = RouterLossFactors { balance, z });
        let expected = train(&alone);
        assert!(distance(&without, &expected).0 > 1e3 * F32, "the losses have an effect");
        for (mesh, expert) in [([1, 1, 1, 2], 1), ([1, 1, 1, 4], 1), ([2, 1, 1, 2], 2)] {
            let (apart, tensor) = distance(&expected, &train(&on(&alone, mesh, expert)));
            assert!(apart < F32, "{mesh:?}, {balance} and {z}: {tensor} is {apart:.1e} apart");
        }
    }
}

/// The sums of routers over all ranks equal the sums of one rank: the tokens of each expert, and the rows that products of experts read.
#[test]
fn routers_count_the_tokens_and_rows_of_all_ranks() {
    let alone = f32_setup(routed_as("qwen3_moe", json!({})));
    let loads = |mesh| {
        let Setup { mesh, .. } = on(&alone, mesh, 1);
        let mut all = on_ranks(mesh.ranks(), move |comm| {
            let ranks = mesh.join(comm);
            let mut own = mesh.run(&ranks);
            own.load(|number| rows(&format!("loads {number}"), mesh.rows, 0..0, &mesh.sizes));
            let MeshRank { model, optimizer, work, .. } = &mut own;
            work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
            let loads = work.partition().router_loads(model).unwrap();
            ranks.finish().unwrap();
            loads
        });
        all.swap_remove(0)
    };
    let expected = loads([1, 1, 1, 1]);
    for tensor in [2, 4] {
        for (got, expected) in loads([1, 1, 1, tensor]).iter().zip(&expected) {
            assert_eq!((&got.counts, got.rows), (&expected.counts, expected.rows), "{tensor} ranks");
            // The entropies of tokens are summed in F32 in another order, in units of 2⁻²⁴: differences of up to 3e-7 are seen.
            assert!((got.entropy / expected.entropy - 1.0).abs() < 1e-5, "{got:?}, {expected:?}");
        }
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    let alone = f32_setup(routed_as("qwen3_moe", json!({})));
    let expected = train(&alone);
    for fault in [Fault::ForeignTokens, Fault::MissingExperts, Fault::MissingSum, Fault::LargeSum] {
        let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..on(&alone, [1, 1, 1, 2], 1) }));
        assert!(apart > 10.0 * F32, "{fault:?}: {apart:.1e}");
    }
}

/// Activations are F32. One scale of a tensor covers all experts and ranks. Blocks of 128 are the same as on one rank. If ranks divide the columns of
/// a row, the row has finer scales. The distance is at most the effect of FP8.
#[test]
fn recipes_of_every_kind_train_as_on_one_rank() {
    let [_, (_, gated), ..] = families();
    let wide = routed_as("qwen3_moe", json!({"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1}));
    let with = |name| {
        let mut alone = Setup::new(if name == RecipeName::Fp8Block { wide.clone() } else { gated.clone() }, name);
        alone.mesh.recipe.compute = DType::F32;
        alone
    };
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let alone = with(name);
        for mesh in [[1, 1, 1, 2], [2, 1, 1, 2]] {
            // In the first step, ranks with other experts share scales, and data ranks do not.
            let (expert, expected) = (mesh[0], train(&on(&alone, [mesh[0], 1, 1, 1], mesh[0])));
            let bound = match name {
                RecipeName::Fp8Row => distance(&train(&with(RecipeName::Fp32)), &expected).0,
                _ => CODES,
            };
            let (apart, tensor) = distance(&expected, &train(&on(&alone, mesh, expert)));
            let what = format!("{} on {mesh:?}: {tensor} is {apart:.1e} apart", name.as_str());
            eprintln!("{what}, bound {bound:.1e}");
            assert!(apart < bound, "{what}, not below {bound:.1e}");
        }
    }
}

/// All storages are tested: gradients of tensors that ranks hold whole are summed before they are cast.
#[test]
fn every_level_has_the_losses_of_one_rank() {
    let [_, (_, keys), ..] = families();
    for storage in [Storage::Bfloat16, Storage::MsampO1, Storage::MsampO2] {
        for zero in [Zero::Nothing, Zero::OptimizerStates] {
            let mut alone = Setup::new(keys.clone(), RecipeName::Fp8Delayed);
            (alone.mesh.memory.formats, alone.mesh.zero) = (storage.formats(), zero);
            let losses = |mesh| train(&on(&alone, mesh, 1))["losses and norms"].clone();
            let mesh = if zero == Zero::Nothing { [1, 1, 1, 2] } else { [2, 1, 1, 2] };
            let (expected, got) = (losses([1, 1, 1, 1]), losses(mesh));
            let apart = expected.iter().zip(got).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
            // Losses and gradient norms of two steps are compared. Sums in another order change codes of E4M3, and a step of E4M3 is 1/8 of a value.
            // Differences of up to 1.2 % are seen.
            assert!(apart < 0.015, "{}, {zero:?}: {apart:.1e}", storage.as_str());
        }
    }
}
