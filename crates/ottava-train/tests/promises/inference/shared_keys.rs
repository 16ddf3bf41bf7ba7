//! Models whose layers have heads of two sizes, or read the keys and values of earlier layers: the cache gives the bits of training.

use crate::inference::engine::{Got, ROOMY, requests, run};
use crate::inference::recurrent::expect_logits_of_training;
use crate::setup::{config, decoder, recipe};
use ottava_engine::{Engine, EngineOptions, Request};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::{DType, Device};
use serde_json::{Value, json};

/// Returns a model with experts whose values are the projected keys, and a model with per-layer embeddings whose last layers read the keys and values
/// of earlier layers.
fn models() -> [(&'static str, DecoderConfig); 2] {
    let of = |keys: Value| {
        let mut all = json!({
            "model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "max_position_embeddings": 200,
            "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
        });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config(all)
    };
    let experts = json!({
        "attention_k_eq_v": true, "num_global_key_value_heads": 1, "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    });
    let shared = json!({
        "num_kv_shared_layers": 2, "use_double_wide_mlp": true, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96,
    });
    [("experts", of(experts)), ("shared", of(shared))]
}

fn model(sizes: &DecoderConfig, name: RecipeName) -> Decoder {
    decoder(sizes, &recipe(name, Fp8Format::Auto), &Device::Cpu, 0.1)
}

#[test]
fn prefill_chunks_and_decoding_have_the_logits_of_training() {
    let recipes = [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row];
    for ((family, sizes), name) in models().into_iter().flat_map(|of| recipes.map(|name| (of.clone(), name))) {
        expect_logits_of_training(model(&sizes, name), &format!("{family}, {}", name.as_str()));
    }
}

#[test]
fn batches_and_preemption_change_nothing() {
    for (family, sizes) in models() {
        let alone = |requests: Vec<Request>| -> Vec<Got> {
            let mut engine = Engine::new(model(&sizes, RecipeName::Fp32), &ROOMY).unwrap();
            requests.into_iter().flat_map(|request| run(&mut engine, vec![request])).collect()
        };
        let expected = alone(requests());
        for (max_batch, prefill_chunk, kv_cache_tokens) in [(8, 64, 2000), (3, 17, 2000), (8, 64, 128)] {
            let options = EngineOptions { max_batch, prefill_chunk, kv_cache_tokens, ..ROOMY };
            let mut engine = Engine::new(model(&sizes, RecipeName::Fp32), &options).unwrap();
            assert_eq!(run(&mut engine, requests()), expected, "{family}, {options:?}");
            assert_eq!(engine.stats().preemptions > 0, kv_cache_tokens < 2000, "{family}");
        }
    }
}

/// The blocks of the layers that read other layers' keys and values take no memory.
#[test]
fn layers_that_read_other_keys_have_no_cache() {
    let bytes = |sizes: &DecoderConfig| -> usize {
        let decoder = model(sizes, RecipeName::Fp32);
        let groups = decoder.kv_groups(200);
        groups.iter().map(|group| decoder.kv_block_bytes(group, 16, DType::F32)).sum()
    };
    let [(_, experts), (_, shared)] = models();
    // Keys and values of 16 tokens, and a counter for each key head.
    let of = |kv_heads: usize, head_dim: usize| 2 * kv_heads * 16 * head_dim * 4 + 4 * kv_heads;
    assert_eq!(bytes(&experts), 2 * (of(2, 16) + of(1, 32)));
    assert_eq!(bytes(&shared), of(2, 16) + of(2, 32));
}
