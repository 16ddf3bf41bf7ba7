//! Speculative decoding: steps verify proposed tokens, and requests get the same results as without it.

use crate::inference::engine::{Got, ROOMY, prompt, request, requests, run, windowed};
use crate::inference::grammars::{VOCABULARY, tokenizer};
use crate::inference::recurrent::models;
use crate::setup::{decoder, recipe, tiny_llama};
use ottava_engine::{
    Draft, Engine, EngineOptions, FinishReason, Grammars, Ngram, Proposer, Request, RequestId, Sampling, Wanted,
};
use ottava_models::DecoderConfig;
use ottava_recipe::{Fp8Format, KvCacheDtype, Recipe, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;

pub const NGRAM: Ngram = Ngram { tokens: 4, shortest: 1, longest: 3 };

/// The source of proposed tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    Nothing,
    Lookup,
    /// A draft model, with other weights or with the weights of the model that verifies.
    Draft {
        same: bool,
    },
}

pub const SOURCES: [Source; 3] = [Source::Lookup, Source::Draft { same: false }, Source::Draft { same: true }];

fn engine_of(config: &DecoderConfig, recipe: &Recipe, options: EngineOptions, source: Source) -> Engine {
    // A draft model needs positions for all requests.
    let config = &DecoderConfig { max_positions: 200, ..config.clone() };
    let model = |std| decoder(config, recipe, &Device::Cpu, std);
    let mut engine = Engine::new(model(0.3), &options).unwrap();
    let draft = |std| Box::new(Draft::new(model(std), 3, &options, config.vocabulary).unwrap());
    match source {
        Source::Nothing => {}
        Source::Lookup => engine.speculate(Proposer::Ngram(NGRAM)).unwrap(),
        Source::Draft { same } => engine.speculate(Proposer::Draft(draft(if same { 0.3 } else { 0.2 }))).unwrap(),
    }
    engine
}

/// Returns requests of many kinds, including requests that repeat tokens or end early.
fn all_requests() -> Vec<Request> {
    let repeating = Request { prompt: [3, 1, 4, 1, 5].repeat(6), max_new_tokens: 50, ..request("a", 1) };
    let drawn = Sampling { temperature: 0.3, seed: 8, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.2, presence_penalty: 0.3, ..drawn.clone() };
    let plain = Request { logprobs: None, ..repeating.clone() };
    let stopping = Request { stop_ids: (0..12).collect(), min_new_tokens: 5, ..repeating.clone() };
    let more = [
        Request { sampling: drawn, ..repeating.clone() },
        Request { sampling: penalised, ..repeating.clone() },
        Request { max_new_tokens: 1, ..repeating.clone() },
        Request { max_new_tokens: usize::MAX, ..plain.clone() },
        plain,
        stopping,
        repeating,
    ];
    requests().into_iter().chain(more).collect()
}

/// Options with room for all requests, with few places, and with scarce blocks of the cache.
const OPTIONS: [EngineOptions; 3] = [
    ROOMY,
    EngineOptions { max_batch: 3, prefill_chunk: 17, ..ROOMY },
    EngineOptions { kv_cache_tokens: SCARCE, ..ROOMY },
];

/// A number of tokens of the cache for which requests are preempted.
const SCARCE: usize = 288;

/// Checks that requests get the same results with each of these `sources` of proposed tokens and with each of `all` options.
pub fn expect_same(
    config: &DecoderConfig,
    name: RecipeName,
    kv_cache_dtype: KvCacheDtype,
    all: &[EngineOptions],
    sources: &[Source],
) {
    let recipe = recipe(name, Fp8Format::Auto);
    let plain = EngineOptions { kv_cache_dtype, prefix_caching: false, ..ROOMY };
    let mut alone = engine_of(config, &recipe, plain, Source::Nothing);
    let expected: Vec<Got> = all_requests().into_iter().flat_map(|request| run(&mut alone, vec![request])).collect();
    assert_eq!(alone.stats().proposals, 0);
    for &source in sources {
        for options in all {
            let options = EngineOptions { kv_cache_dtype, ..*options };
            let mut engine = engine_of(config, &recipe, options, source);
            let what = format!("{name:?}, {source:?}, {options:?}");
            // In the second pass, blocks of accepted tokens are found.
            for time in 0..2 {
                let found = run(&mut engine, all_requests());
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_eq!(found, expected, "{what}, time {time}, request {number}");
                }
            }
            let stats = engine.stats();
            assert_eq!(stats.preemptions > 0, options.kv_cache_tokens == SCARCE, "{what}: {stats:?}");
            let (proposed, accepted) = (stats.proposed_tokens, stats.accepted_tokens);
            assert!(accepted > 0 && accepted < proposed && stats.proposals < proposed, "{what}: {stats:?}");
        }
    }
}

#[test]
fn speculation_changes_nothing_in_f32() {
    expect_same(&tiny_llama(), RecipeName::Fp32, KvCacheDtype::Auto, &OPTIONS, &SOURCES);
}

#[test]
fn speculation_changes_nothing_in_fp8_with_windows() {
    expect_same(&windowed(), RecipeName::Fp8Current, KvCacheDtype::Fp8, &OPTIONS, &SOURCES);
}

/// A draft model with the weights of the model that verifies proposes exactly the drawn tokens, and lookup finds repetitions. So fewer steps are
/// needed.
#[test]
fn accepted_tokens_save_steps() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let steps = |source, request: Request| {
        let mut engine = engine_of(&tiny_llama(), &recipe, ROOMY, source);
        engine.add(request).unwrap();
        let mut steps = 0;
        while !engine.is_idle() {
            engine.step().unwrap();
            steps += 1;
        }
        (steps, engine.stats())
    };
    let request = || Request { max_new_tokens: 41, ..request("a", 40) };
    assert_eq!(steps(Source::Nothing, request()).0, 41);
    let (same, stats) = steps(Source::Draft { same: true }, request());
    // The step of the prompt gives the first token, and each further step gives four tokens.
    assert_eq!((same, stats.proposals, stats.proposed_tokens, stats.accepted_tokens), (11, 10, 30, 30));
}

/// Whichever tokens of its last proposal were accepted, a draft model proposes the same tokens as without a cache. Without memory, it proposes no
/// tokens.
#[test]
fn a_draft_model_forgets_rejected_tokens() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let [recurrent, alone] = [0, 4].map(|number| models()[number].1.clone());
    for config in [tiny_llama(), windowed(), recurrent, alone] {
        let config = DecoderConfig { max_positions: 200, ..config };
        let draft = |kv_cache_tokens| {
            let options = EngineOptions { kv_cache_tokens, max_batch: 2, ..ROOMY };
            Draft::new(decoder(&config, &recipe, &Device::Cpu, 0.3), 4, &options, 96).unwrap()
        };
        let propose = |draft: &mut Draft, tokens: &[u32]| {
            let id = RequestId(7);
            draft.propose(&[id], &[Wanted { id, tokens, most: 4 }]).unwrap().remove(0)
        };
        let (mut kept, mut tokens) = (draft(2000), prompt("a", 60));
        for accepted in [4, 0, 2, 4, 3, 1, 0, 4, 4, 2] {
            let proposed = propose(&mut kept, &tokens);
            assert_eq!(proposed, propose(&mut draft(2000), &tokens), "{} tokens", tokens.len());
            assert_eq!(proposed.len(), 4);
            let other = proposed.get(accepted).map_or(5, |token| (token + 1) % 96);
            tokens.extend(&proposed[..accepted]);
            // The second token comes from a step without a proposal.
            tokens.extend([other, 7]);
        }
        // Without attention layers, no blocks are needed.
        if config.heads().is_some() {
            assert!(propose(&mut draft(64), &tokens).is_empty(), "{} tokens", tokens.len());
        }
        tokens.resize(197, 1);
        assert!(propose(&mut kept, &tokens).is_empty(), "there are 200 positions");
    }
}

/// Grammars advance only by accepted tokens, and bar tokens at each position.
#[test]
fn speculation_keeps_constraints() {
    let grammars = Grammars::new(&tokenizer(), VOCABULARY).unwrap();
    let config = DecoderConfig { vocabulary: VOCABULARY, ..tiny_llama() };
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let within = |regex: &str, seed| {
        let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
        let (stop_ids, grammar) = (tokenizer().eos_ids().to_vec(), Some(grammars.regex(regex).unwrap()));
        let max_new_tokens = 60;
        Request {
            prompt: vec![5, 6, 5, 6, 5],
            sampling,
            max_new_tokens,
            stop_ids,
            grammar,
            logprobs: Some(1),
            ..Request::default()
        }
    };
    let requests =
        || vec![within("(ab|c){3}", 1), within("[a-b]{40}", 2), within("(yes, )+no", 3), within("(a{9}-)*", 4)];
    let of = |source| {
        let mut engine = engine_of(&config, &recipe, ROOMY, source);
        (run(&mut engine, requests()), engine.stats().accepted_tokens)
    };
    let (expected, none) = of(Source::Nothing);
    assert!(none == 0 && expected.iter().any(|got| got.end == Some(FinishReason::Stop)));
    let mut accepted = 0;
    for source in SOURCES {
        let (found, of_source) = of(source);
        assert_eq!(found, expected, "{source:?}");
        accepted += of_source;
    }
    assert!(accepted > 0);
}

#[test]
fn sizes_that_cannot_be_used_are_errors() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut engine = engine_of(&tiny_llama(), &recipe, ROOMY, Source::Nothing);
    for (wrong, words) in [
        (Ngram { tokens: 0, ..NGRAM }, "num_speculative_tokens is 0; it is a number from 1 to 32"),
        (Ngram { tokens: 33, ..NGRAM }, "num_speculative_tokens is 33"),
        (Ngram { shortest: 0, ..NGRAM }, "prompt_lookup_min is 0 and prompt_lookup_max is 3"),
        (Ngram { shortest: 4, ..NGRAM }, "prompt_lookup_min is 4 and prompt_lookup_max is 3"),
    ] {
        let error = engine.speculate(Proposer::Ngram(wrong)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Rows of proposed tokens are in the captured steps of single tokens. In a dry run, reads return zeros, so all drawn tokens are equal. Requests of the
/// second pass begin with saved states, in a model that has states.
#[test]
fn proposals_are_verified_in_captured_steps() {
    let device = Device::dry_gpu(GpuModel::h200());
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let [_, (_, recurrent), ..] = models();
    for config in [tiny_llama(), recurrent] {
        let mut engine = Engine::new(decoder(&config, &recipe, &device, 0.3), &ROOMY).unwrap();
        engine.speculate(Proposer::Ngram(NGRAM)).unwrap();
        // The drawn token is at the beginning of the prompt, before other tokens, so the first proposals are rejected.
        let prompt = [&[0, 5, 6, 7, 8][..], &prompt("a", 40)].concat();
        for _ in 0..2 {
            let found =
                run(&mut engine, vec![Request { logprobs: None, prompt: prompt.clone(), ..request("a", 1) }; 3]);
            assert!(found.iter().all(|got| got.tokens == [0; 20]));
        }
        let stats = engine.stats();
        assert!(stats.accepted_tokens > 30 && stats.accepted_tokens < stats.proposed_tokens, "{stats:?}");
        assert!(stats.prefix_hits >= 3 * 32, "{stats:?}");
    }
}
