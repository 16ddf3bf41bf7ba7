//! Ranks that divide sequences train as one rank does, up to rounding.

use crate::parallel::divided::{
    CODES, F32, Fault, Setup, apart, families, llama, recomputation_and_adapters_train_alike, train,
};
use crate::parallel::mesh::distance;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_tensor::DType;
use serde_json::json;

#[test]
fn every_family_trains_as_on_one_rank() {
    let routed = llama(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true,
    }));
    let sinks = llama(json!({
        "architectures": ["GptOssForCausalLM"], "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
    }));
    for (name, keys) in families().into_iter().chain([("qwen3-moe", routed), ("gpt-oss", sinks)]) {
        for documents in [false, true] {
            let alone = Setup { documents, ..Setup::new(keys.clone(), RecipeName::Fp32) };
            let mut expected = train(&alone);
            // The exact gradient of a bias of keys is zero. AdamW divides the rounding errors by their size, so they are not compared.
            let is_noise = |name: &str| {
                name.starts_with("weight") && (name.ends_with("c_attn.bias") || name.ends_with("k_proj.bias"))
            };
            expected.retain(|name, _| !is_noise(name));
            for context in if documents { vec![2] } else { vec![2, 4] } {
                let mut got = train(&alone.on([1, 1, context, 1]));
                got.retain(|name, _| !is_noise(name));
                let (apart, tensor) = distance(&expected, &got);
                let what = format!("{name} on {context} ranks, documents {documents}");
                assert!(apart < F32, "{what}: {tensor} is {apart:.1e} apart");
            }
        }
    }
}

/// Each key and value head is sent to several ranks, and the gradients from these ranks are added. This also holds if ranks of the tensor axis divide
/// the heads or hold copies of them.
#[test]
fn more_ranks_than_key_and_value_heads_train_as_one_rank_does() {
    for (kv_heads, mesh) in
        [(1, [1, 1, 2, 1]), (1, [1, 1, 4, 1]), (2, [1, 1, 4, 1]), (2, [1, 1, 2, 2]), (1, [1, 1, 2, 2])]
    {
        let mut alone = Setup::new(llama(json!({"num_key_value_heads": kv_heads})), RecipeName::Fp32);
        alone.documents = true;
        let (apart, name) = apart(&alone, mesh);
        assert!(apart < F32, "{kv_heads} heads on {mesh:?}: {name} is {apart:.1e} apart");
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    let alone = Setup::new(llama(json!({})), RecipeName::Fp32);
    let expected = train(&alone);
    for fault in [Fault::MissingExchange, Fault::SwappedTokens] {
        let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..alone.on([1, 1, 2, 1]) }));
        assert!(apart > CODES, "{fault:?}: {apart:.1e}");
    }
}

#[test]
fn recomputation_and_adapters_train_as_on_one_rank() {
    recomputation_and_adapters_train_alike([1, 1, 2, 1]);
}

#[test]
fn ranks_of_several_axes_train_as_on_one_rank() {
    let meshes = [([2, 1, 2, 1], Zero::OptimizerStates), ([1, 1, 2, 1], Zero::Weights), ([1, 1, 2, 2], Zero::Nothing)];
    for (mesh, zero) in meshes.into_iter().chain([([1, 2, 2, 1], Zero::Nothing), ([1, 2, 2, 2], Zero::OptimizerStates)])
    {
        let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
        alone.mesh.zero = zero;
        let (apart, name) = apart(&alone, mesh);
        assert!(apart < F32, "{mesh:?}, {zero:?}: {name} is {apart:.1e} apart");
    }
}

/// Each rank scales its tokens by their own amaxes. With delayed scaling, it does this only in the first step. The distance is at most the effect of
/// FP8.
#[test]
fn every_recipe_trains_as_on_one_rank() {
    let with = |name| {
        let mut alone = Setup::new(llama(json!({})), name);
        alone.mesh.recipe.compute = DType::F32;
        alone
    };
    let plain = train(&with(RecipeName::Fp32));
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = with(name);
        let expected = train(&alone);
        let bound = if alone.mesh.recipe.casts.is_some() { distance(&plain, &expected).0 } else { F32 };
        let (apart, tensor) = distance(&expected, &train(&alone.on([1, 1, 2, 1])));
        assert!(apart < bound, "{}: {tensor} is {apart:.1e} apart, not below {bound:.1e}", name.as_str());
    }
}

/// In BF16, the losses stay near the losses of one rank.
#[test]
fn every_recipe_has_the_losses_of_one_rank() {
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = Setup::new(llama(json!({})), name);
        let numbers = |context| train(&alone.on([1, 1, context, 1]))["losses and norms"].clone();
        let (expected, got) = (numbers(1), numbers(2));
        let losses = expected.iter().zip(&got).step_by(2);
        let apart = losses.map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        // In two steps, casts with the amaxes of a part of the tokens change losses by up to 2.5e-3.
        assert!(apart < 5e-3, "{}: {apart:.1e}", name.as_str());
    }
}
