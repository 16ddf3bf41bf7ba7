//! Recomputation instead of saving changes no bit: losses, gradients, scales and histories are compared over steps of several micro-batches. Saving
//! in FP8 changes only gradients.

use crate::models::families::all_families;
use crate::setup::{
    Seeded, batch, config, devices_of, finish_step, gradients, losses_and_gradients, on_one_thread, recipe, recipes,
    rotated, tiny_llama,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use serde_json::json;
use std::collections::HashMap;

const TOKENS: usize = 13;

/// Returns the whole state after three steps of two micro-batches. Weights change by their gradients, so the gradients of each step differ.
fn run(config: &DecoderConfig, recipe: &Recipe, device: &Device, kept: MemoryPolicy) -> Vec<(String, Vec<f64>)> {
    on_one_thread(|| three_steps(config, recipe, device, kept))
}

fn three_steps(
    config: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    kept: MemoryPolicy,
) -> Vec<(String, Vec<f64>)> {
    let mut weights = Seeded { std: 0.1 };
    let mut decoder = Decoder::new(config, recipe, device, Purpose::Train(kept), 32, &mut weights).unwrap();
    decoder.quantize_weights().unwrap();
    let data = batch("recompute", 5, TOKENS, config.vocabulary);
    let mut seen = Vec::new();
    for step in 0..3 {
        decoder.parameters().into_iter().for_each(|p| p.gradient.clear());
        for (start, end) in [(0, 2), (2, 5)] {
            let part = |ids: &Tensor| ids.rows(start * TOKENS, end * TOKENS).unwrap().to_device(device).unwrap();
            let losses =
                losses_and_gradients(&mut decoder, &part(&data[0]), &part(&data[1]), end - start, 0.01).unwrap();
            seen.push((format!("losses of step {step}, rows from {start}"), values(&losses)));
        }
        seen.extend(
            gradients(&mut decoder).into_iter().map(|(name, g)| (format!("gradient of {name}, step {step}"), g)),
        );
        for param in decoder.parameters() {
            let (value, gradient) =
                (values(&param.weights.value().unwrap()), values(&param.gradient.get().unwrap().values().unwrap()));
            let moved: Vec<f32> = value.iter().zip(gradient).map(|(w, g)| (w - 0.3 * g) as f32).collect();
            let moved = Tensor::from_slice(device, param.weights.shape(), &moved).unwrap();
            param.weights.set_value(ottava_tensor::ops::cast(&moved, param.weights.dtype()).unwrap());
        }
        let lost = finish_step(&mut decoder);
        // If weights are cast for each product, each cast is counted.
        if kept.weight_codes {
            seen.push((format!("what casts lost in step {step}"), vec![lost.saturated, lost.underflowed]));
        }
        let arrays = decoder.scaling().arrays().unwrap().into_iter().filter(|(_, array)| array.dtype() == DType::F32);
        seen.extend(arrays.map(|(name, array)| (format!("{name}, step {step}"), values(&array))));
    }
    seen
}

#[test]
fn recomputation_changes_no_bit() {
    let qwen = config(json!({
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "use_sliding_window": false,
    }));
    for (family, config) in [tiny_llama(), qwen].into_iter().enumerate() {
        for (name, recipe) in recipes() {
            for device in devices_of(&recipe) {
                let reference = run(&config, &recipe, &device, MemoryPolicy::FULL);
                for (number, recompute) in Recompute::ALL.into_iter().enumerate() {
                    // Each pair of options is a case of each recipe.
                    for weight_codes in rotated(&[true, false], 1, family + number) {
                        let seen = run(
                            &config,
                            &recipe,
                            &device,
                            MemoryPolicy { recompute, weight_codes, ..MemoryPolicy::FULL },
                        );
                        let expected: HashMap<_, _> = reference.iter().map(|(name, values)| (name, values)).collect();
                        for (what, got) in &seen {
                            let expected = expected[what];
                            let policy = recompute.as_str();
                            assert!(
                                expected == got,
                                "{what}: {name} on {device}, {policy}, codes kept: {weight_codes}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn recomputation_changes_no_bit_of_families_that_are_no_llamas() {
    let policies = [Recompute::NormSwiglu, Recompute::Attention, Recompute::Full];
    for (row, (family, config)) in all_families().into_iter().enumerate() {
        for (column, name) in rotated(&RecipeName::ALL, 3, row).into_iter().enumerate() {
            let recipe = recipe(name, Fp8Format::Auto);
            for device in devices_of(&recipe) {
                let reference = run(&config, &recipe, &device, MemoryPolicy::FULL);
                for recompute in rotated(&policies, 1, row + column) {
                    let seen = run(&config, &recipe, &device, MemoryPolicy { recompute, ..MemoryPolicy::FULL });
                    let what = format!("{family}, {} on {device}, {}", name.as_str(), recompute.as_str());
                    assert_eq!(reference.len(), seen.len(), "{what}");
                    let differs = reference.iter().zip(&seen).find(|(a, b)| a != b).map(|(a, _)| &a.0);
                    assert!(differs.is_none(), "{what}: {differs:?}");
                }
            }
        }
    }
}

#[test]
fn forward_does_not_notice_what_is_kept_in_fp8() {
    let config = tiny_llama();
    for (name, recipe) in recipes() {
        for device in devices_of(&recipe) {
            let exact = run(&config, &recipe, &device, MemoryPolicy::FULL);
            for recompute in Recompute::ALL {
                let kept =
                    MemoryPolicy { recompute, saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL };
                let seen = run(&config, &recipe, &device, kept);
                let differ: Vec<&String> = exact.iter().zip(&seen).filter(|(a, b)| a != b).map(|(a, _)| &a.0).collect();
                let what = format!("{name} on {device}, {}: {differ:?} differ", recompute.as_str());
                // With full recomputation, a block runs again exactly as before.
                assert_eq!(differ.is_empty(), recompute == Recompute::Full, "{what}");
                assert!(!differ.iter().any(|name| name.starts_with("losses of step 0")), "{what}");
                // The activations before and after the last norm are not compressed if the head's own gradient reads them.
                assert!(!differ.contains(&&"gradient of lm_head.weight, step 0".to_string()), "{what}");
            }
        }
    }
}
