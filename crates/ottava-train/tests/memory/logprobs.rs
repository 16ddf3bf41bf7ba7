//! The memory of log-probabilities in an engine.

use crate::{COUNTED, sizes};
use ottava_checkpoint::RandomWeights;
use ottava_engine::{Engine, EngineOptions, Event, LogprobsMode, Request};
use ottava_models::Decoder;
use ottava_recipe::param::Purpose;
use ottava_recipe::{KvCacheDtype, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::testing::allocator::CountingAllocator;
use serde_json::json;

const VOCABULARY: usize = 16_384;
const PROMPT: usize = 40;
const DRAWN: usize = 16;

fn engine() -> Engine {
    let sizes = sizes(json!({
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }));
    let mut config = RunConfig::default();
    config.precision.recipe = RecipeName::Fp32;
    let recipe = config.precision.recipe();
    let weights = &mut RandomWeights { seed: 1, device: Device::Cpu };
    let decoder = Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 256, weights).unwrap();
    let options = EngineOptions {
        max_model_len: 256,
        max_batch: 8,
        kv_cache_tokens: 2048,
        prefill_chunk: 128,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_caching: false,
        saved_states: 8,
        batch_invariant: false,
        async_scheduling: false,
        logprobs_mode: LogprobsMode::Raw,
    };
    Engine::new(decoder, &options).unwrap()
}

/// Returns all events of eight requests.
fn events(engine: &mut Engine, logprobs: Option<usize>, prompt_logprobs: Option<usize>) -> Vec<Event> {
    for seed in 0..8 {
        let prompt = (0..PROMPT as u32).map(|token| token * 7 + seed).collect();
        engine.add(Request { prompt, max_new_tokens: DRAWN, logprobs, prompt_logprobs, ..Request::default() }).unwrap();
    }
    let mut all = Vec::new();
    while !engine.is_idle() {
        all.extend(engine.step().unwrap());
    }
    all
}

#[test]
fn logprobs_take_memory_for_the_tokens_that_are_asked_for() {
    let _alone = COUNTED.lock().unwrap();
    let mut engine = engine();
    // The first call allocates threads and buffers that remain.
    drop(events(&mut engine, Some(3), None));
    for (logprobs, prompt_logprobs) in [(Some(1), None), (Some(100), None), (None, Some(5)), (None, Some(100))] {
        let before = CountingAllocator::live();
        let all = events(&mut engine, logprobs, prompt_logprobs);
        let held = CountingAllocator::live() - before;
        // The list of events may have twice the capacity that it needs. Each log-probability has 8 bytes.
        let of = |top: Option<usize>, tokens: usize| top.map_or(0, |top| 8 * tokens * (24 + 8 * top));
        let most = 2 * all.len() * size_of::<Event>() + of(logprobs, DRAWN) + of(prompt_logprobs, PROMPT) + (64 << 10);
        assert!(held <= most, "{logprobs:?} {prompt_logprobs:?}: {held} bytes are held, {most} expected");
        drop(all);
        let left = CountingAllocator::live().saturating_sub(before);
        assert!(left <= 64 << 10, "{left} bytes stay");
    }
}
