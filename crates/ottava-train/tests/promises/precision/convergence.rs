//! Small models learn real text in FP8 as well as in BF16, with the same data, the same initial weights, and one seed, or three seeds in full.
//!
//! The bar was set before anything was measured. Such runs are short, so effects that appear only after many more tokens are not found. Adam also
//! hides constant factors in gradients, which `products` and `model_gradients` look for. With `OTTAVA_CONVERGENCE=full`, runs train eight times as long
//! on twice the text per step (`just nightly convergence`).

use crate::setup::{config, devices, eight_bit_names_on, on_one_thread, text, text_batch, unscaled_gradients};
use crate::step::steps::at;
use ottava_checkpoint::RandomWeights;
use ottava_data::Batch;
use ottava_models::layers::RouterLossFactors;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, Decay, Schedule, SchedulerType};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::{Formats, Masters, Storage};
use ottava_recipe::{Precision, Recipe, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device};
use ottava_train::step::TrainStep;
use serde_json::json;
use std::time::Instant;

const SEEDS: [u64; 3] = [0, 1, 2];
const TOKENS: usize = 64;

/// The lengths of runs.
#[derive(Clone, Copy)]
struct Length {
    steps: usize,
    rows: usize,
    /// The number of validation batches of [`Length::rows`] sequences, at the end of the text.
    validation: usize,
}

/// Returns whether runs are long: `just nightly convergence`.
fn in_full() -> bool {
    std::env::var("OTTAVA_CONVERGENCE").is_ok_and(|value| value == "full")
}

/// Returns the seeds of the compared runs.
fn seeds() -> &'static [u64] {
    if in_full() { &SEEDS } else { &SEEDS[..1] }
}

fn length() -> Length {
    match in_full() {
        true => Length { steps: 480, rows: 16, validation: 64 },
        false => Length { steps: 60, rows: 8, validation: 8 },
    }
}

fn model() -> DecoderConfig {
    config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }))
}

/// Returns the validation loss, in nats per byte, after training from `seed`. The seed determines the initial weights and the position in the text.
fn train(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    kept: MemoryPolicy,
    device: &Device,
    text: &[i32],
    seed: u64,
    length: Length,
) -> f64 {
    on_one_thread(|| validation_loss(sizes, recipe, kept, device, text, seed, length))
}

fn validation_loss(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    kept: MemoryPolicy,
    device: &Device,
    text: &[i32],
    seed: u64,
    length: Length,
) -> f64 {
    let Length { steps, rows, validation } = length;
    let (purpose, mut weights) = (Purpose::Train(kept), RandomWeights { seed, device: device.clone() });
    let mut model = Decoder::new(sizes, recipe, device, purpose, TOKENS, &mut weights).unwrap();
    model.quantize_weights().unwrap();
    let how = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    // The learning rate is moderate and ends at zero. At 5e-3, chance alone changes the losses of such runs by 0.05 nat, and the bar would measure
    // chance.
    let mut optimizer = AdamWOptimizer::new(how, &model.parameters()).unwrap();
    let (kind, max_steps) = (SchedulerType::Cosine(Decay::default()), steps as u64);
    let schedule = Schedule { kind, peak: 2e-3, warmup_steps: max_steps / 10, max_steps };
    let mut work = TrainStep::new(&model, 1, rows, TOKENS).unwrap();
    for step in 0..steps {
        let start = (seed as usize * steps + step) * rows * TOKENS;
        let [inputs, targets] = text_batch(text, start, rows, TOKENS).map(|ids| ids.to_vec::<i32>().unwrap());
        work.load(0, &Batch::whole(inputs, targets, rows)).unwrap();
        let done = work.run(&mut model, &mut optimizer, schedule.at(step as u64 + 1), StepPrecision::Recipe).unwrap();
        assert!(done.loss.is_finite() && done.grad_norm.is_finite(), "step {step}: {done:?}");
    }
    let batches = (0..validation).map(|i| text.len() - 1 - (i + 1) * rows * TOKENS);
    let losses = batches.flat_map(|start| {
        let [inputs, targets] = text_batch(text, start, rows, TOKENS).map(|ids| ids.to_device(device).unwrap());
        values(&crate::setup::losses(&mut model, &inputs, &targets, rows).unwrap())
    });
    losses.sum::<f64>() / (validation * rows * TOKENS) as f64
}

fn named(recipe: RecipeName) -> Recipe {
    Precision { recipe, ..Precision::default() }.recipe()
}

/// The maximum mean over seeds of a validation loss minus the reference loss from the same seed, in nats.
const ALLOWED: f64 = 0.02;

/// Returns the validation losses of all `seeds`.
fn losses(name: &str, recipe: &Recipe, kept: MemoryPolicy, device: &Device, text: &[i32], seeds: &[u64]) -> Vec<f64> {
    let begin = Instant::now();
    let losses: Vec<_> =
        seeds.iter().map(|&seed| train(&model(), recipe, kept, device, text, seed, length())).collect();
    eprintln!("{name:<12} {losses:.4?}  {:.1} s", begin.elapsed().as_secs_f64());
    losses
}

/// Panics if `losses` are too far above the losses of a `reference` called `than`.
fn expect_as_low(name: &str, losses: &[f64], than: &str, reference: &[f64]) {
    let gaps: Vec<_> = losses.iter().zip(reference).map(|(loss, reference)| loss - reference).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    eprintln!("{:<12} {gaps:+.4?}  mean {mean:+.4}", format!("  - {than}"));
    assert!(mean <= ALLOWED, "{name} ends {mean:.4} above {than}: {gaps:.4?}");
}

fn announce(device: &Device) {
    let Length { steps, rows, .. } = length();
    eprintln!("validation loss on {device} after {steps} steps of {} bytes, by seed", rows * TOKENS);
}

#[test]
fn fp8_learns_as_well_as_bf16() {
    let text = text();
    for device in devices() {
        announce(&device);
        let run = |name: &str, recipe: &Recipe| losses(name, recipe, MemoryPolicy::FULL, &device, text, seeds());
        let bf16 = run("bf16", &named(RecipeName::Bf16));
        for name in eight_bit_names_on(&device) {
            expect_as_low(name.as_str(), &run(name.as_str(), &named(name)), "bf16", &bf16);
        }
        // This recipe must fail. Otherwise the bar would be meaningless.
        let broken = unscaled_gradients(DType::E4M3);
        let broken = train(&model(), &broken, MemoryPolicy::FULL, &device, text, SEEDS[0], length()) - bf16[0];
        eprintln!("gradients cast without a scale, first seed, - bf16: {broken:+.4}");
        assert!(broken >= 0.2, "gradients that are cast without a scale end only {broken:.4} above bf16 on {device}");
    }
}

#[test]
fn with_activations_saved_in_fp8_models_learn_as_well_as_with_exact_ones() {
    let text = text();
    for device in devices() {
        announce(&device);
        let saved = MemoryPolicy { saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL };
        for (name, policies) in [
            (RecipeName::Bf16, &[Recompute::None][..]),
            (RecipeName::Fp8Delayed, &[Recompute::None, Recompute::Attention]),
        ] {
            let (recipe, name) = (named(name), name.as_str());
            let run = |name: &str, kept| losses(name, &recipe, kept, &device, text, seeds());
            let exact = run(name, MemoryPolicy::FULL);
            for &recompute in policies {
                let words = format!("{name}, float8, {}", recompute.as_str());
                let seen = run(&words, MemoryPolicy { recompute, ..saved });
                expect_as_low(&words, &seen, name, &exact);
            }
        }
    }
}

#[test]
fn every_level_of_the_optimizer_learns_as_well_as_the_first() {
    let text = text();
    for device in devices() {
        announce(&device);
        let recipe = named(RecipeName::Fp8Delayed);
        let run = |name: &str, kept| losses(name, &recipe, kept, &device, text, seeds());
        let first = run("O0", MemoryPolicy::FULL);
        for storage in Storage::ALL.into_iter().skip(1) {
            expect_as_low(storage.as_str(), &run(storage.as_str(), at(storage)), "O0", &first);
        }
        let remainder = Formats { masters: Masters::Remainder, ..MemoryPolicy::FULL.formats };
        expect_as_low(
            "remainder",
            &run("remainder", MemoryPolicy { formats: remainder, ..MemoryPolicy::FULL }),
            "O0",
            &first,
        );
    }
}

/// Returns a model with eight experts in sizes for FP8 products. Each token chooses two experts.
fn routed() -> DecoderConfig {
    let mut sizes = config(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true,
    }));
    sizes.experts_mut().for_each(|experts| experts.losses = RouterLossFactors { balance: 0.01, z: 0.0 });
    sizes
}

/// Runs only `in_full`, since a run takes minutes.
#[test]
fn fp8_learns_as_well_as_bf16_with_experts() {
    if !in_full() {
        return eprintln!("skipped: `just nightly convergence` trains mixtures of experts");
    }
    let text = text();
    for device in devices() {
        announce(&device);
        let run = |name: RecipeName| -> Vec<f64> {
            let one = |&seed: &u64| train(&routed(), &named(name), MemoryPolicy::FULL, &device, text, seed, length());
            let losses = SEEDS[..2].iter().map(one).collect();
            eprintln!("{:<12} {losses:.4?}", name.as_str());
            losses
        };
        let bf16 = run(RecipeName::Bf16);
        for name in [RecipeName::Fp8Block, RecipeName::Fp8Row] {
            expect_as_low(name.as_str(), &run(name), "bf16", &bf16);
        }
    }
}
