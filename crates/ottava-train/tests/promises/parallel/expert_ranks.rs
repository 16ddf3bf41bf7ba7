//! Ranks that divide the experts of mixtures train as one rank does, up to rounding.

use crate::parallel::divided::{F32, Fault, Setup, train};
use crate::parallel::mesh::{Seen, distance};
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::recompute::Recompute;
use ottava_tensor::DType;
use serde_json::{Value, json};

/// Returns a model of four experts. Each token chooses two of them. All sizes are multiples of 128, as FP8 products need.
pub fn routed(more: Value) -> Value {
    let mut keys = json!({
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true,
        "tie_word_embeddings": false,
    });
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// Returns mixtures with different parts besides the experts: none, a shared expert with a factor by token, a plain shared expert after a dense
/// layer, biases, and weights of choices that multiply inputs.
fn families() -> [(&'static str, Value); 5] {
    [
        ("qwen3_moe", routed(json!({}))),
        ("qwen2_moe", routed(json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}))),
        (
            "deepseek_v2",
            routed(json!({
                "model_type": "deepseek_v2", "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts": null,
                "norm_topk_prob": false,
            })),
        ),
        (
            "gpt_oss",
            routed(
                json!({"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 64, "sliding_window": 7}),
            ),
        ),
        ("llama4", routed(llama4(json!({})))),
    ]
}

/// Returns the keys of a Llama 4: a layer with an MLP, and a layer with experts and with queries that grow.
pub fn llama4(more: Value) -> Value {
    let mut keys = json!({
        "model_type": "llama4_text", "num_local_experts": 4, "intermediate_size": 64, "intermediate_size_mlp": 128, "moe_layers": [1],
        "no_rope_layers": [1, 0], "floor_scale": 4,
    });
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// Returns the same run on ranks of a mesh. Groups of `expert` ranks divide the experts.
pub fn on(alone: &Setup, mesh: [usize; 4], expert: usize) -> Setup {
    let mut setup = alone.on(mesh);
    setup.mesh.expert = expert;
    setup
}

pub fn f32_setup(keys: Value) -> Setup {
    Setup::new(keys, RecipeName::Fp32)
}

#[test]
fn every_family_trains_as_on_one_rank() {
    for (name, keys) in families() {
        let alone = f32_setup(keys);
        let expected = train(&alone);
        for (mesh, expert) in [([2, 1, 1, 1], 2), ([2, 1, 2, 1], 2), ([2, 1, 2, 1], 4), ([1, 1, 2, 1], 2)] {
            let (apart, tensor) = distance(&expected, &train(&on(&alone, mesh, expert)));
            assert!(apart < F32, "{name} on {mesh:?}, {expert} of experts: {tensor} is {apart:.1e} apart");
        }
    }
}

/// With two choices per token, no sum of forward has another order. So the losses of the first step equal the losses of data parallelism, bit for
/// bit.
#[test]
fn the_first_losses_are_bit_identical_to_those_of_data_parallelism() {
    let alone = f32_setup(routed(json!({})));
    for mesh in [[2, 1, 1, 1], [2, 1, 2, 1]] {
        let first = |expert| train(&on(&alone, mesh, expert))["losses and norms"][0];
        for expert in [2, mesh[0] * mesh[2]] {
            assert_eq!(first(expert).to_bits(), first(1).to_bits(), "{mesh:?}, {expert}");
        }
    }
}

#[test]
fn ranks_of_several_axes_and_zero_train_as_on_one_rank() {
    let meshes = [([2, 1, 1, 1], 2), ([2, 1, 2, 1], 2), ([2, 2, 1, 1], 2)];
    for (mesh, expert) in meshes {
        for zero in Zero::ALL.into_iter().filter(|zero| mesh[1] == 1 || *zero <= Zero::OptimizerStates) {
            let mut alone = f32_setup(routed(json!({})));
            alone.mesh.zero = zero;
            let (apart, name) = apart_on(&alone, mesh, expert);
            assert!(apart < F32, "{mesh:?}, {zero:?}: {name} is {apart:.1e} apart");
        }
    }
}

pub fn apart_on(alone: &Setup, mesh: [usize; 4], expert: usize) -> (f64, String) {
    let (mut expected, got) = (train(alone), train(&on(alone, mesh, expert)));
    expected.retain(|name, _| got.contains_key(name));
    distance(&expected, &got)
}

/// All tokens choose the first two experts, so the second rank has no tokens.
#[test]
fn ranks_without_tokens_train_as_on_one_rank() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let mut alone = Setup::new(routed(json!({})), name);
        (alone.equal_logits, alone.mesh.recipe.compute) = (true, DType::F32);
        let (expected, got) = (train(&alone), train(&on(&alone, [1, 1, 2, 1], 2)));
        assert!(got.values().flatten().all(|value| value.is_finite()), "{name:?}");
        // Only the losses of both steps are compared. In the evaluation after them, logits are so close that rounding changes choices.
        let losses = |seen: &Seen| seen["losses and norms"][..4].to_vec();
        let (losses, expected) = (losses(&got), losses(&expected));
        let apart = losses.iter().zip(&expected).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        eprintln!("{}: {apart:.1e}", name.as_str());
        assert!(apart < if name == RecipeName::Fp32 { F32 } else { 3e-2 }, "{name:?}: {apart:.1e}");
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    let alone = f32_setup(routed(json!({})));
    let expected = train(&alone);
    for fault in [Fault::MissingGather, Fault::SwappedRows, Fault::MissingSum, Fault::LargeSum] {
        let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..on(&alone, [2, 1, 1, 1], 2) }));
        eprintln!("{fault:?}: {apart:.1e}");
        assert!(apart > 10.0 * F32, "{fault:?}: {apart:.1e}");
    }
}

/// Activations are F32, so few values are cast to another code because of the order of sums. One scale of a tensor covers all experts. Scales of
/// rows, columns and blocks cover only the tokens and experts of a rank, so they can be finer. The distance is at most the effect of FP8.
#[test]
fn every_recipe_trains_as_on_one_rank() {
    let with = |name| {
        let mut alone = Setup::new(routed(json!({})), name);
        alone.mesh.recipe.compute = DType::F32;
        alone
    };
    let plain = train(&with(RecipeName::Fp32));
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = with(name);
        let expected = train(&on(&alone, [2, 1, 1, 1], 1));
        let is_cast = alone.mesh.recipe.casts.is_some();
        let bound = if is_cast { distance(&plain, &expected).0 } else { F32 };
        let (apart, tensor) = distance(&expected, &train(&on(&alone, [2, 1, 1, 1], 2)));
        eprintln!("{}: {tensor} is {apart:.1e} apart, bound {bound:.1e}", name.as_str());
        assert!(apart < bound, "{}: {tensor} is {apart:.1e} apart, not below {bound:.1e}", name.as_str());
    }
}

/// In BF16, sums over the experts of a rank are rounded before they are sent.
#[test]
fn every_recipe_has_the_losses_of_one_rank() {
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = Setup::new(routed(json!({})), name);
        let numbers = |data, expert| train(&on(&alone, [data, 1, 1, 1], expert))["losses and norms"].clone();
        let (expected, got) = (numbers(1, 1), numbers(2, 2));
        let apart = expected.iter().zip(&got).step_by(2).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        eprintln!("{}: {apart:.1e}", name.as_str());
        // In two steps, differences of up to 4.3e-4 are seen in BF16, and up to 3.5e-3 in FP8, where a rounding to BF16 can change the code of a
        // value. In four bits, neighbouring codes are further apart.
        assert!(apart < if name == RecipeName::Nvfp4 { 0.02 } else { 5e-3 }, "{}: {apart:.1e}", name.as_str());
    }
}

/// Recomputation changes no bit, although it changes the data that ranks send. If forward makes no copy for wgrad, ranks send codes. Otherwise, with
/// scales by row or block, ranks send values. So codes that are cast before the exchange equal codes that are cast after it.
#[test]
fn what_is_recomputed_changes_no_bit() {
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let on_ranks = |recompute| {
            let mut alone = Setup::new(routed(json!({"hidden_size": 256})), name);
            alone.mesh.memory.recompute = recompute;
            train(&on(&alone, [2, 1, 1, 1], 2))
        };
        let expected = on_ranks(Recompute::None);
        for recompute in Recompute::ALL {
            assert!(on_ranks(recompute) == expected, "{}, {}", name.as_str(), recompute.as_str());
        }
    }
}

/// Ranks with other experts have other blocks, each with its own scale. Ranks with the same experts compute the scale together.
#[test]
fn block_scales_of_divided_experts_change_no_bit() {
    let on_ranks = |zero| {
        let mut alone = Setup::new(routed(json!({})), RecipeName::Fp8Block);
        alone.mesh.zero = zero;
        train(&on(&alone, [2, 1, 2, 1], 2))
    };
    let expected = on_ranks(Zero::Nothing);
    let got = on_ranks(Zero::OptimizerStates);
    for (name, values) in &got {
        assert!(expected[name] == *values, "{name}");
    }
}

/// Frozen experts are divided among the ranks that have the same experts, and all other frozen weights are divided among all ranks.
#[test]
fn frozen_weights_are_divided_in_stage_3() {
    let lora = Some(Lora {
        r: 4,
        alpha: 4.0,
        use_rslora: false,
        use_dora: false,
        targets: Targets::AllLinear,
        ..Lora::default()
    });
    let mut alone = f32_setup(routed(json!({})));
    (alone.mesh.zero, alone.mesh.sizes.lora) = (Zero::Weights, lora);
    let (apart, name) = apart_on(&alone, [2, 1, 2, 1], 2);
    assert!(apart < F32, "{name} is {apart:.1e} apart");
}

#[test]
fn recomputation_and_adapters_train_as_on_one_rank() {
    let lora = Some(Lora {
        r: 4,
        alpha: 4.0,
        use_rslora: false,
        use_dora: false,
        targets: Targets::AllLinear,
        ..Lora::default()
    });
    for recompute in Recompute::ALL {
        for lora in [None, lora.clone()] {
            let mut alone = f32_setup(routed(json!({})));
            (alone.mesh.memory.recompute, alone.mesh.sizes.lora) = (recompute, lora);
            let (apart, name) = apart_on(&alone, [2, 1, 1, 1], 2);
            let what = format!("{}, adapters {}", recompute.as_str(), alone.mesh.sizes.lora.is_some());
            assert!(apart < F32, "{what}: {name} is {apart:.1e} apart");
        }
    }
}
