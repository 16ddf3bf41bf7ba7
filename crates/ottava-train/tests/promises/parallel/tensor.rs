//! Ranks that divide each layer train as one rank does, up to rounding.

use crate::parallel::divided::{
    CODES, F32, Fault, Setup, adapters, apart, families, llama, recomputation_and_adapters_train_alike, train,
};
use crate::parallel::mesh::distance;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::storage::Storage;
use ottava_tensor::DType;
use serde_json::json;

#[test]
fn every_family_trains_as_on_one_rank() {
    for (name, keys) in families() {
        let alone = Setup::new(keys, RecipeName::Fp32);
        let mut expected = train(&alone);
        for tensor in [2, 4] {
            let mut got = train(&alone.on([1, 1, 1, tensor]));
            // The exact gradient of a bias of keys is zero. AdamW divides the rounding errors by their size, so they are not compared.
            let is_noise = |name: &str| name.starts_with("weight") && name.ends_with("c_attn.bias");
            expected.retain(|name, _| !is_noise(name));
            got.retain(|name, _| !is_noise(name));
            let (apart, tensor_name) = distance(&expected, &got);
            assert!(apart < F32, "{name} on {tensor} ranks: {tensor_name} is {apart:.1e} apart");
        }
    }
}

/// The families differ in the key and value heads that several ranks hold: separate and fused tensors, biases, and norms with a weight for all heads
/// or for each head. Apertus is left out: the slope of xIELU jumps at zero, where another order of sums can change the sign of a hidden value.
#[test]
fn more_ranks_than_key_and_value_heads_train_as_one_rank_does() {
    for (name, mut keys) in families().into_iter().filter(|(name, _)| !["gpt2", "apertus"].contains(name)) {
        for kv_heads in [1, 2] {
            keys["num_key_value_heads"] = json!(kv_heads);
            for zero in [Zero::Nothing, Zero::OptimizerStates, Zero::Weights] {
                let mut alone = Setup::new(keys.clone(), RecipeName::Fp32);
                alone.mesh.zero = zero;
                let mut expected = train(&alone);
                let is_noise = |name: &str| name.starts_with("weight") && name.ends_with("k_proj.bias");
                expected.retain(|name, _| !is_noise(name));
                for mesh in [[1, 1, 1, 4], [2, 1, 1, 2], [2, 1, 1, 4], [1, 2, 1, 4]] {
                    let is_plain = mesh[0] == 1;
                    let (divides_few, is_pipeline) = (mesh[3] > kv_heads, mesh[1] > 1);
                    if !divides_few
                        || is_plain != (zero == Zero::Nothing)
                        || is_pipeline && zero > Zero::OptimizerStates
                    {
                        continue;
                    }
                    let mut got = train(&alone.on(mesh));
                    got.retain(|name, _| !is_noise(name));
                    let mut expected = expected.clone();
                    expected.retain(|name, _| got.contains_key(name));
                    let (apart, tensor_name) = distance(&expected, &got);
                    let what =
                        format!("{name}, {kv_heads} heads on {mesh:?}, {zero:?}: {tensor_name} is {apart:.1e} apart");
                    assert!(apart < F32, "{what}");
                }
            }
        }
    }
}

/// `B` and magnitudes have the rows of a rank's heads, and copies of rows that several ranks hold.
#[test]
fn adapters_of_copied_key_and_value_heads_train_as_on_one_rank() {
    for (name, mut keys) in families().into_iter().filter(|(name, _)| *name != "gpt2") {
        keys["num_key_value_heads"] = json!(1);
        for (use_dora, mesh, zero) in
            [(false, [1, 1, 1, 4], Zero::Nothing), (true, [2, 1, 1, 2], Zero::OptimizerStates)]
        {
            let mut alone = Setup::new(keys.clone(), RecipeName::Fp32);
            (alone.mesh.zero, alone.mesh.sizes.lora) = (zero, adapters(use_dora));
            let (apart, tensor_name) = apart(&alone, mesh);
            // Norms are also sums in another order.
            let bound = if use_dora { 2.0 * F32 } else { F32 };
            assert!(apart < bound, "{name} on {mesh:?}, DoRA {use_dora}: {tensor_name} is {apart:.1e} apart");
        }
    }
}

/// In FP8, each rank casts the gradient by the keys and values of its queries, so the distance is at most the effect of FP8. With all storages,
/// copies have equal bits.
#[test]
fn copies_of_key_and_value_heads_stay_equal() {
    let keys = llama(json!({"num_key_value_heads": 1}));
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Current] {
        let mut alone = Setup::new(keys.clone(), name);
        alone.mesh.recipe.compute = DType::F32;
        let expected = train(&alone);
        let bound = distance(&train(&Setup::new(keys.clone(), RecipeName::Fp32)), &expected).0;
        let (apart, tensor_name) = distance(&expected, &train(&alone.on([1, 1, 1, 4])));
        assert!(apart < bound, "{}: {tensor_name} is {apart:.1e} apart, not below {bound:.1e}", name.as_str());
    }
    for storage in [Storage::MsampO1, Storage::MsampO2, Storage::Bfloat16] {
        let mut alone = Setup::new(keys.clone(), RecipeName::Fp8Delayed);
        alone.mesh.memory.formats = storage.formats();
        // `train` compares the bits of copies.
        let losses = |tensor| train(&alone.on([1, 1, 1, tensor]))["losses and norms"].clone();
        let apart = losses(1).iter().zip(losses(4)).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart < 0.015, "{}: {apart:.1e}", storage.as_str());
    }
}

/// An error of 1 % in one tensor is found.
#[test]
fn an_error_of_one_percent_is_found() {
    let expected = train(&Setup::new(llama(json!({})), RecipeName::Fp32));
    for name in expected.keys() {
        let mut wrong = expected.clone();
        wrong.get_mut(name).expect("a name").iter_mut().for_each(|value| *value *= 1.01);
        assert!(distance(&expected, &wrong).0 > F32, "{name}");
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    let mut alone = Setup::new(llama(json!({})), RecipeName::Fp8Current);
    alone.mesh.recipe.compute = DType::F32;
    let expected = train(&alone);
    for fault in [Fault::DoubleAddend, Fault::MissingGather, Fault::SwappedRows, Fault::OwnScale] {
        let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..alone.on([1, 1, 1, 2]) }));
        assert!(apart > CODES, "{fault:?}: {apart:.1e}");
    }
}

#[test]
fn recomputation_and_adapters_train_as_on_one_rank() {
    recomputation_and_adapters_train_alike([1, 1, 1, 2]);
}

/// If ranks divide the columns of rows, the norms of these rows equal the norms of whole rows. This includes fused and transposed weights, and codes.
#[test]
fn magnitudes_train_as_on_one_rank() {
    for (name, keys) in families() {
        let mut alone = Setup::new(keys, RecipeName::Fp32);
        alone.mesh.sizes.lora = adapters(true);
        let (apart, tensor_name) = apart(&alone, [1, 1, 1, 2]);
        // Norms are also sums in another order.
        assert!(apart < 2.0 * F32, "{name}: {tensor_name} is {apart:.1e} apart");
    }
    let mut alone = Setup::new(llama(json!({})), RecipeName::Fp8Current);
    // The inputs of these linears are divided. If all linears had magnitudes, later layers would multiply the effect of a single other code.
    let targets = Targets::Names(["o_proj", "down_proj"].map(String::from).to_vec());
    alone.mesh.sizes.lora = adapters(true).map(|lora| Lora { targets, ..lora });
    (alone.mesh.recipe.compute, alone.mesh.memory.frozen_values) = (DType::F32, false);
    let expected = train(&alone);
    let shared = alone.on([1, 1, 1, 4]);
    let (apart, tensor_name) = distance(&expected, &train(&shared));
    assert!(apart < CODES, "{tensor_name} is {apart:.1e} apart");
    let (apart, _) = distance(&expected, &train(&Setup { fault: Some(Fault::OwnNorms), ..shared }));
    assert!(apart > CODES, "the norms of a rank's own columns: {apart:.1e}");
}

#[test]
fn ranks_of_both_axes_train_as_on_one_rank() {
    for zero in Zero::ALL {
        for lora in [None, adapters(true)] {
            let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
            (alone.mesh.zero, alone.mesh.sizes.lora) = (zero, lora);
            let (apart, name) = apart(&alone, [2, 1, 1, 2]);
            assert!(apart < F32, "{zero:?}, {:?}: {name} is {apart:.1e} apart", alone.mesh.sizes.lora);
        }
    }
}

#[test]
fn ranks_of_three_axes_train_as_on_one_rank() {
    for zero in [Zero::Nothing, Zero::OptimizerStates] {
        for name in [RecipeName::Fp32, RecipeName::Fp8Delayed, RecipeName::Fp8Current] {
            let mut alone = Setup::new(llama(json!({})), name);
            (alone.mesh.zero, alone.mesh.recipe.compute) = (zero, DType::F32);
            let (apart, tensor_name) = apart(&alone, [2, 2, 1, 2]);
            // Data ranks scale gradients by their own amaxes.
            let bound = if name == RecipeName::Fp8Current { 0.3 } else { CODES };
            assert!(apart < bound, "{}, {zero:?}: {tensor_name} is {apart:.1e} apart", name.as_str());
        }
    }
}

/// Activations are F32, so few values are cast to another code because of the order of sums. Blocks of 128 are the same as on one rank. If ranks
/// divide the columns of a row, the row has finer scales. The distance is at most the effect of FP8.
#[test]
fn every_recipe_trains_as_on_one_rank() {
    let wide = json!({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1});
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let keys = || llama(if name == RecipeName::Fp8Block { wide.clone() } else { json!({}) });
        let mut alone = Setup::new(keys(), name);
        alone.mesh.recipe.compute = DType::F32;
        let expected = train(&alone);
        let bound = match name {
            // Each rank scales its part of a tensor.
            RecipeName::Fp8Row | RecipeName::Nvfp4 => {
                distance(&train(&Setup::new(keys(), RecipeName::Fp32)), &expected).0
            }
            // More values change than with one scale per tensor, since scales change with the values of a block.
            RecipeName::Fp8Block => 6.0 * CODES,
            _ => CODES,
        };
        for tensor in if name == RecipeName::Fp8Block { vec![2] } else { vec![2, 4] } {
            let (apart, tensor_name) = distance(&expected, &train(&alone.on([1, 1, 1, tensor])));
            let what = format!("{} on {tensor} ranks: {tensor_name} is {apart:.1e} apart", name.as_str());
            assert!(apart < bound, "{what}, not below {bound:.1e}");
            eprintln!("{what}");
        }
    }
}

/// In BF16, partial sums are rounded, and some values are cast to other codes. The losses stay near the losses of one rank.
#[test]
fn every_recipe_has_the_losses_of_one_rank() {
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = Setup::new(llama(json!({})), name);
        let losses = |tensor| train(&alone.on([1, 1, 1, tensor]))["losses and norms"].clone();
        let (expected, got) = (losses(1), losses(2));
        let apart = expected.iter().zip(got).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart < 0.015, "{}: {apart:.1e}", name.as_str());
    }
}

/// The largest distance of a run with Muon. Directions are rounded to BF16, and a difference of one step of BF16 changes the orthogonalised matrix by up to
/// 1 %. The updates of these runs are about 4e-3 of a weight. Matrices that are orthogonalised in parts differ by as much as the updates.
const MUON: f64 = 2e-4;

/// Muon orthogonalises whole matrices, also matrices that ranks divide by rows, by columns or in parts of a fused tensor, and experts that ranks divide.
#[test]
fn muon_trains_as_on_one_rank() {
    let routed = || crate::parallel::expert_ranks::routed(json!({}));
    let mut cases: Vec<_> =
        families().into_iter().map(|(name, keys)| (name, keys, [1, 1, 1, 2], 1, Zero::Nothing)).collect();
    cases.retain(|(name, ..)| ["llama", "phi3", "gpt2"].iter().any(|of| name.contains(of)));
    let few_heads = llama(json!({"num_key_value_heads": 2}));
    cases.extend([
        ("llama", few_heads, [1, 1, 1, 4], 1, Zero::Nothing),
        ("llama", llama(json!({})), [2, 1, 1, 2], 1, Zero::OptimizerStates),
        ("llama", llama(json!({})), [2, 1, 1, 2], 1, Zero::Weights),
        ("llama", llama(json!({})), [1, 2, 1, 2], 1, Zero::Nothing),
        ("experts", routed(), [2, 1, 1, 1], 2, Zero::Nothing),
        ("experts", routed(), [2, 1, 1, 1], 2, Zero::OptimizerStates),
        ("experts", routed(), [2, 1, 2, 1], 2, Zero::Weights),
        ("experts", routed(), [2, 1, 1, 2], 2, Zero::Gradients),
    ]);
    for (name, keys, mesh, expert, zero) in cases {
        let mut alone = Setup::new(keys, RecipeName::Fp32);
        (alone.mesh.muon, alone.mesh.zero) = (true, zero);
        let (mut expected, mut got) = (train(&alone), train(&crate::parallel::expert_ranks::on(&alone, mesh, expert)));
        // The gradient of a router has a singular value of zero, which Muon makes as large as the others.
        got.retain(|name, _| !name.ends_with("mlp.gate.weight"));
        expected.retain(|name, _| got.contains_key(name));
        let (apart, tensor) = distance(&expected, &got);
        eprintln!("{name} on {mesh:?}, {zero:?}: {tensor} is {apart:.1e} apart");
        assert!(apart < MUON, "{name} on {mesh:?}, {expert} of experts, {zero:?}: {tensor} is {apart:.1e} apart");
    }
}
