//! Models with recurrent layers: prompts in chunks, decoding, batches, shared beginnings, speculation and preemption give the bits of training.

use crate::inference::engine::{Got, ROOMY, alike, prompt, requests, run};
use crate::inference::speculative::{NGRAM, SOURCES, expect_same};
use crate::setup::{config, decoder, kv_cache, logits, next_logits, recipe, rotated, sequences};
use ottava_engine::{Engine, EngineOptions, Proposer, Request};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::Resident;
use ottava_recipe::{Fp8Format, KvCacheDtype, RecipeName};
use ottava_tensor::testing::{Tolerance, assert_close, integers};
use ottava_tensor::{Device, Tensor};
use serde_json::{Value, json};

const RECIPES: [RecipeName; 4] = [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Block];

/// Returns models with gated delta nets and with Mamba-2 layers: experts and projections by key heads, an MLP and flat projections, a state space
/// beside attention, and layers of one sublayer. The last model has no attention layer.
pub fn models() -> [(&'static str, DecoderConfig); 5] {
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

/// Checks that prompts in one pass and in pieces, and decoding, have the logits of training. An error calls the model `what`.
pub fn expect_logits_of_training(mut decoder: Decoder, what: &str) {
    const TOKENS: usize = 50;
    let ids = integers("tokens", TOKENS, 96);
    let text: Vec<u32> = ids.to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect();
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

#[test]
fn prefill_chunks_and_decoding_have_the_logits_of_training() {
    for ((family, sizes), name) in models().into_iter().flat_map(|of| RECIPES.map(|name| (of.clone(), name))) {
        expect_logits_of_training(model(&sizes, name), &format!("{family}, {}", name.as_str()));
    }
}

/// Returns the result of each request computed alone.
fn alone(sizes: &DecoderConfig, name: RecipeName, requests: Vec<Request>) -> Vec<Got> {
    let options = EngineOptions { prefix_caching: false, ..ROOMY };
    let mut engine = Engine::new(model(sizes, name), &options).unwrap();
    requests.into_iter().flat_map(|request| run(&mut engine, vec![request])).collect()
}

#[test]
fn batches_and_preemption_change_nothing() {
    // There is room for the longest request alone, or for all.
    let room = [(8, 64, 2000), (8, 64, 128), (3, 17, 2000), (2, 1000, 2000)];
    for (number, (family, sizes)) in models().into_iter().enumerate() {
        for (column, name) in [RecipeName::Fp32, RecipeName::Fp8Row].into_iter().enumerate() {
            let expected = alone(&sizes, name, requests());
            for (max_batch, prefill_chunk, kv_cache_tokens) in rotated(&room, 2, number + column) {
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

/// Returns how many tokens of each of these prompts are found in an engine of a model with `saved_states`.
fn found(sizes: &DecoderConfig, saved_states: usize, prompts: &[Vec<u32>]) -> Vec<u64> {
    let options = EngineOptions { saved_states, ..ROOMY };
    let mut engine = Engine::new(model(sizes, RecipeName::Fp32), &options).unwrap();
    let of = |prompt: &Vec<u32>| {
        let before = engine.stats().prefix_hits;
        let request = Request { prompt: prompt.clone(), max_new_tokens: 1, ..Request::default() };
        run(&mut engine, vec![request]);
        engine.stats().prefix_hits - before
    };
    prompts.iter().map(of).collect()
}

/// States are saved at the end of the last full block of a prompt, and where the beginnings of two prompts end.
#[test]
fn requests_share_beginnings_up_to_a_saved_state() {
    let after = |tokens: usize, end: &str| [&prompt("whole", 100)[..tokens], &prompt(end, 40)[..]].concat();
    let [a, b, c, longer] = [after(70, "a"), after(70, "b"), after(70, "c"), after(100, "d")];
    for (family, sizes) in models() {
        assert_eq!(found(&sizes, 0, &[a.clone(), a.clone()]), [0, 0], "{family}: no state is saved");
        let of_same = found(&sizes, 8, &[a.clone(), a.clone(), [&a[..], &b[..40]].concat()]);
        assert_eq!(of_same, [0, 96, 96], "{family}");
        // Without attention, no blocks show where the beginnings of two prompts end.
        let third = if sizes.heads().is_some() { 64 } else { 0 };
        assert_eq!(
            found(&sizes, 8, &[a.clone(), b.clone(), c.clone(), longer.clone()]),
            [0, 0, third, third],
            "{family}"
        );
        // Each prompt needs the only place.
        assert_eq!(found(&sizes, 1, &[a.clone(), longer.clone(), a.clone(), a.clone()]), [0, 0, 0, 96], "{family}");
    }
}

/// The states of a completion are saved too, in place of its earlier states, so that a further turn of a chat continues after most of the completion.
#[test]
fn a_further_turn_continues_after_a_completion() {
    let (_, mut sizes) = models()[0].clone();
    sizes.max_positions = 600;
    let options = EngineOptions { max_model_len: 600, saved_states: 3, ..ROOMY };
    let engine = |options| Engine::new(model(&sizes, RecipeName::Fp32), &options).unwrap();
    let of =
        |prompt: Vec<u32>, max_new_tokens| Request { prompt, max_new_tokens, logprobs: Some(1), ..Request::default() };
    let mut computed = engine(EngineOptions { prefix_caching: false, ..options });
    let first = prompt("first", 40);
    let answer = run(&mut computed, vec![of(first.clone(), 500)]).remove(0).tokens;
    let further = [&first[..], &answer, &prompt("second", 20)].concat();
    let expected = run(&mut computed, vec![of(further.clone(), 5)]);
    for speculates in [false, true] {
        let mut engine = engine(options);
        if speculates {
            engine.speculate(Proposer::Ngram(NGRAM)).unwrap();
        }
        assert_eq!(run(&mut engine, vec![of(first.clone(), 500)])[0].tokens, answer);
        assert_eq!(engine.stats().accepted_tokens > 0, speculates);
        // The states of the prompt and of the completion are saved, and a place is left for the states before proposed tokens.
        run(&mut engine, vec![of(first.clone(), 1)]);
        assert_eq!(engine.stats().prefix_hits, 32);
        assert_eq!(run(&mut engine, vec![of(further.clone(), 5)]), expected);
        assert_eq!(engine.stats().prefix_hits, 32 + 512);
    }
}

/// Blocks and saved states are few or many, so requests are preempted, and states are forgotten, or neither.
#[test]
fn requests_that_share_states_get_what_others_get() {
    for ((family, sizes), name) in models().into_iter().zip(RECIPES.into_iter().cycle()) {
        let expected: Vec<Got> = alone(&sizes, name, alike());
        for (kv_cache_tokens, max_batch, prefill_chunk, saved_states) in
            [(2000, 8, 64, 8), (2000, 1, 17, 2), (160, 2, 64, 8), (224, 8, 40, 1)]
        {
            let options = EngineOptions { kv_cache_tokens, max_batch, prefill_chunk, saved_states, ..ROOMY };
            let mut engine = Engine::new(model(&sizes, name), &options).unwrap();
            for time in 0..2 {
                let found = run(&mut engine, alike());
                assert_eq!(found, expected, "{family}, {}, {options:?}, time {time}", name.as_str());
            }
            let stats = engine.stats();
            assert!(stats.prefix_hits > 0 && stats.prefix_hits < stats.prefix_queries, "{family}: {stats:?}");
            let is_scarce = kv_cache_tokens < 2000 && sizes.heads().is_some();
            assert_eq!(stats.preemptions > 0, is_scarce, "{family}: {stats:?}");
        }
    }
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

/// A rejected token changes no state. With one place for saved states, few requests get proposals.
#[test]
fn speculation_changes_nothing() {
    let options = [ROOMY, EngineOptions { saved_states: 1, max_batch: 3, ..ROOMY }];
    for (((_, sizes), name), source) in
        models().into_iter().zip(RECIPES.into_iter().cycle()).zip(SOURCES.into_iter().cycle())
    {
        expect_same(&sizes, name, KvCacheDtype::Auto, &options, &[source]);
    }
}

/// The states before proposed tokens need a place.
#[test]
fn speculation_without_saved_states_is_refused() {
    let (_, sizes) = models()[0].clone();
    let options = EngineOptions { saved_states: 0, ..ROOMY };
    let mut engine = Engine::new(model(&sizes, RecipeName::Fp32), &options).unwrap();
    let error = engine.speculate(Proposer::Ngram(NGRAM)).unwrap_err().to_string();
    assert!(error.contains("the model has recurrent layers") && error.contains("without speculation"), "{error}");
}
