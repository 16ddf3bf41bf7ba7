//! Engines whose results have the same bits in any batch, also on a GPU.

use crate::inference::engine::{Got, ROOMY, prompt, run, windowed};
use crate::inference::speculative::NGRAM;
use crate::models::experts::sizes;
use crate::setup::{decoder, devices_of, recipe, tiny_llama, tiny_llama_with};
use ottava_engine::{Draft, Engine, EngineOptions, LogprobsMode, Proposer, Request, Sampling};
use ottava_models::{DecoderConfig, SublayerSpec};
use ottava_recipe::{Fp8Format, KvCacheDtype, Recipe, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use ottava_train::plan::ResolvedRun;
use serde_json::json;
use std::collections::BTreeSet;

const INVARIANT: EngineOptions = EngineOptions {
    max_model_len: 800,
    max_batch: 60,
    kv_cache_tokens: 20_000,
    prefill_chunk: 512,
    batch_invariant: true,
    logprobs_mode: LogprobsMode::Raw,
    ..ROOMY
};

fn engine_on(device: &Device, config: &DecoderConfig, recipe: &Recipe, options: EngineOptions) -> Engine {
    Engine::new(decoder(config, recipe, device, 0.3), &options).expect("memory")
}

/// Returns the first `count` of many requests, with short and long contexts, greedy and drawn. Some begin with the same tokens.
fn many(count: usize) -> Vec<Request> {
    let whole = prompt("whole", 700);
    let of = |number: usize| {
        let length = [300, 70, 700, 1, 129, 40, 64, 9, 33, 90][number % 10];
        let own = prompt(&number.to_string(), 8);
        let temperature = if number.is_multiple_of(2) { 0.0 } else { 1.0 };
        let sampling = Sampling { temperature, seed: number as u64, ..Sampling::default() };
        let prompt = [&whole[..length - length.min(own.len()).min(length - 1)], &own].concat();
        let prompt_logprobs = (number % 5 == 1).then_some(0);
        Request { prompt, sampling, max_new_tokens: 24, logprobs: Some(2), prompt_logprobs, ..Request::default() }
    };
    (0..count).map(of).collect()
}

/// Computes five requests alone, each with its prompt in one chunk, and in a batch of 60 with small chunks, shared prefixes, preemption and
/// speculation. Checks that their results are equal.
fn expect_invariant(device: &Device, config: &DecoderConfig, name: RecipeName, kv_cache_dtype: KvCacheDtype) {
    let recipe = recipe(name, Fp8Format::Auto);
    let options = EngineOptions { kv_cache_dtype, ..INVARIANT };
    let engine = |options| engine_on(device, config, &recipe, options);
    let mut alone = engine(EngineOptions { prefix_caching: false, prefill_chunk: 1000, ..options });
    let expected: Vec<Got> = many(5).into_iter().flat_map(|request| run(&mut alone, vec![request])).collect();
    let (small, tight) = (
        EngineOptions { prefill_chunk: 100, ..options },
        EngineOptions { prefill_chunk: 300, kv_cache_tokens: 1500, ..options },
    );
    let draft = || {
        let model = decoder(config, &recipe, device, 0.3);
        Proposer::Draft(Box::new(Draft::new(model, 3, &tight, config.vocabulary).expect("memory")))
    };
    for (which, options, proposer) in [
        ("small chunks", small, None),
        ("preemption and lookup", tight, Some(Proposer::Ngram(NGRAM))),
        ("preemption and a draft model", tight, Some(draft())),
    ] {
        let mut engine = engine(options);
        let speculates = proposer.is_some();
        proposer.into_iter().for_each(|proposer| engine.speculate(proposer).unwrap());
        let found = run(&mut engine, many(60));
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                found == expected,
                "{name:?} on {device}, {which}, request {number}: {found:?}, alone {expected:?}"
            );
        }
        let stats = engine.stats();
        assert_eq!([stats.preemptions > 0, stats.accepted_tokens > 0], [speculates; 2], "{which}: {stats:?}");
        assert!(
            stats.prefix_hits > 0 || config.layers.iter().any(|layer| layer.window().is_some()),
            "{which}: {stats:?}"
        );
    }
}

/// Runs the check on a GPU that supports the products of the recipe, with sizes for which attention and products have several parts. BF16 also runs
/// on the CPU; `engine` tests other recipes there.
fn expect_invariant_on_all(config: &DecoderConfig, name: RecipeName, kv_cache_dtype: KvCacheDtype) {
    let mut large = DecoderConfig { max_positions: 800, ..config.clone() };
    large.stream.channels = 512;
    large.sublayers_mut().for_each(|sublayer| match sublayer {
        SublayerSpec::Heads(heads, _) => heads.head_dim = 128,
        SublayerSpec::Mlp(mlp) => mlp.hidden = 4096,
        SublayerSpec::Xielu(mlp) => mlp.hidden = 4096,
        SublayerSpec::Latent(..)
        | SublayerSpec::Delta(_)
        | SublayerSpec::Mamba(_)
        | SublayerSpec::Experts(_)
        | SublayerSpec::GatedEmbedding(_) => {}
    });
    for device in devices_of(&recipe(name, Fp8Format::Auto)) {
        match device {
            Device::Cuda(_) => expect_invariant(&device, &large, name, kv_cache_dtype),
            _ if name == RecipeName::Bf16 => expect_invariant(&device, config, name, kv_cache_dtype),
            _ => {}
        }
    }
}

#[test]
fn bf16_is_batch_invariant() {
    expect_invariant_on_all(&tiny_llama(), RecipeName::Bf16, KvCacheDtype::Auto);
}

#[test]
fn windows_and_fp8_row_are_batch_invariant() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Row] {
        expect_invariant_on_all(&windowed(), name, KvCacheDtype::Fp8);
    }
}

#[test]
fn fp8_current_is_batch_invariant() {
    expect_invariant_on_all(&tiny_llama(), RecipeName::Fp8Current, KvCacheDtype::Fp8);
}

#[test]
fn fp8_block_is_batch_invariant() {
    expect_invariant_on_all(&tiny_llama(), RecipeName::Fp8Block, KvCacheDtype::Auto);
}

#[test]
fn fp32_is_batch_invariant() {
    expect_invariant_on_all(&tiny_llama(), RecipeName::Fp32, KvCacheDtype::Auto);
}

/// The rows of experts are in groups of any sizes.
#[test]
fn mixtures_are_batch_invariant() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Row] {
        expect_invariant_on_all(&sizes(), name, KvCacheDtype::Auto);
    }
}

/// Returns the kernels that a dry run of `requests` launches, with their arguments. The arguments of attention are left out, since they depend on the
/// longest context of a batch. Also returns the sizes of the parts of attention, which must not depend on it.
fn launches(engine: &mut Engine, requests: Vec<Request>) -> (BTreeSet<String>, BTreeSet<String>) {
    let Device::Cuda(gpu) = engine.model().device().clone() else { panic!("not a GPU") };
    gpu.start_trace();
    run(engine, requests);
    let (mut others, mut parts) = (BTreeSet::new(), BTreeSet::new());
    for line in gpu.take_trace() {
        if line.starts_with("attend_") {
            parts.insert(line.rsplit(' ').nth(2).expect("arguments").to_string());
        } else if !["append_kv", "read ", "write ", "zero "].iter().any(|begin| line.starts_with(begin)) {
            others.insert(line);
        }
    }
    (others, parts)
}

/// If sums are ordered, the library computes no product. Otherwise one request and many requests have products of the same numbers of rows.
#[test]
fn launches_do_not_depend_on_the_batch() {
    let device = Device::dry_gpu(GpuModel::h200());
    for name in [RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Current, RecipeName::Fp8Block, RecipeName::Fp32] {
        let recipe = recipe(name, Fp8Format::Auto);
        let of = |batch_invariant: bool, count: usize| {
            let options = EngineOptions { batch_invariant, ..INVARIANT };
            let mut engine = engine_on(&device, &tiny_llama(), &recipe, options);
            let requests = many(60).into_iter().skip(1).take(count).collect();
            launches(&mut engine, requests)
        };
        let (one, many, fast) = (of(true, 1), of(true, 50), of(false, 50));
        assert_eq!(one.1, many.1, "{name:?}");
        // Attention in FP32 is not divided.
        assert_eq!(one.1.len(), usize::from(name != RecipeName::Fp32), "attention has parts of one length");
        let by_library = |lines: &BTreeSet<String>| -> BTreeSet<String> {
            lines.iter().filter(|line| line.starts_with("gemm ")).cloned().collect()
        };
        let [of_one, of_many] = [&one.0, &many.0].map(by_library);
        assert_eq!((&of_one, of_one.is_empty()), (&of_many, name != RecipeName::Fp32), "{name:?}");
        assert!(!by_library(&fast.0).is_empty() && of(false, 1).0 != fast.0, "{name:?}");
    }
}

/// A run whose results would depend on the batch ends before its first step, and says why.
#[test]
fn runs_that_would_depend_on_the_batch_are_refused() {
    let device = Device::dry_gpu(GpuModel::h200());
    let heads = |of: usize| tiny_llama_with(json!({"head_dim": of}));
    let sinks = tiny_llama_with(json!({
        "architectures": ["GptOssForCausalLM"], "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
    }));
    for (sizes, name, reason) in [
        (heads(16), RecipeName::Fp8Block, ""),
        (heads(16), RecipeName::Bf16, ""),
        (
            heads(24),
            RecipeName::Bf16,
            "heads of a multiple of 16 up to 256, with values of the same size, not 4 query and 2 key heads of 24",
        ),
        (heads(256), RecipeName::Bf16, ""),
        (heads(16), RecipeName::Fp16, "recipe fp16 has no products with a known order"),
        (sinks, RecipeName::Bf16, ""),
    ] {
        let mut run = RunConfig::default();
        (run.precision.recipe, run.precision.batch_invariant, run.data.max_length) = (name, true, 32);
        match ResolvedRun::new(&run, &sizes, &device) {
            Ok(_) => assert!(reason.is_empty(), "{name:?}: no {reason}"),
            Err(error) => assert!(error.to_string().contains(reason) && !reason.is_empty(), "{name:?}: {error}"),
        }
    }
    assert!(!device.is_batch_invariant(), "a plan leaves the device as it was");
}
