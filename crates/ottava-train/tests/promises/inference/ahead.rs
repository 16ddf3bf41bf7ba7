//! Asynchronous scheduling: steps that are launched before the host has read the tokens of the step before change no result.

use crate::inference::engine::{Got, ROOMY, collect, finish_into, prompt, requests, run};
use crate::setup::{decoder, devices_of, recipe, rotated, tiny_llama};
use ottava_engine::{Engine, EngineOptions, FinishReason, LogprobsMode, Request, RequestId, Sampling};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use std::collections::BTreeMap;

/// Returns requests whose draws do not depend on earlier tokens. They end by a stop token or at different lengths.
pub fn independent() -> Vec<Request> {
    let drawn = |seed| Sampling { temperature: 1.5, top_k: Some(40), top_p: 0.95, seed, ..Sampling::default() };
    let of = |name: &str, tokens| Request { prompt: prompt(name, tokens), max_new_tokens: 20, ..Request::default() };
    let biased = Sampling { logit_bias: vec![(5, 2.0), (9, -3.0)], ..drawn(4) };
    vec![
        of("a", 40),
        Request { sampling: drawn(1), logprobs: Some(0), ..of("b", 1) },
        Request { sampling: drawn(2), max_new_tokens: 45, ..of("b", 1) },
        Request { sampling: drawn(3), stop_ids: (0..12).collect(), ..of("d", 33) },
        Request { sampling: drawn(5), stop_ids: (0..40).collect(), min_new_tokens: 7, ..of("e", 5) },
        Request { sampling: biased, max_new_tokens: 60, ..of("f", 7) },
        Request { max_new_tokens: 1, ..of("g", 3) },
        Request { logprobs: Some(0), max_new_tokens: 33, ..of("h", 18) },
    ]
}

fn engine(name: RecipeName, device: &Device, options: EngineOptions) -> Engine {
    Engine::new(decoder(&tiny_llama(), &recipe(name, Fp8Format::Auto), device, 0.3), &options).expect("memory")
}

/// Returns the options with and without asynchronous scheduling.
fn both(options: EngineOptions) -> [EngineOptions; 2] {
    [false, true].map(|async_scheduling| EngineOptions { async_scheduling, ..options })
}

#[test]
fn results_do_not_depend_on_it() {
    // There is room for all requests, for few of them, or for few tokens, so that requests are preempted.
    let sizes = [
        ROOMY,
        EngineOptions { max_batch: 3, prefill_chunk: 17, ..ROOMY },
        EngineOptions { kv_cache_tokens: 128, max_model_len: 120, ..ROOMY },
        EngineOptions { logprobs_mode: LogprobsMode::Processed, batch_invariant: true, ..ROOMY },
        EngineOptions { logprobs_mode: LogprobsMode::Loss, prefix_caching: false, ..ROOMY },
    ];
    for (number, name) in RecipeName::ALL.into_iter().enumerate() {
        for device in devices_of(&recipe(name, Fp8Format::Auto)) {
            for options in rotated(&sizes, 2, number) {
                let [expected, found] = both(options).map(|options| {
                    let mut engine = engine(name, &device, options);
                    // In the second pass, blocks of ended requests are shared.
                    let got = [run(&mut engine, independent()), run(&mut engine, independent())];
                    (got, engine.stats())
                });
                assert_eq!(found, expected, "{} on {device}, {options:?}", name.as_str());
            }
        }
    }
}

/// A step in flight is read one call later: the first call only launches a step, and each further call reads one.
#[test]
fn the_next_step_is_launched_before_tokens_are_read() {
    let request = |seed| Request {
        prompt: prompt("x", 1),
        sampling: Sampling { temperature: 1.0, seed, ..Sampling::default() },
        max_new_tokens: 9,
        ..Request::default()
    };
    let events = both(ROOMY).map(|options| {
        let mut engine = engine(RecipeName::Bf16, &Device::Cpu, options);
        for seed in 0..4 {
            engine.add(request(seed)).unwrap();
        }
        let mut events = Vec::new();
        while !engine.is_idle() {
            events.push(engine.step().unwrap().len());
        }
        events
    });
    // The prompts are read in the first step, which draws the first tokens. With the last tokens come the ends.
    let tokens = [vec![4; 8], vec![8]].concat();
    assert_eq!(events, [tokens.clone(), [&tokens[..1], &[0], &tokens[1..]].concat()]);
}

/// Runs requests of all kinds. Some arrive late, some are held and resumed, and one is cancelled while a step is in flight.
fn disturbed(engine: &mut Engine) -> Vec<Got> {
    let mut ids: Vec<RequestId> = independent().into_iter().map(|request| engine.add(request).unwrap()).collect();
    let mut got = BTreeMap::new();
    let steps = |engine: &mut Engine, count, got: &mut _| (0..count).for_each(|_| collect(engine.step().unwrap(), got));
    steps(engine, 8, &mut got);
    engine.hold(ids[2]);
    engine.cancel(ids[5]);
    steps(engine, 3, &mut got);
    ids.extend(requests().into_iter().map(|request| engine.add(request).unwrap()));
    steps(engine, 5, &mut got);
    engine.resume(ids[2]);
    finish_into(engine, &mut got);
    assert_eq!(engine.stats().used_kv_blocks, 0, "memory comes back");
    ids.iter().map(|id| got.remove(id).expect("each request ends")).collect()
}

#[test]
fn requests_may_come_and_go_while_a_step_is_in_flight() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Row] {
        let [mut expected, mut found] = both(ROOMY).map(|options| disturbed(&mut engine(name, &Device::Cpu, options)));
        // The cancelled request has as many tokens as steps were read before.
        let [whole, cut] = [expected.remove(5), found.remove(5)];
        assert_eq!((cut.end, &cut.tokens[..]), (Some(FinishReason::Cancelled), &whole.tokens[..cut.tokens.len()]));
        assert!(!cut.tokens.is_empty());
        assert_eq!(found, expected, "{}", name.as_str());
    }
}
