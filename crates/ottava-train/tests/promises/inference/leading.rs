//! Ranks divide the model of an engine. Rank 0 leads, the other ranks follow, and requests get the results of one rank.

use crate::inference::ahead::independent;
use crate::inference::engine::{Got, ROOMY, alike, collect, finish_into, prompt, request, requests, run};
use crate::inference::grammars::{VOCABULARY, tokenizer};
use crate::inference::recurrent::models;
use crate::inference::speculative::NGRAM;
use crate::parallel::expert_tensor::families;
use crate::setup::{Seeded, config, recipe, tiny_llama};
use ottava_common::Result;
use ottava_engine::{
    AdapterId, Engine, EngineOptions, EngineStats, Grammars, Pooling, Proposer, Request, RequestId, Sampling,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::{LayerAxes, Ranks};
use ottava_recipe::layer_ranks::{LayerRanks, Undivided};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, Limits, MeshShape, threads};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::thread;
use std::time::Duration;

/// Makes the engine of a rank, in F32, with one adapter. It proposes tokens by lookup in the texts.
fn speculating(ranks: Rc<dyn LayerRanks>, options: &EngineOptions) -> Engine {
    let mut engine = engine(ranks, options);
    engine.speculate(Proposer::Ngram(NGRAM)).unwrap();
    engine
}

/// Makes the engine of a rank, in F32, with one adapter.
fn engine(ranks: Rc<dyn LayerRanks>, options: &EngineOptions) -> Engine {
    let sizes = DecoderConfig { vocabulary: VOCABULARY, lora: Some(Lora::of_no_linear()), ..tiny_llama() };
    let (recipe, weights) = (recipe(RecipeName::Fp32, Fp8Format::Auto), &mut Seeded { std: 0.3 });
    let mut model = Decoder::for_inference(&sizes, &recipe, &Device::Cpu, 200, weights, ranks).unwrap();
    model.quantize_weights().unwrap();
    let lora =
        Lora { r: 3, alpha: 4.0, use_rslora: true, use_dora: false, targets: Targets::AllLinear, ..Lora::default() };
    let adapters = model.load_adapters(&lora, weights).unwrap();
    let mut engine = Engine::new(model, options).unwrap();
    assert_eq!(engine.add_adapters(adapters), AdapterId(0));
    engine
}

/// Runs `lead` on rank 0 of a group whose other ranks follow. Returns its result, and how the other ranks end.
fn on_ranks<T: Send>(
    group: Vec<Group>,
    options: &EngineOptions,
    lead: impl Fn(Engine) -> T + Sync,
) -> (T, Vec<Result<()>>) {
    engines_on_ranks(engine, group, options, lead)
}

/// Runs `lead` on rank 0, with engines that `engine` makes.
fn engines_on_ranks<T: Send>(
    engine: impl Fn(Rc<dyn LayerRanks>, &EngineOptions) -> Engine + Sync,
    group: Vec<Group>,
    options: &EngineOptions,
    lead: impl Fn(Engine) -> T + Sync,
) -> (T, Vec<Result<()>>) {
    let shape = MeshShape { tensor: group.len(), ..MeshShape::of_data(1) };
    let of_rank = |comm| {
        let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
        let mut engine = engine(Rc::new(LayerAxes::new(ranks.clone())), options);
        if ranks.leads() {
            engine.lead(ranks);
            return (Some(lead(engine)), Ok(()));
        }
        (None, engine.follow(&ranks))
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| of_rank(comm))).collect();
        let (mut led, ends): (Vec<_>, Vec<_>) = ranks.into_iter().map(|rank| rank.join().unwrap()).unzip();
        (led.swap_remove(0).expect("rank 0 leads"), ends.into_iter().skip(1).collect())
    })
}

/// Computes requests of all kinds, of the model and of its adapter. In the meantime, some requests are held and resumed, one is cancelled, and one is
/// added.
fn serve(engine: &mut Engine) -> Vec<Got> {
    let grammars = Grammars::new(&tokenizer(), VOCABULARY).unwrap();
    let sampling = Sampling { temperature: 1.0, seed: 9, ..Sampling::default() };
    let drawn = Request { prompt: prompt("g", 40), sampling, max_new_tokens: 30, ..Request::default() };
    let within = |regex: &str| Request { grammar: Some(grammars.regex(regex).unwrap()), ..drawn.clone() };
    let pooled = |pooling| Request { pooling: Some(pooling), ..drawn.clone() };
    let stopping = Request { stop_ids: (0..2000).collect(), min_new_tokens: 5, ..drawn.clone() };
    let of_adapter = requests().into_iter().map(|request| Request { adapter: Some(AdapterId(0)), ..request });
    let more = [within("(ab|c){3}"), within("[a-z]{60}"), pooled(Pooling::Mean), pooled(Pooling::Last), stopping];
    let all = requests().into_iter().chain(of_adapter).chain(more);
    let mut ids: Vec<RequestId> = all.map(|request| engine.add(request).unwrap()).collect();
    let mut got = BTreeMap::new();
    (0..6).for_each(|_| collect(engine.step().unwrap(), &mut got));
    [0, 4, 7].iter().for_each(|&held| engine.hold(ids[held]));
    engine.cancel(ids[2]);
    ids.push(engine.add(drawn).unwrap());
    (0..6).for_each(|_| collect(engine.step().unwrap(), &mut got));
    [7, 0, 4].iter().for_each(|&held| engine.resume(ids[held]));
    finish_into(engine, &mut got);
    ids.iter().map(|id| got.remove(id).expect("each request ends")).collect()
}

/// Compares results in F32, where sums over ranks have another order.
fn expect_alike(found: &[Got], expected: &[Got]) {
    assert_eq!(found.len(), expected.len());
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((&found.tokens, found.end), (&expected.tokens, expected.end), "request {number}");
        let values = |got: &Got| -> Vec<f32> {
            let of_prompt = got.prompt.iter().flatten().map(|token| token.logprob);
            let of_tokens = got.logprobs.iter().map(|token| token.logprob);
            of_prompt.chain(of_tokens).chain(got.embedding.iter().copied()).collect()
        };
        let (found, expected) = (values(found), values(expected));
        assert_eq!(found.len(), expected.len(), "request {number}");
        for (found, expected) in found.iter().zip(&expected) {
            // Each block has two sums over ranks, rounded in units of 2⁻²⁴. Differences of up to 1.8e-5 are seen, in a mixture. A missing part would
            // change logits by their own size.
            assert!((found - expected).abs() < 1e-4 * expected.abs().max(1.0), "request {number}: {found}, {expected}");
        }
    }
}

/// Requests are in one batch, and with few places and scarce blocks of the cache, so that requests are preempted.
#[test]
fn requests_get_on_two_ranks_what_one_rank_gives() {
    for (max_batch, prefill_chunk, kv_cache_tokens) in [(20, 64, 4000), (5, 17, 288)] {
        let options = EngineOptions { max_batch, prefill_chunk, kv_cache_tokens, ..ROOMY };
        let mut alone = engine(Rc::new(Undivided), &options);
        let expected = [serve(&mut alone), serve(&mut alone)];
        assert!(alone.stats().prefix_hits > 0 && (max_batch == 20 || alone.stats().preemptions > 0));
        let ((found, stats), ends) = on_ranks(threads::group(2), &options, |mut engine| {
            let found = [serve(&mut engine), serve(&mut engine)];
            engine.finish().unwrap();
            (found, engine.stats())
        });
        assert!(ends.into_iter().all(|end| end.is_ok()));
        // The requests that a step computes depend on when masks are ready.
        let drawn = |stats: EngineStats| [stats.generated_tokens, stats.running as u64, stats.used_kv_blocks as u64];
        assert_eq!(drawn(stats), drawn(alone.stats()));
        found.iter().zip(&expected).for_each(|(found, expected)| expect_alike(found, expected));
    }
}

/// Each rank computes its experts for all tokens, and the results of all ranks are added.
/// Rank 0 decides which steps are launched before the tokens of the step before are read, and each rank draws the same tokens.
#[test]
fn ranks_launch_the_same_steps_ahead() {
    let of_adapter = || independent().into_iter().map(|request| Request { adapter: Some(AdapterId(0)), ..request });
    for options in [ROOMY, EngineOptions { max_batch: 3, ..ROOMY }] {
        let [expected, found] = [false, true].map(|async_scheduling| {
            let options = EngineOptions { async_scheduling, ..options };
            let (got, ends) = on_ranks(threads::group(2), &options, |mut engine| {
                let got =
                    [run(&mut engine, independent()), run(&mut engine, of_adapter().collect()), serve(&mut engine)];
                engine.finish().unwrap();
                got
            });
            ends.into_iter().for_each(|end| end.unwrap());
            got
        });
        // A request that was cancelled has the tokens that were read before.
        assert_eq!(found[..2], expected[..2]);
        let (found, expected) = (&found[2], &expected[2]);
        assert_eq!(found.len(), expected.len());
        for (number, (found, expected)) in found.iter().zip(expected).enumerate().filter(|(number, _)| *number != 2) {
            assert_eq!(found, expected, "request {number}");
        }
    }
}

#[test]
fn mixtures_give_on_several_ranks_the_texts_of_one() {
    for (name, keys) in families() {
        let sizes = DecoderConfig { max_positions: 200, ..config(keys) };
        let of_rank = |ranks: Rc<dyn LayerRanks>, options: &EngineOptions| {
            let (recipe, weights) = (recipe(RecipeName::Fp32, Fp8Format::Auto), &mut Seeded { std: 0.3 });
            let mut model = Decoder::for_inference(&sizes, &recipe, &Device::Cpu, 200, weights, ranks).unwrap();
            model.quantize_weights().unwrap();
            Engine::new(model, options).unwrap()
        };
        let greedy = |seed: &str, tokens| Request { max_new_tokens: 12, ..request(seed, tokens) };
        let requests = || vec![greedy("a", 40), greedy("b", 1), greedy("c", 17)];
        let expected = run(&mut of_rank(Rc::new(Undivided), &ROOMY), requests());
        for ranks in [2, 4] {
            let (found, ends) = engines_on_ranks(of_rank, threads::group(ranks), &ROOMY, |mut engine| {
                let found = run(&mut engine, requests());
                engine.finish().unwrap();
                found
            });
            assert!(ends.into_iter().all(|end| end.is_ok()), "{name} on {ranks} ranks");
            expect_alike(&found, &expected);
        }
    }
}

/// All ranks save the same states, and return to the same states.
#[test]
fn recurrent_states_are_saved_alike_on_two_ranks() {
    let options = EngineOptions { max_batch: 3, prefill_chunk: 17, kv_cache_tokens: 224, saved_states: 4, ..ROOMY };
    for (name, sizes) in models().into_iter().step_by(3) {
        let of_rank = |ranks: Rc<dyn LayerRanks>, options: &EngineOptions| {
            let (recipe, weights) = (recipe(RecipeName::Fp32, Fp8Format::Auto), &mut Seeded { std: 0.3 });
            let mut model = Decoder::for_inference(&sizes, &recipe, &Device::Cpu, 200, weights, ranks).unwrap();
            model.quantize_weights().unwrap();
            let mut engine = Engine::new(model, options).unwrap();
            engine.speculate(Proposer::Ngram(NGRAM)).unwrap();
            engine
        };
        let expected = run(&mut of_rank(Rc::new(Undivided), &options), alike());
        let ((found, stats), ends) = engines_on_ranks(of_rank, threads::group(2), &options, |mut engine| {
            let found = run(&mut engine, alike());
            engine.finish().unwrap();
            (found, engine.stats())
        });
        assert!(ends.into_iter().all(|end| end.is_ok()), "{name}");
        let EngineStats { prefix_hits, proposed_tokens, accepted_tokens, preemptions, .. } = stats;
        assert!(prefix_hits > 0 && preemptions > 0 && accepted_tokens < proposed_tokens, "{name}: {stats:?}");
        expect_alike(&found, &expected);
    }
}

/// All ranks propose the same tokens, and rank 0 announces which tokens are accepted.
#[test]
fn two_ranks_verify_the_same_proposals() {
    let options = EngineOptions { max_batch: 5, prefill_chunk: 17, kv_cache_tokens: 288, ..ROOMY };
    let expected = serve(&mut engine(Rc::new(Undivided), &options));
    let (found, ends) = engines_on_ranks(speculating, threads::group(2), &options, |mut engine| {
        let found = serve(&mut engine);
        engine.finish().unwrap();
        let stats = engine.stats();
        assert!(stats.accepted_tokens > 0 && stats.preemptions > 0, "{stats:?}");
        found
    });
    assert!(ends.into_iter().all(|end| end.is_ok()));
    // With speculation, a request that is cancelled after some steps has more tokens.
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        match number {
            2 => assert!(found.tokens.starts_with(&expected.tokens) || expected.tokens.starts_with(&found.tokens)),
            _ => expect_alike(std::slice::from_ref(found), std::slice::from_ref(expected)),
        }
    }
}

/// Ranks that follow an engine without requests wait longer than the deadline of a collective.
#[test]
fn an_engine_may_be_idle_for_longer_than_the_deadline() {
    let limits = Limits { collective: Duration::from_secs(2), ..Limits::default() };
    let request = || vec![requests().swap_remove(0)];
    let ((), ends) = on_ranks(threads::group_within(2, limits), &ROOMY, |mut engine| {
        let before = run(&mut engine, request());
        thread::sleep(limits.collective * 2);
        assert_eq!(run(&mut engine, request()), before);
        thread::sleep(limits.collective * 2);
        engine.finish().unwrap();
    });
    assert!(ends.into_iter().all(|end| end.is_ok()));
}

#[test]
fn an_engine_that_ends_or_differs_is_named() {
    let request = || requests().swap_remove(0);
    // Rank 0 ends before its requests are done.
    let ((), ends) = on_ranks(threads::group(2), &ROOMY, |mut engine| {
        engine.add(request()).unwrap();
        engine.step().unwrap();
    });
    let error = ends.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("rank 0 (") && error.contains("ended during announce `step of the engine`"), "{error}");
    // Rank 1 makes a call that rank 0 does not make.
    let ranks = crate::setup::on_ranks(2, move |comm| {
        let shape = MeshShape { tensor: 2, ..MeshShape::of_data(1) };
        let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
        let mut engine = engine(Rc::new(LayerAxes::new(ranks.clone())), &ROOMY);
        if ranks.leads() {
            engine.lead(ranks);
            engine.add(request()).unwrap();
            return (0..2).find_map(|_| engine.step().err()).unwrap().to_string();
        }
        engine.add(request()).unwrap();
        engine.follow(&ranks).unwrap_err().to_string()
    });
    assert!(ranks[0].starts_with("rank 1 (") && ranks[0].contains("ended during "), "{}", ranks[0]);
    assert!(ranks[1].contains("the engine state of this rank differs from rank 0: EngineStats"), "{}", ranks[1]);
}
