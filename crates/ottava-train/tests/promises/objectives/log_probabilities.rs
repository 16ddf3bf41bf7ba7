//! Draws have the log-probabilities of training.

use crate::models::experts;
use crate::setup::{Seeded, devices_of, recipe, tiny_llama, tiny_llama_with};
use ottava_data::Batch;
use ottava_engine::{Engine, EngineOptions, LogprobsMode};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Partition;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{Fp8Format, KvCacheDtype, Recipe, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_train::objective::rollout::{Draw, Sample, sample, seed_of};
use ottava_train::step::host::values;
use ottava_train::step::{MicroBatch, TrainStep, token_losses};
use serde_json::json;
use std::ops::Range;

const LENGTH: usize = 64;

/// The tokens that end completions.
const ENDS: [u32; 4] = [5, 29, 61, 83];

/// Computes the log-probabilities of the tokens of `samples` as a step does before its first update. Each sample is in its own row.
fn log_probs_of_training(model: &mut Decoder, samples: &[Sample]) -> Vec<Vec<f32>> {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for sample in samples {
        let tokens: Vec<i32> = sample.prompt.iter().chain(&sample.tokens).map(|&token| token as i32).collect();
        let first = sample.prompt.len();
        let is_drawn = |at: usize| at >= first && sample.turns.iter().any(|turn| turn.contains(&(at - first)));
        targets.extend((1..=LENGTH).map(|at| if is_drawn(at) { tokens[at] } else { IGNORE_INDEX }));
        inputs.extend(tokens.iter().copied().chain(std::iter::repeat_n(0, LENGTH - tokens.len())));
    }
    let batch = Batch::whole(inputs, targets, samples.len());
    let micro_batch = MicroBatch::new(&batch, model.device(), ShardPlace::ALONE).unwrap();
    let partition = Partition::solo();
    let losses = token_losses(model, &[micro_batch], Pass::Evaluation, StepPrecision::Recipe, &partition).unwrap();
    let losses = values(&losses[0]).unwrap();
    let of_sample = |(row, sample): (usize, &Sample)| {
        let of_row = &losses[row * LENGTH..];
        let predicts = |turn: &Range<usize>| turn.clone().map(|at| -of_row[sample.prompt.len() + at - 1] as f32);
        sample.turns.iter().flat_map(predicts).collect()
    };
    samples.iter().enumerate().map(of_sample).collect()
}

/// Draws and steps read the same weights, scales and codes by the same arithmetic. So their log-probabilities have the same bits, in any batch, with
/// any chunks of a prompt, and in every turn, although the keys and values of earlier turns come from the prefix cache. On a GPU, this holds while results
/// do not depend on the batch.
#[test]
fn log_probabilities_of_draws_are_those_of_training() {
    for name in NAMES {
        on_each_device(name, |device, is_gpu| {
            let (sizes, std) = if is_gpu { (ordered(64), 0.08) } else { (tiny_llama(), 0.3) };
            expect_log_probabilities_of_training(name, device, sizes, std, KvCacheDtype::Auto);
            if is_gpu {
                expect_log_probabilities_of_training(name, device, experts::sizes(), 0.2, KvCacheDtype::Auto);
                // Large heads are computed over a temporary cache.
                expect_log_probabilities_of_training(name, device, ordered(256), 0.08, KvCacheDtype::Auto);
            }
        });
    }
}

/// With `sampling.kv_cache_dtype = "fp8"`, steps read keys and values with the rounding of the cache.
#[test]
fn log_probabilities_of_draws_with_an_fp8_cache_are_those_of_training() {
    for name in NAMES {
        on_each_device(name, |device, is_gpu| {
            let (sizes, std) = if is_gpu { (ordered(64), 0.08) } else { (tiny_llama(), 0.3) };
            expect_log_probabilities_of_training(name, device, sizes, std, KvCacheDtype::Fp8);
            if is_gpu {
                expect_log_probabilities_of_training(name, device, ordered(256), 0.08, KvCacheDtype::Fp8);
            }
        });
    }
}

#[test]
fn log_probabilities_of_draws_with_adapters_are_those_of_training() {
    for name in NAMES {
        on_each_device(name, |device, is_gpu| {
            let (sizes, std) = if is_gpu { (ordered(128), 0.08) } else { (tiny_llama(), 0.3) };
            let lora = Some(Lora { r: 12, alpha: 24.0, targets: Targets::AllLinear, ..Lora::default() });
            expect_log_probabilities_of_training(
                name,
                device,
                DecoderConfig { lora, ..sizes },
                std,
                KvCacheDtype::Auto,
            );
        });
    }
}

const NAMES: [RecipeName; 5] =
    [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Block, RecipeName::Fp8Delayed];

/// Runs `work` on the devices of a recipe with products in a known order of sums, and tells it whether the device is a GPU.
fn on_each_device(name: RecipeName, work: impl Fn(&Device, bool)) {
    for device in devices_of(&recipe(name, Fp8Format::Auto)) {
        match &device {
            Device::Cuda(_) if name == RecipeName::Fp32 => {}
            Device::Cuda(gpu) => {
                let _invariance = gpu.batch_invariance();
                work(&device, true);
            }
            _ => work(&device, false),
        }
    }
}

/// Sizes whose heads and rows have kernels with a known order of sums on a GPU.
fn ordered(head_dim: usize) -> DecoderConfig {
    tiny_llama_with(json!({"hidden_size": 512, "head_dim": head_dim, "intermediate_size": 1024}))
}

/// Compares draws by a model of these `sizes`, with weights of this standard deviation, with steps, before and after an update.
fn expect_log_probabilities_of_training(
    name: RecipeName,
    device: &Device,
    mut sizes: DecoderConfig,
    std: f32,
    kv_cache_dtype: KvCacheDtype,
) {
    // These are the sizes of a run at temperature 1.6.
    (sizes.head.wide_logits, sizes.head.scale) = (true, 1.0 / 1.6);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let recipe = Recipe { kv_cache_dtype, ..recipe(name, Fp8Format::Auto) };
    let mut model = Decoder::new(&sizes, &recipe, device, purpose, LENGTH, &mut Seeded { std }).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let mut step = TrainStep::new(&model, 1, 8, LENGTH).unwrap();
    let ids = || (0..8 * LENGTH as i32).map(|i| i * 31 % 96).collect();
    let mut update = |model: &mut Decoder| {
        step.load(0, &Batch::whole(ids(), ids(), 8)).unwrap();
        step.run(model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
    };
    // Before its first step, a run has no scales.
    update(&mut model);
    let options = EngineOptions {
        max_model_len: LENGTH,
        max_batch: 3,
        kv_cache_tokens: 320,
        prefill_chunk: 7,
        kv_cache_dtype,
        prefix_caching: true,
        saved_states: 8,
        batch_invariant: true,
        async_scheduling: false,
        logprobs_mode: LogprobsMode::Loss,
    };
    let mut engine = Engine::to_lend(&model, &options).unwrap();
    let prompt = |tokens: u32| -> Vec<u32> { (0..tokens).map(|i| (7 * i + tokens) % 96).collect() };
    let draw_of = |(i, length)| Draw { prompt: prompt(length), seed: seed_of([1, 2, 3, i]), max_tokens: 20 };
    // Few completions end early enough for three turns, and which ones do depends on the device.
    let count = if matches!(device, Device::Cuda(_)) { 96 } else { 8 };
    let lengths = [3, 11, 3, 40, 33, 1, 40, 16].into_iter().cycle().take(count);
    let wanted: Vec<Draw> = (0..).zip(lengths).map(draw_of).collect();
    let draw = |model: &mut Decoder, engine: &mut Engine| {
        let work = |engine: &mut Engine| {
            let mut samples = sample(engine, &wanted, &ENDS, 1.0)?;
            for turn in 1..3 {
                let answer = |sample: &mut Sample| sample.tokens.extend([40 + turn, 7, 40]);
                let mut open: Vec<_> = samples.iter_mut().filter(|sample| sample.tokens.len() < 12).collect();
                open.iter_mut().for_each(|sample| answer(sample));
                let next = |sample: &&mut Sample| Draw {
                    prompt: [&sample.prompt[..], &sample.tokens].concat(),
                    seed: seed_of([4, turn.into(), 5, 6]),
                    max_tokens: 4,
                };
                let next: Vec<_> = open.iter().map(next).collect();
                let turns = sample(engine, &next, &ENDS, 1.0)?;
                open.iter_mut().zip(turns).for_each(|(sample, turn)| sample.add_turn(turn));
            }
            Ok(samples)
        };
        engine.lend(model, work).unwrap()
    };
    let samples = draw(&mut model, &mut engine);
    assert_eq!(draw(&mut model, &mut engine), samples, "{}: draws depend on their seeds", name.as_str());
    assert!(samples.iter().any(|sample| sample.turns.len() == 3), "{}", name.as_str());
    assert_ne!(samples[3].tokens, samples[6].tokens, "{}: equal prompts with other seeds", name.as_str());
    let expect_alike = |model: &mut Decoder, samples: &[Sample]| {
        for (sample, expected) in samples.iter().zip(log_probs_of_training(model, samples)) {
            assert_eq!(sample.logprobs, expected, "{}", name.as_str());
        }
    };
    expect_alike(&mut model, &samples);
    // After an update, the keys and values of earlier draws are discarded, even if the prompts are the same.
    update(&mut model);
    let samples = draw(&mut model, &mut engine);
    expect_alike(&mut model, &samples);
}
