//! Ranks that divide latent attention, by heads or by tokens, train as one rank does, up to rounding.

use crate::parallel::divided::{CODES, F32, Fault, Setup, adapters, apart, llama, train};
use crate::parallel::mesh::distance;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::storage::Storage;
use ottava_tensor::DType;
use serde_json::{Value, json};
use std::f64::consts::SQRT_2;

/// Returns a model of two dense layers with biases. Queries come from a latent if `latent_queries` is set, and values are smaller than keys.
pub fn deepseek(latent_queries: bool, more: Value) -> Value {
    let mut keys = llama(json!({
        "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "q_lora_rank": latent_queries.then_some(32), "attention_bias": true, "first_k_dense_replace": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    }));
    keys.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    keys
}

/// Queries from a latent, and queries from the residual stream.
const BOTH: [bool; 2] = [true, false];

#[test]
fn every_mesh_trains_as_on_one_rank() {
    for latent_queries in BOTH {
        let alone = Setup { documents: true, ..Setup::new(deepseek(latent_queries, json!({})), RecipeName::Fp32) };
        let expected = train(&alone);
        for mesh in [[1, 1, 1, 2], [1, 1, 1, 4], [1, 1, 2, 1], [1, 1, 4, 1], [1, 1, 2, 2], [1, 2, 1, 2]] {
            let (apart, name) = distance(&expected, &train(&alone.on(mesh)));
            assert!(apart < F32, "latent queries {latent_queries} on {mesh:?}: {name} is {apart:.1e} apart");
        }
    }
}

/// Gradients of weights that ranks of both axes hold alike are added over these ranks.
#[test]
fn ranks_with_slices_train_as_on_one_rank() {
    for latent_queries in BOTH {
        for (zero, mesh) in [
            (Zero::OptimizerStates, [2, 1, 1, 2]),
            (Zero::Weights, [2, 1, 1, 2]),
            (Zero::Weights, [1, 1, 2, 1]),
            (Zero::OptimizerStates, [1, 1, 2, 2]),
        ] {
            let mut alone = Setup::new(deepseek(latent_queries, json!({})), RecipeName::Fp32);
            alone.mesh.zero = zero;
            let (apart, name) = apart(&alone, mesh);
            assert!(apart < F32, "latent queries {latent_queries} on {mesh:?}, {zero:?}: {name} is {apart:.1e} apart");
        }
    }
}

#[test]
fn experts_train_on_context_ranks_as_on_one_rank() {
    let alone = Setup::new(deepseek(false, json!({"first_k_dense_replace": 1})), RecipeName::Fp32);
    for expert in [1, 2] {
        let mut shared = alone.on([1, 1, 2, 1]);
        shared.mesh.expert = expert;
        let (apart, name) = distance(&train(&alone), &train(&shared));
        assert!(apart < F32, "{expert} of experts: {name} is {apart:.1e} apart");
    }
}

#[test]
fn recomputation_and_adapters_train_as_on_one_rank() {
    for latent_queries in BOTH {
        let every_lora = [None, adapters(false), adapters(true)];
        for (recompute, lora) in Recompute::ALL.into_iter().zip(every_lora.iter().cycle()) {
            let mut alone = Setup::new(deepseek(latent_queries, json!({"attention_bias": false})), RecipeName::Fp32);
            (alone.mesh.memory.recompute, alone.mesh.sizes.lora) = (recompute, lora.clone());
            for mesh in [[1, 1, 1, 2], [1, 1, 2, 1]] {
                let (apart, name) = apart(&alone, mesh);
                let what = format!("latent queries {latent_queries} on {mesh:?}, {}, {lora:?}", recompute.as_str());
                // The norms of magnitudes are also sums in another order.
                assert!(apart < 2.0 * F32, "{what}: {name} is {apart:.1e} apart");
            }
        }
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    for latent_queries in BOTH {
        let alone = Setup::new(deepseek(latent_queries, json!({})), RecipeName::Fp32);
        let expected = train(&alone);
        for (fault, mesh) in [
            (Fault::MissingGather, [1, 1, 1, 2]),
            (Fault::SwappedRows, [1, 1, 1, 2]),
            (Fault::MissingSum, [1, 1, 1, 2]),
            (Fault::MissingGather, [1, 1, 2, 1]),
            (Fault::MissingSum, [1, 1, 2, 1]),
            (Fault::MissingExchange, [1, 1, 2, 1]),
            (Fault::SwappedTokens, [1, 1, 2, 1]),
        ] {
            let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..alone.on(mesh) }));
            assert!(apart > CODES, "latent queries {latent_queries}, {fault:?} on {mesh:?}: {apart:.1e}");
        }
    }
}

/// Activations are F32, so few values are cast to another code because of the order of sums. Some scales cover only the tokens or heads of a rank, so
/// the distance is about the effect of FP8. These are the scales of rows and blocks, the scales of context ranks, and, without a latent of queries,
/// the scale of the gradient of latents.
#[test]
fn every_recipe_trains_as_on_one_rank() {
    for latent_queries in BOTH {
        let with = |name| {
            let mut alone = Setup::new(deepseek(latent_queries, json!({"num_hidden_layers": 1})), name);
            alone.mesh.recipe.compute = DType::F32;
            alone
        };
        let plain = train(&with(RecipeName::Fp32));
        for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
            let alone = with(name);
            let expected = train(&alone);
            let loose = distance(&plain, &expected).0;
            let is_per_tensor = matches!(name, RecipeName::Fp8Delayed | RecipeName::Fp8Current);
            for mesh in [[1, 1, 1, 2], [1, 1, 1, 4], [1, 1, 2, 1]] {
                let bound = match (mesh[2] > 1, latent_queries && is_per_tensor) {
                    // Both runs have this distance from F32, in independent directions.
                    (true, _) => SQRT_2 * loose,
                    (false, true) => CODES,
                    (false, false) => loose,
                };
                let (apart, tensor) = distance(&expected, &train(&alone.on(mesh)));
                let what = format!("{}, latent queries {latent_queries}, {mesh:?}", name.as_str());
                eprintln!("{what}: {tensor} is {apart:.1e} apart, bound {bound:.1e}");
                assert!(apart < bound, "{what}: {tensor} is {apart:.1e} apart, not below {bound:.1e}");
            }
        }
    }
}

/// In BF16, gradients and states of every format are tested. `train` compares the bits of tensors that ranks hold alike.
#[test]
fn every_level_has_the_losses_of_one_rank() {
    for latent_queries in BOTH {
        for storage in [Storage::Bfloat16, Storage::MsampO1, Storage::MsampO2, Storage::MsampO3] {
            let mut alone = Setup::new(deepseek(latent_queries, json!({})), RecipeName::Fp8Delayed);
            alone.mesh.memory.formats = storage.formats();
            let losses = |mesh| train(&alone.on(mesh))["losses and norms"].clone();
            let (expected, got) = (losses([1, 1, 1, 1]), losses([1, 1, 1, 2]));
            let apart = expected.iter().zip(got).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
            // Losses and gradient norms of two steps are compared. Sums in another order change codes of E4M3, and a step of E4M3 is 1/8 of a value.
            // Differences of up to 1.2 % are seen.
            assert!(apart < 0.015, "latent queries {latent_queries}, {}: {apart:.1e}", storage.as_str());
        }
    }
}
