//! The inference engine: its logits equal the logits of training, and the result of a request depends only on the request.

use crate::inference::speculative::NGRAM;
use crate::setup::{
    Seeded, decoder, devices, devices_of, finish_step, kv_cache, logits, losses_and_gradients, next_logits, recipe,
    recipes, sequences, tiny_llama,
};
use ottava_engine::{
    Engine, EngineOptions, EngineStats, Event, FinishReason, LogprobsMode, Proposer, Request, RequestId, Sampling,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, Resident};
use ottava_recipe::{Fp8Format, KvCacheDtype, Recipe, RecipeName};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::testing::{Tolerance, assert_close, integers, values};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::BTreeMap;

pub const ROOMY: EngineOptions = EngineOptions {
    max_model_len: 200,
    max_batch: 8,
    kv_cache_tokens: 2000,
    prefill_chunk: 64,
    kv_cache_dtype: KvCacheDtype::Auto,
    prefix_caching: true,
    saved_states: 8,
    batch_invariant: false,
    async_scheduling: false,
    logprobs_mode: LogprobsMode::Raw,
};

fn model(recipe: &Recipe, device: &Device) -> Decoder {
    decoder(&tiny_llama(), recipe, device, 0.3)
}

pub fn prompt(name: &str, tokens: usize) -> Vec<u32> {
    integers(name, tokens, 96).to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect()
}

pub fn request(name: &str, tokens: usize) -> Request {
    Request { prompt: prompt(name, tokens), max_new_tokens: 20, logprobs: Some(2), ..Request::default() }
}

/// Returns requests of many kinds. The first request has 40 tokens and is greedy.
pub fn requests() -> Vec<Request> {
    let drawn = |seed| Sampling { temperature: 1.5, top_k: Some(40), top_p: 0.95, seed, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.3, frequency_penalty: 0.4, ..Sampling::default() };
    vec![
        request("a", 40),
        Request { sampling: drawn(1), ..request("b", 1) },
        Request { sampling: drawn(2), max_new_tokens: 45, ..request("b", 1) },
        Request { sampling: penalised, prompt_logprobs: Some(1), ..request("c", 90) },
        Request { sampling: Sampling { min_p: 0.2, ..drawn(3) }, ..request("d", 33) },
        Request { max_new_tokens: 60, prompt_logprobs: Some(0), ..request("e", 7) },
    ]
}

/// The result of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Got {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<ottava_engine::TokenLogprob>,
    pub prompt: Vec<Option<ottava_engine::TokenLogprob>>,
    pub embedding: Vec<f32>,
    pub end: Option<FinishReason>,
}

/// Adds the events of a step to the results of requests.
pub fn collect(events: Vec<Event>, got: &mut BTreeMap<RequestId, Got>) {
    for event in events {
        match event {
            Event::Prompt { id, logprobs } => got.entry(id).or_default().prompt = logprobs,
            Event::Token { id, token, logprob, .. } => {
                let got = got.entry(id).or_default();
                got.tokens.push(token);
                got.logprobs.extend(logprob);
            }
            Event::Embedding { id, values } => got.entry(id).or_default().embedding = values,
            Event::Finished { id, reason, .. } => {
                assert_eq!(got.entry(id).or_default().end.replace(reason), None, "a request ends once");
            }
        }
    }
}

/// Runs steps until the engine is idle. Panics after too many steps, so that a deadlock is noticed.
pub fn finish(engine: &mut Engine) -> BTreeMap<RequestId, Got> {
    let mut got = BTreeMap::new();
    finish_into(engine, &mut got);
    got
}

/// Runs steps until the engine is idle, and adds to the earlier results of requests.
pub fn finish_into(engine: &mut Engine, got: &mut BTreeMap<RequestId, Got>) {
    for _ in 0..1000 {
        if engine.is_idle() {
            return;
        }
        collect(engine.step().expect("a step"), got);
    }
    panic!("requests are left: {:?}", engine.stats());
}

pub fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Got> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.add(request).expect("it fits")).collect();
    let mut got = finish(engine);
    assert_eq!(engine.stats().used_kv_blocks, 0, "memory comes back");
    ids.iter().map(|id| got.remove(id).expect("each request ends")).collect()
}

fn engine(recipe: &Recipe, options: EngineOptions) -> Engine {
    Engine::new(model(recipe, &Device::Cpu), &options).expect("memory")
}

/// Returns the result of each request computed alone.
fn alone(recipe: &Recipe, requests: Vec<Request>) -> Vec<Got> {
    let mut engine = engine(recipe, EngineOptions { prefix_caching: false, ..ROOMY });
    requests.into_iter().flat_map(|request| run(&mut engine, vec![request])).collect()
}

#[test]
fn logits_are_those_of_training() {
    let (ids, rows) = (integers("tokens", 50, 96), (0..50).collect::<Vec<i32>>());
    let trained = |decoder: &mut Decoder, ids: &Tensor| {
        let whole = sequences(ids.device(), 1, 50);
        let forward = decoder.forward(0, ids, &whole, StepPrecision::Recipe, &mut Resident).unwrap().0;
        decoder.logits(&forward, &Tensor::from_slice(ids.device(), &[50], &rows).unwrap()).unwrap()
    };
    let in_f32 = trained(&mut model(&recipe(RecipeName::Fp32, Fp8Format::Auto), &Device::Cpu), &ids);
    for (name, recipe) in recipes() {
        let mut on_the_cpu: Option<Tensor> = None;
        for device in devices_of(&recipe) {
            let mut decoder = model(&recipe, &device);
            let ids = ids.to_device(&device).unwrap();
            if recipe.name == RecipeName::Fp8Delayed {
                // These scales do not come from a tensor of the pass.
                losses_and_gradients(&mut decoder, &ids, &ids, 1, 0.02).unwrap();
                finish_step(&mut decoder);
            }
            let by_token = decoder.scale_by_token().unwrap();
            assert_eq!(by_token, matches!(recipe.name, RecipeName::Fp8Current | RecipeName::Nvfp4), "{name}");
            if recipe.smooth_swiglu {
                continue;
            }
            let expected = trained(&mut decoder, &ids);
            let found = logits(&decoder, &ids);
            match &on_the_cpu {
                None => assert_close(&format!("{name} on {device}"), &expected, &found, Tolerance::Exact),
                // On a GPU, attention adds up in another order, and rounds probabilities to 16 bits. This changes codes downstream by no more than the
                // GPU's sums change training's forward. Training does not round probabilities in F16, so there the bound is the change from F32.
                Some(on_the_cpu) => {
                    let (own, between) = (mean_difference(&found, &expected), mean_difference(&expected, on_the_cpu));
                    let rounding = mean_difference(on_the_cpu, &in_f32);
                    // A scale of MX changes by a factor of 2, and a code of four bits by up to a half.
                    let allowed = match (recipe.name, recipe.compute) {
                        (_, DType::F16) => rounding,
                        (RecipeName::Nvfp4, _) => rounding / 2.0,
                        (name, _) => between * if name == RecipeName::Mxfp8 { 3.0 } else { 2.0 },
                    };
                    assert!(
                        own <= allowed,
                        "{name} on {device}: {own} from training's forward, which is {between} from the CPU's; {rounding} from F32"
                    );
                }
            }
            on_the_cpu.get_or_insert(expected);
        }
    }
}

/// Returns the mean absolute difference of two F32 tensors.
fn mean_difference(a: &Tensor, b: &Tensor) -> f64 {
    let [a, b] = [a, b].map(|t| t.to_device(&Device::Cpu).unwrap().to_vec::<f32>().unwrap());
    a.iter().zip(&b).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / a.len() as f64
}

/// Recipes with products of codes, BF16 and F32 are tested, with any chunks of prompts and any number of requests.
#[test]
fn what_a_request_gets_does_not_depend_on_others() {
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let recipe = recipe(name, Fp8Format::Auto);
        let expected = alone(&recipe, requests());
        for (max_batch, prefill_chunk) in [(8, 64), (3, 17), (8, 1), (2, 1000)] {
            let mut engine = engine(&recipe, EngineOptions { max_batch, prefill_chunk, ..ROOMY });
            let found = run(&mut engine, requests());
            assert_eq!(found, expected, "{} in batches of {max_batch}, chunks of {prefill_chunk}", name.as_str());
        }
    }
}

#[test]
fn preemption_changes_nothing_and_every_request_ends() {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let unscored = || requests().into_iter().map(|request| Request { prompt_logprobs: None, ..request }).collect();
    // There is room for the longest request alone, of 110 tokens in blocks of 32, or for one block more. Scored prompts take so many steps that the
    // other requests have ended before.
    for (kv_cache_tokens, requests) in [(128, requests()), (160, unscored())] {
        let expected = alone(&recipe, requests.clone());
        let mut engine = engine(&recipe, EngineOptions { kv_cache_tokens, ..ROOMY });
        assert_eq!(run(&mut engine, requests), expected);
        assert!(engine.stats().preemptions > 0, "{:?}", engine.stats());
    }
}

/// Returns requests with the same beginning. One of them continues like another one, and one computes all of its prompt.
pub fn alike() -> Vec<Request> {
    let whole = prompt("alike", 100);
    let of = |tokens: usize, tail: &str, new: usize| {
        let prompt = [&whole[..tokens], &prompt(tail, 9)[..]].concat();
        let sampling = Sampling { temperature: 1.0, seed: tokens as u64, ..Sampling::default() };
        Request { prompt, sampling, max_new_tokens: new, logprobs: Some(1), ..Request::default() }
    };
    let exact = Request { prompt: whole[..64].to_vec(), ..of(64, "a", 30) };
    let scored = Request { prompt_logprobs: Some(1), ..of(90, "a", 5) };
    // The third token of the first block differs.
    let mut other = of(90, "a", 5);
    other.prompt[2] ^= 1;
    vec![of(90, "a", 40), of(90, "b", 10), exact, of(64, "c", 40), scored, other, of(100, "a", 20), of(90, "a", 40)]
}

/// The cache has the model's type, or is FP8 with scales in the blocks. It has room for all requests, or blocks are evicted and requests preempted.
#[test]
fn requests_that_share_blocks_get_what_others_get() {
    for (name, kv_cache_dtype) in [
        (RecipeName::Fp32, KvCacheDtype::Auto),
        (RecipeName::Bf16, KvCacheDtype::Fp8),
        (RecipeName::Fp8Current, KvCacheDtype::Fp8),
        (RecipeName::Fp8Row, KvCacheDtype::Auto),
    ] {
        let recipe = recipe(name, Fp8Format::Auto);
        let options = EngineOptions { kv_cache_dtype, ..ROOMY };
        let mut alone = engine(&recipe, EngineOptions { prefix_caching: false, ..options });
        let expected: Vec<Got> = alike().into_iter().flat_map(|request| run(&mut alone, vec![request])).collect();
        assert_eq!((alone.stats().prefix_queries, alone.stats().prefix_hits), (0, 0));
        for (kv_cache_tokens, max_batch, prefill_chunk) in [(2000, 8, 64), (2000, 1, 17), (224, 8, 40), (160, 2, 64)] {
            let mut engine = engine(&recipe, EngineOptions { kv_cache_tokens, max_batch, prefill_chunk, ..options });
            // In the second pass, blocks of ended requests are found, including blocks of their outputs.
            for time in 0..2 {
                let found = run(&mut engine, alike());
                assert_eq!(found, expected, "{name:?}, time {time}, {kv_cache_tokens} tokens, batches of {max_batch}");
            }
            let stats = engine.stats();
            assert!(stats.prefix_hits > 0 && stats.prefix_hits < stats.prefix_queries, "{stats:?}");
            assert!((stats.preemptions > 0) == (kv_cache_tokens < 2000), "{stats:?}");
        }
    }
}

/// Three of four equal blocks are found, since the last token is always computed.
#[test]
fn equal_beginnings_are_computed_once() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let of = |config: &DecoderConfig| {
        let mut engine = Engine::new(decoder(config, &recipe, &Device::Cpu, 0.3), &ROOMY).unwrap();
        let request = || Request { max_new_tokens: 1, ..request("a", 128) };
        run(&mut engine, vec![request()]);
        run(&mut engine, vec![request(), request()]);
        let stats = engine.stats();
        (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens)
    };
    assert_eq!(of(&tiny_llama()), (3 * 128, 2 * 96, 128 + 2 * 32));
    assert_eq!(of(&windowed()), (0, 0, 3 * 128), "blocks of a window are given back");
}

#[test]
fn requests_end_where_they_should() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut engine = engine(&recipe, EngineOptions { max_model_len: 64, kv_cache_tokens: 96, ..ROOMY });
    let plain = run(&mut engine, vec![request("a", 40)]).remove(0);
    assert_eq!((plain.tokens.len(), plain.end), (20, Some(FinishReason::Length)));
    let long = run(&mut engine, vec![Request { max_new_tokens: usize::MAX, ..request("a", 40) }]).remove(0);
    assert_eq!((long.tokens.len(), long.end), (24, Some(FinishReason::Length)), "the model's room");
    assert_eq!(long.tokens[..20], plain.tokens);
    let stop = plain.tokens[6];
    let first = plain.tokens.iter().position(|&token| token == stop).unwrap();
    let stopped = run(&mut engine, vec![Request { stop_ids: vec![95, stop], ..request("a", 40) }]).remove(0);
    assert_eq!((stopped.tokens.as_slice(), stopped.end), (&plain.tokens[..=first], Some(FinishReason::Stop)));
    let later = Request { stop_ids: vec![stop], min_new_tokens: first + 1, ..request("a", 40) };
    let later = run(&mut engine, vec![later]).remove(0);
    assert_eq!(later.tokens[..first], plain.tokens[..first]);
    assert_ne!(later.tokens[first], stop, "too early");
    let nothing = Request { max_new_tokens: 0, prompt_logprobs: Some(0), ..request("a", 40) };
    let nothing = run(&mut engine, vec![nothing]).remove(0);
    assert_eq!((nothing.tokens.len(), nothing.prompt.len(), nothing.end), (0, 40, Some(FinishReason::Length)));
    for (wrong, words) in [
        (Request { prompt: vec![], ..request("a", 1) }, "the prompt is empty"),
        (request("a", 64), "the prompt has 64 tokens; the model has room for 64"),
        (Request { prompt: vec![5, 96], ..request("a", 1) }, "token 96, the model's vocabulary ends at 96"),
        (Request { sampling: Sampling { top_p: 2.0, ..Sampling::default() }, ..request("a", 1) }, "`top_p` is 2"),
    ] {
        let error = engine.add(wrong).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(engine.is_idle());
}

/// A request is held while its client does not read, and gets the same result after it is resumed.
#[test]
fn holding_a_request_changes_nothing_and_frees_its_memory() {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let expected = alone(&recipe, requests());
    let mut engine = engine(&recipe, EngineOptions { max_batch: 4, prefill_chunk: 32, ..ROOMY });
    let ids: Vec<RequestId> = requests().into_iter().map(|request| engine.add(request).unwrap()).collect();
    let mut got: BTreeMap<RequestId, Got> = BTreeMap::new();
    for steps in [0, 3, 1, 4] {
        for _ in 0..steps {
            collect(engine.step().unwrap(), &mut got);
        }
        let before = engine.stats();
        ids.iter().for_each(|&id| engine.hold(id));
        let held = engine.stats();
        assert_eq!((held.running, held.waiting, held.used_kv_blocks), (0, 0, 0));
        assert!(held.held == before.running + before.waiting && engine.is_idle(), "{held:?}");
        assert_eq!(engine.step().unwrap(), []);
        ids.iter().rev().for_each(|&id| engine.resume(id));
    }
    engine.hold(RequestId(99));
    engine.resume(RequestId(99));
    finish_into(&mut engine, &mut got);
    assert_eq!(ids.iter().map(|id| got.remove(id).unwrap()).collect::<Vec<_>>(), expected);
    let held = engine.add(request("a", 40)).unwrap();
    engine.hold(held);
    engine.cancel(held);
    assert_eq!(finish(&mut engine)[&held].end, Some(FinishReason::Cancelled));
    assert_eq!((engine.stats().held, engine.stats().used_kv_blocks), (0, 0));
}

#[test]
fn cancelled_requests_give_their_memory_back() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let expected = alone(&recipe, requests())[0].clone();
    let mut engine = engine(&recipe, EngineOptions { max_batch: 2, ..ROOMY });
    let [running, kept, waiting] = ["x", "a", "y"].map(|name| engine.add(request(name, 40)).unwrap());
    for _ in 0..4 {
        engine.step().unwrap();
    }
    assert_eq!((engine.stats().running, engine.stats().waiting), (2, 1));
    let used = engine.stats().used_kv_blocks;
    engine.cancel(running);
    engine.cancel(waiting);
    engine.cancel(RequestId(99));
    assert_eq!(engine.stats().used_kv_blocks, used / 2);
    let got = finish(&mut engine);
    assert_eq!((got[&running].end, got[&waiting].end), (Some(FinishReason::Cancelled), Some(FinishReason::Cancelled)));
    assert!(expected.tokens.ends_with(&got[&kept].tokens) && got[&kept].end == expected.end);
    engine.cancel(kept);
    assert!(engine.is_idle(), "a finished request is not cancelled");
}

/// Returns a model in which every other layer has a window, with soft caps as in Gemma 2.
pub fn windowed() -> DecoderConfig {
    let mut sizes = tiny_llama();
    sizes.head.cap = Some(9.0);
    for (layer, heads) in sizes.heads_mut().enumerate() {
        (heads.window, heads.soft_cap) = (layer.is_multiple_of(2).then_some(20), Some(5.0));
    }
    sizes
}

#[test]
fn logprobs_are_those_of_the_logits() {
    // Most blocks of the layers with a window are returned before the request ends.
    for (config, options) in
        [(tiny_llama(), ROOMY), (windowed(), EngineOptions { prefill_chunk: 17, max_batch: 1, ..ROOMY })]
    {
        expect_logprobs_of_the_logits(&config, &options);
    }
}

fn expect_logprobs_of_the_logits(config: &DecoderConfig, options: &EngineOptions) {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let model = || decoder(config, &recipe, &Device::Cpu, 0.3);
    let got = run(&mut Engine::new(model(), options).unwrap(), vec![requests().remove(3)]).remove(0);
    let decoder = model();
    let tokens: Vec<u32> = prompt("c", 90).into_iter().chain(got.tokens.iter().copied()).collect();
    let all = values(&next_logits(&decoder, &mut kv_cache(&decoder, tokens.len()), &tokens, tokens.len()));
    assert_eq!((got.prompt.len(), got.prompt[0].as_ref()), (90, None));
    let given = got.prompt[1..].iter().flatten().chain(&got.logprobs);
    let mut compared = 0;
    for (row, (given, &token)) in all.chunks_exact(96).zip(given.zip(&tokens[1..])) {
        let sum = row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        assert_eq!(given.token, token);
        // The engine rounds logits and the result to F32, in which numbers between 4 and 8 have steps of 4.8e-7. Differences of up to three steps are
        // seen.
        assert!((f64::from(given.logprob) - (row[token as usize] - sum)).abs() < 1e-5);
        let best = (0..96).reduce(|a, b| if row[b] > row[a] { b } else { a }).unwrap();
        assert_eq!(given.top[0].0 as usize, best);
        compared += 1;
    }
    assert_eq!(compared, 109);
}

/// The distribution that tokens are drawn from is computed here from the model's own, which the same draws report in the other mode.
#[test]
fn processed_log_probabilities_are_those_of_the_distribution_of_draws() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let sampling = Sampling { temperature: 1.5, top_k: Some(5), seed: 7, ..Sampling::default() };
    let got = |logprobs_mode, logprobs| {
        let of = |sampling| Request { sampling, logprobs: Some(logprobs), prompt_logprobs: Some(1), ..request("c", 9) };
        let requests = vec![of(sampling.clone()), of(Sampling::default())];
        run(&mut engine(&recipe, EngineOptions { logprobs_mode, ..ROOMY }), requests)
    };
    let [raw, processed, without_top] =
        [(LogprobsMode::Raw, 96), (LogprobsMode::Processed, 3), (LogprobsMode::Processed, 0)]
            .map(|(mode, top)| got(mode, top));
    let close = |a: f64, b: f32| assert!((a - f64::from(b)).abs() < 1e-5, "{a} {b}");
    assert_eq!((&raw[0].tokens, &raw[1].tokens), (&processed[0].tokens, &processed[1].tokens));
    for ((raw, processed), alone) in raw[0].logprobs.iter().zip(&processed[0].logprobs).zip(&without_top[0].logprobs) {
        let five = raw.top[..5].iter().map(|&(token, logprob)| (token, f64::from(logprob) / 1.5)).collect::<Vec<_>>();
        let sum = five.iter().map(|(_, x)| x.exp()).sum::<f64>().ln();
        let expected = five.iter().find(|(token, _)| *token == raw.token).expect("it is one of five").1 - sum;
        close(expected, processed.logprob);
        close(expected, alone.logprob);
        for (&(token, logprob), (expected, x)) in processed.top.iter().zip(&five) {
            assert_eq!(token, *expected);
            close(x - sum, logprob);
        }
    }
    // Greedy draws have no temperature, and prompts are not drawn.
    for (raw, processed) in raw[1].logprobs.iter().zip(&processed[1].logprobs) {
        close(f64::from(raw.logprob), processed.logprob);
    }
    assert_eq!(raw[0].prompt, processed[0].prompt);
}

/// Greedy texts of a random model diverge at the first near tie. So the log-probabilities of one text are compared, with a model whose logits hardly
/// amplify the rounding of the cache. Scales that are wrong by 5 % exceed the bound.
#[test]
fn a_cache_in_fp8_is_close_to_an_exact_one() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    for device in devices() {
        let scores = |kv_cache_dtype| {
            let model = decoder(&tiny_llama(), &recipe, &device, 0.1);
            let options = EngineOptions { kv_cache_dtype, prefill_chunk: 8, ..ROOMY };
            let request = Request { prompt_logprobs: Some(0), max_new_tokens: 0, ..request("c", 90) };
            let got = run(&mut Engine::new(model, &options).expect("memory"), vec![request]).remove(0);
            got.prompt.into_iter().flatten().map(|scored| f64::from(scored.logprob)).collect::<Vec<_>>()
        };
        let exact = scores(KvCacheDtype::Auto);
        let mean = |other: Vec<f64>| exact.iter().zip(other).map(|(a, b)| (a - b).abs()).sum::<f64>() / 89.0;
        let (fp8, bf16) = (mean(scores(KvCacheDtype::Fp8)), mean(scores(KvCacheDtype::Bfloat16)));
        eprintln!("{device}: log-probabilities differ by {fp8:.5} with a cache in FP8, by {bf16:.6} in BF16");
        // The differences measured on the CPU are 0.033 in E4M3, and 0.0026 in BF16, which has four more bits. The bounds are a third above these
        // numbers.
        assert!(fp8 > 0.0 && fp8 < 0.045 && bf16 > 0.0 && bf16 < 0.0035);
    }
}

/// A GPU decodes in captured steps, with preemption, in chunks of prompts and from every type of cache, and gives the results of the CPU. Texts are
/// greedy. If rounding decides between two tokens, texts may diverge.
#[test]
fn requests_get_on_a_gpu_what_they_get_on_the_cpu() {
    let greedy = || -> Vec<Request> {
        let all = [("a", 40), ("b", 1), ("c", 90), ("d", 33), ("e", 7)];
        all.iter().map(|&(name, tokens)| Request { prompt_logprobs: Some(1), ..request(name, tokens) }).collect()
    };
    let preempting = EngineOptions { kv_cache_tokens: 160, ..ROOMY };
    // A pass has up to 160 tokens, so 256 rows, in which activations apply scales of products. Other passes have up to 64 and up to 17 tokens.
    let large = EngineOptions { prefill_chunk: 160, ..ROOMY };
    let settings = [large, preempting, EngineOptions { prefill_chunk: 17, max_batch: 3, ..ROOMY }];
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let recipe = recipe(name, Fp8Format::Auto);
        for (which, kv_cache_dtype) in
            [KvCacheDtype::Auto, KvCacheDtype::Bfloat16, KvCacheDtype::Fp8].into_iter().enumerate()
        {
            // The tolerances are the largest and the mean change of a log-probability of this model if activations, or keys and values, are rounded.
            // In FP8, a value that is rounded to another BF16 number may be cast to the next code, 1/16 away.
            let tolerance = match (name, kv_cache_dtype) {
                (RecipeName::Fp32, KvCacheDtype::Auto) => [1e-4, 1e-5],
                (RecipeName::Fp32, KvCacheDtype::Bfloat16) => [2e-3, 2e-4],
                (RecipeName::Fp32 | RecipeName::Bf16, _) => [0.05, 0.01],
                _ => [0.4, 0.06],
            };
            for (i, options) in settings.iter().enumerate().filter(|(i, _)| which == 0 || *i == which) {
                let options = EngineOptions { kv_cache_dtype, ..*options };
                let config = if i == 2 { windowed() } else { tiny_llama() };
                let on = |device: &Device| {
                    let model = decoder(&config, &recipe, device, 0.1);
                    let mut engine = Engine::new(model, &options).expect("memory");
                    let got = run(&mut engine, greedy());
                    assert_eq!(engine.stats().preemptions > 0, options.kv_cache_tokens == 160, "{:?}", engine.stats());
                    got
                };
                let mut all = devices_of(&recipe).into_iter().map(|device| (on(&device), device));
                let (on_cpu, _) = all.next().expect("the CPU");
                for (on_gpu, device) in all {
                    for (request, (cpu, gpu)) in on_cpu.iter().zip(&on_gpu).enumerate() {
                        let what = format!("{name:?}, {kv_cache_dtype:?}, setting {i}, request {request} on {device}");
                        expect_near(&what, cpu, gpu, tolerance);
                    }
                }
            }
        }
    }
}

/// Compares the log-probabilities of a prompt and of a text, up to a token that depends on rounding. Each may differ by `most`, and their mean
/// difference may be `mean`.
fn expect_near(what: &str, expected: &Got, got: &Got, [most, mean]: [f64; 2]) {
    assert_eq!((expected.prompt.len(), expected.tokens.len()), (got.prompt.len(), got.tokens.len()), "{what}");
    let given = |got: &Got| -> Vec<_> { got.prompt.iter().flatten().chain(&got.logprobs).cloned().collect() };
    let (expected, got, of_prompt) = (given(expected), given(got), expected.prompt.iter().flatten().count());
    let (mut sum, mut compared) = (0.0, 0);
    for (at, (a, b)) in expected.iter().zip(&got).enumerate() {
        let apart = f64::from((a.logprob - b.logprob).abs());
        assert!(apart <= most && (a.token == b.token || at >= of_prompt), "{what}: token {at}: {a:?} and {b:?}");
        (sum, compared) = (sum + apart, compared + 1);
        if a.token != b.token {
            break;
        }
    }
    let sum = sum / f64::from(compared.max(1));
    eprintln!("{what}: log-probabilities of {compared} tokens differ by {sum:.1e}");
    assert!(sum <= mean, "{what}: log-probabilities differ by {sum:e} on average");
}

/// Whole prompts, later chunks, single tokens and captures run up to the launch of their kernels. In a dry run, reads return zeros.
#[test]
fn all_passes_of_a_gpu_run_dry() {
    let device = Device::dry_gpu(GpuModel::h200());
    for (name, kv_cache_dtype) in [
        (RecipeName::Bf16, KvCacheDtype::Auto),
        (RecipeName::Fp8Current, KvCacheDtype::Fp8),
        (RecipeName::Fp8Row, KvCacheDtype::Fp8),
    ] {
        let options = EngineOptions { max_model_len: 900, prefill_chunk: 512, kv_cache_dtype, ..ROOMY };
        let mut engine = Engine::new(model(&recipe(name, Fp8Format::Auto), &device), &options).unwrap();
        let long = Request { prompt_logprobs: None, ..request("long", 700) };
        let found = run(&mut engine, requests().into_iter().chain([long]).collect());
        assert!(found.iter().all(|got| got.end == Some(FinishReason::Length)), "{name:?}");
        assert_eq!(found[6].tokens, [0; 20]);
    }
}

/// A dry run records which kernels are launched. A kernel is compiled in its first launch.
#[test]
fn after_warming_up_requests_launch_no_new_kernel() {
    for (batch_invariant, speculates) in [(false, false), (true, false), (false, true)] {
        let device = Device::dry_gpu(GpuModel::h200());
        let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
        let options = EngineOptions { max_model_len: 900, prefill_chunk: 512, batch_invariant, ..ROOMY };
        let model = model(&recipe(RecipeName::Fp8Current, Fp8Format::Auto), &device);
        let mut engine = Engine::new(model, &options).unwrap();
        if speculates {
            engine.speculate(Proposer::Ngram(NGRAM)).unwrap();
        }
        let cold = gpu.workload();
        engine.warm_up().unwrap();
        let warm = gpu.workload();
        assert!(warm != cold && engine.is_idle());
        assert_eq!(engine.stats(), EngineStats { kv_blocks: engine.stats().kv_blocks, ..EngineStats::default() });
        let long = Request { prompt_logprobs: None, ..request("long", 700) };
        run(&mut engine, requests().into_iter().chain([long]).collect());
        assert_eq!((engine.stats().accepted_tokens > 0, gpu.workload()), (speculates, warm));
    }
}

/// In passes of 256 rows with row scales, and in no other passes, the activation applies the scales of the preceding product.
#[test]
fn activations_apply_scales_of_products() {
    for (name, tokens, expected) in [
        (RecipeName::Fp8Row, 128, false),
        (RecipeName::Fp8Row, 129, true),
        (RecipeName::Fp8Row, 256, true),
        (RecipeName::Fp8Row, 512, false),
        (RecipeName::Fp8Current, 256, true),
        (RecipeName::Fp8Block, 256, false),
        (RecipeName::Bf16, 256, false),
    ] {
        let device = Device::dry_gpu(GpuModel::h200());
        let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
        let options = EngineOptions { max_model_len: 600, prefill_chunk: 512, ..ROOMY };
        let mut engine = Engine::new(model(&recipe(name, Fp8Format::Auto), &device), &options).unwrap();
        gpu.start_trace();
        run(&mut engine, vec![Request { prompt_logprobs: None, ..request("prompt", tokens) }]);
        let applies = gpu.take_trace().iter().any(|line| line.starts_with("swiglu_product"));
        assert_eq!(applies, expected, "{name:?}, {tokens} tokens");
    }
}

/// Products of few rows read weights while the preceding kernel runs. This kernel must not be the kernel that casts the weights.
#[test]
fn only_stored_weights_are_read_early() {
    for weight_codes in [true, false] {
        let device = Device::dry_gpu(GpuModel::h200());
        let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
        let (recipe, memory) =
            (recipe(RecipeName::Fp8Row, Fp8Format::Auto), MemoryPolicy { weight_codes, ..MemoryPolicy::FULL });
        let mut decoder =
            Decoder::new(&tiny_llama(), &recipe, &device, Purpose::Train(memory), 1000, &mut Seeded { std: 0.3 })
                .unwrap();
        decoder.quantize_weights().unwrap();
        gpu.start_trace();
        let mut engine = Engine::new(decoder, &ROOMY).unwrap();
        run(&mut engine, vec![request("a", 40)]);
        let early = gpu.take_trace().iter().any(|line| line.starts_with("skinny_") && line.contains("IN=e4m3"));
        assert_eq!(early, weight_codes);
    }
}
