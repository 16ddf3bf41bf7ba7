//! Models with recurrent layers: prompts in chunks, decoding, batches and preemption give the bits of training.

use crate::inference::engine::{Got, ROOMY, request, requests, run};
use crate::inference::speculative::NGRAM;
use crate::setup::{config, decoder, kv_cache, logits, next_logits, recipe, sequences};
use ottava_engine::{Draft, Engine, EngineOptions, Proposer, Request};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::Resident;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::testing::{Tolerance, assert_close, integers};
use ottava_tensor::{Device, Tensor};
use serde_json::{Value, json};

const RECIPES: [RecipeName; 4] = [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Block];

/// Returns models with gated delta nets and with Mamba-2 layers: experts and projections by key heads, an MLP and flat projections, a state space
/// beside attention, and layers of one sublayer. The last model has no attention layer.
fn models() -> [(&'static str, DecoderConfig); 5] {
    let of = |keys: Value| {
        let mut all = json!({
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 200, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config(all)
    };
    let (delta, attention) = ("linear_attention", "full_attention");
    let experts = json!({
        "model_type": "qwen3_next", "layer_types": [delta, attention], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1],
    });
    let falcon = json!({
        "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.8], "mlp_multipliers": [0.9, 1.5], "attention_out_multiplier": 1.3,
    });
    let nemotron = json!({
        "model_type": "nemotron_h", "hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_latent_size": 48,
        "moe_shared_expert_intermediate_size": 48,
    });
    let dense = |layer_types: [&str; 2]| of(json!({"model_type": "qwen3_5_text", "layer_types": layer_types}));
    [
        ("qwen3-next", of(experts)),
        ("qwen3-5", dense([attention, delta])),
        ("falcon-h1", of(falcon)),
        ("nemotron-h", of(nemotron)),
        ("no attention", dense([delta; 2])),
    ]
}

fn model(sizes: &DecoderConfig, name: RecipeName) -> Decoder {
    decoder(sizes, &recipe(name, Fp8Format::Auto), &Device::Cpu, 0.3)
}

#[test]
fn prefill_chunks_and_decoding_have_the_logits_of_training() {
    const TOKENS: usize = 50;
    let ids = integers("tokens", TOKENS, 96);
    let text: Vec<u32> = ids.to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect();
    for ((family, sizes), name) in models().into_iter().flat_map(|of| RECIPES.map(|name| (of.clone(), name))) {
        let (mut decoder, what) = (model(&sizes, name), format!("{family}, {}", name.as_str()));
        let rows: Vec<i32> = (0..TOKENS as i32).collect();
        let sequences = sequences(&Device::Cpu, 1, TOKENS);
        let hidden = decoder.forward(0, &ids, &sequences, StepPrecision::Recipe, &mut Resident).unwrap().0;
        let trained = decoder.logits(&hidden, &Tensor::from_slice(&Device::Cpu, &[TOKENS], &rows).unwrap()).unwrap();
        assert_close(&format!("{what}: prefill"), &trained, &logits(&decoder, &ids), Tolerance::Exact);
        for piece in [1, 7] {
            let mut cache = kv_cache(&decoder, TOKENS);
            for start in (0..TOKENS).step_by(piece) {
                let end = TOKENS.min(start + piece);
                let found = next_logits(&decoder, &mut cache, &text[..end], end - start);
                let expected = trained.rows(start, end).unwrap();
                assert_close(&format!("{what}: tokens from {start}"), &expected, &found, Tolerance::Exact);
            }
        }
    }
}

/// Returns the result of each request computed alone.
fn alone(sizes: &DecoderConfig, name: RecipeName, requests: Vec<Request>) -> Vec<Got> {
    let mut engine = Engine::new(model(sizes, name), &ROOMY).unwrap();
    requests.into_iter().flat_map(|request| run(&mut engine, vec![request])).collect()
}

#[test]
fn batches_and_preemption_change_nothing() {
    for (family, sizes) in models() {
        for name in [RecipeName::Fp32, RecipeName::Fp8Row] {
            let expected = alone(&sizes, name, requests());
            // There is room for the longest request alone, or for all.
            for (max_batch, prefill_chunk, kv_cache_tokens) in
                [(8, 64, 2000), (3, 17, 2000), (2, 1000, 2000), (8, 64, 128)]
            {
                let options = EngineOptions { max_batch, prefill_chunk, kv_cache_tokens, ..ROOMY };
                let mut engine = Engine::new(model(&sizes, name), &options).unwrap();
                // In the second pass, slots hold the states of ended requests.
                for time in 0..2 {
                    let found = run(&mut engine, requests());
                    assert_eq!(found, expected, "{family}, {}, {options:?}, time {time}", name.as_str());
                }
                // Without attention layers, no request needs blocks.
                let has_attention = sizes.heads().is_some();
                assert_eq!(engine.stats().preemptions > 0, kv_cache_tokens < 2000 && has_attention, "{family}");
            }
        }
    }
}

/// A block of the cache has no state of its end, so requests that begin with the same tokens share nothing.
#[test]
fn requests_share_no_beginnings() {
    let (_, sizes) = models()[0].clone();
    let mut engine = Engine::new(model(&sizes, RecipeName::Fp32), &ROOMY).unwrap();
    let [first, second] = [(); 2].map(|()| run(&mut engine, vec![request("a", 128)]));
    assert_eq!((first, engine.stats().prefix_queries, engine.stats().prefix_hits), (second, 0, 0));
}

/// The states of an engine that borrows its model have no memory between calls.
#[test]
fn a_lent_model_has_the_same_results_in_each_call() {
    let (_, sizes) = models()[1].clone();
    let expected = alone(&sizes, RecipeName::Bf16, requests());
    let mut model = model(&sizes, RecipeName::Bf16);
    let mut engine = Engine::to_lend(&model, &ROOMY).unwrap();
    for _ in 0..2 {
        let found = engine.lend(&mut model, |engine| Ok(run(engine, requests()))).unwrap();
        assert_eq!(found, expected);
    }
}

#[test]
fn speculation_is_refused() {
    for (family, sizes) in models() {
        let mut engine = Engine::new(model(&sizes, RecipeName::Fp32), &ROOMY).unwrap();
        let error = engine.speculate(Proposer::Ngram(NGRAM)).unwrap_err().to_string();
        assert!(error.contains("the model has recurrent layers") && error.contains("speculation"), "{family}: {error}");
        let draft = Draft::new(model(&sizes, RecipeName::Fp32), 3, &ROOMY, 96);
        let error = draft.map(drop).unwrap_err().to_string();
        assert!(error.contains("the draft model has recurrent layers"), "{family}: {error}");
    }
}
