//! A whole optimizer step gives the same bits with or without capture, and for any way of casting its weights.

use crate::setup::{
    Seeded, batch, devices, losses, losses_and_gradients, on_one_thread, recipe, recipes_on, tiny_llama,
};
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{
    AdamWConfig, AdamWOptimizer, Optimizer, Prepared, find_amaxes, grad_norm, optimizer_tensors as kept_of, update,
};
use ottava_recipe::mode::{Mode, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::scaling::OneRank;
use ottava_recipe::storage::{Formats, Masters, Share, Storage};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device};
use ottava_train::step::TrainStep;

const ROWS: usize = 3;
const TOKENS: usize = 13;
const STEPS: usize = 5;

/// Returns losses, norms, weights, moments and scales after five steps of two micro-batches. `before` runs before each step.
pub fn run(
    recipe: &Recipe,
    device: &Device,
    kept: MemoryPolicy,
    recorded: bool,
    before: impl FnMut(&mut Decoder, usize) -> StepPrecision + Send,
) -> Vec<(String, Vec<f64>)> {
    run_of(&tiny_llama(), recipe, device, kept, recorded, before)
}

/// Returns the state after the same steps of a model of `sizes`.
pub fn run_of(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    kept: MemoryPolicy,
    recorded: bool,
    before: impl FnMut(&mut Decoder, usize) -> StepPrecision + Send,
) -> Vec<(String, Vec<f64>)> {
    on_one_thread(|| five_steps(sizes, recipe, device, kept, recorded, before))
}

fn five_steps(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    kept: MemoryPolicy,
    recorded: bool,
    mut before: impl FnMut(&mut Decoder, usize) -> StepPrecision,
) -> Vec<(String, Vec<f64>)> {
    // Updates cannot be added to float16.
    let masters = match kept.formats.masters {
        Masters::None if recipe.compute == DType::F16 => Masters::Float32,
        Masters::Remainder if recipe.compute != DType::BF16 => Masters::Float32,
        other => other,
    };
    let kept = MemoryPolicy { formats: Formats { masters, ..kept.formats }, ..kept };
    let purpose = Purpose::Train(kept);
    let mut model = Decoder::new(sizes, recipe, device, purpose, 32, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let work = TrainStep::new(&model, 2, ROWS, TOKENS).unwrap();
    let mut work = if recorded { work } else { work.eager() };
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let precision = before(&mut model, step);
        for micro_batch in 0..2 {
            let [inputs, targets] = batch(&format!("step {step}, {micro_batch}"), ROWS, TOKENS, sizes.vocabulary)
                .map(|ids| ids.to_vec::<i32>().unwrap());
            work.load(micro_batch, &Batch::whole(inputs, targets, ROWS)).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-2 / (step + 1) as f64, precision).unwrap();
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
        let lost = model.scaling().losses(&OneRank).unwrap();
        seen.push((format!("what casts lost in step {step}"), vec![lost.saturated, lost.underflowed]));
        for cast in model.scaling().measured(&OneRank).unwrap() {
            let measured = vec![f64::from(cast.amax), cast.scale.map_or(0.0, f64::from)];
            seen.push((format!("amax and scale of {} in step {step}", cast.name), measured));
        }
    }
    let loss =
        |step: usize| seen.iter().find(|(what, _)| *what == format!("loss and norm of step {step}")).unwrap().1[0];
    assert!(loss(0) > loss(STEPS - 1), "the loss falls: {seen:?}");
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let name = param.identity.name().to_string();
        seen.push((name.clone(), values(&param.weights.value().unwrap())));
        for kept in kept_of(&mut param.weights, states) {
            let bits = kept.tensor.read_bytes().unwrap();
            seen.push((format!("{} of {name}", kept.kind), bits.into_iter().map(f64::from).collect()));
        }
    }
    let arrays = model.scaling().arrays().unwrap().into_iter();
    seen.extend(arrays.filter(|(_, a)| a.dtype() == DType::F32).map(|(name, array)| (name, values(&array))));
    seen
}

pub fn expect_same(what: &str, expected: &[(String, Vec<f64>)], got: &[(String, Vec<f64>)]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for ((name, expected), (_, got)) in expected.iter().zip(got) {
        assert!(expected == got, "{what}: {name} differs");
    }
}

/// Removes the losses of casts: weights whose codes are not stored are cast and counted more often.
pub fn without_losses_of_casts(all: &[(String, Vec<f64>)]) -> Vec<(String, Vec<f64>)> {
    all.iter().filter(|(name, _)| !name.contains("casts")).cloned().collect()
}

pub const LEAN: MemoryPolicy = MemoryPolicy { formats: Storage::Bfloat16.formats(), ..MemoryPolicy::FULL };
const FLOAT8: SavedActivations = SavedActivations::Float8;

/// Returns the memory policy of a run at `storage`.
pub fn at(storage: Storage) -> MemoryPolicy {
    MemoryPolicy { formats: storage.formats(), weight_codes: storage.weight_codes(), ..MemoryPolicy::FULL }
}

#[test]
fn a_recorded_step_gives_the_bits_of_one_that_is_not() {
    for device in devices() {
        for (name, recipe) in recipes_on(&device) {
            // On the CPU, steps are not captured, so this compares equal runs.
            let policies = if matches!(device, Device::Cpu) { 1 } else { usize::MAX };
            for kept in [
                LEAN,
                MemoryPolicy::FULL,
                MemoryPolicy { recompute: Recompute::NormSwiglu, weight_codes: false, ..LEAN },
                MemoryPolicy { recompute: Recompute::NormSwiglu, saved_activations: FLOAT8, ..LEAN },
                MemoryPolicy { saved_activations: FLOAT8, ..MemoryPolicy::FULL },
                MemoryPolicy { recompute: Recompute::Full, ..MemoryPolicy::FULL },
                MemoryPolicy { formats: Formats { masters: Masters::Remainder, ..LEAN.formats }, ..LEAN },
                at(Storage::MsampO1),
                MemoryPolicy { recompute: Recompute::NormSwiglu, ..at(Storage::MsampO3) },
                at(Storage::Coat),
            ]
            .into_iter()
            .take(policies)
            {
                let eager = run(&recipe, &device, kept, false, |_, _| StepPrecision::Recipe);
                expect_same(
                    &format!("{name} on {device}, {kept:?}"),
                    &eager,
                    &run(&recipe, &device, kept, true, |_, _| StepPrecision::Recipe),
                );
                // An evaluation allocates and frees memory between steps.
                let evaluate = |model: &mut Decoder, _| {
                    let ids = integers("ids", 2 * TOKENS, 96).to_device(&device).unwrap();
                    losses(model, &ids, &ids, 2).unwrap();
                    StepPrecision::Recipe
                };
                let evaluated = run(&recipe, &device, kept, true, evaluate);
                expect_same(&format!("{name} on {device}, {kept:?}, evaluated"), &eager, &evaluated);
            }
        }
    }
}

/// Steps by the recipe and in high precision alternate. Each kind is captured once and replayed, with evaluations between the steps. The loss scale
/// changes twice, and no captured step uses an old loss scale.
#[test]
fn captured_steps_of_both_kinds_replay_across_changes_of_the_loss_scale() {
    for device in devices() {
        for name in [RecipeName::Fp16, RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Block] {
            let recipe = recipe(name, Fp8Format::Auto);
            let run = |captured: bool| {
                let sizes = tiny_llama();
                let purpose = Purpose::Train(MemoryPolicy::FULL);
                let mut model = Decoder::new(&sizes, &recipe, &device, purpose, 32, &mut Seeded { std: 0.1 }).unwrap();
                model.quantize_weights().unwrap();
                let config =
                    AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
                let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
                let work = TrainStep::new(&model, 1, ROWS, TOKENS).unwrap();
                let mut work = if captured { work } else { work.eager() };
                let mut seen = Vec::new();
                for step in 0..12 {
                    if step % 4 == 0 {
                        work.set_loss_scale([1.0, 1024.0, 8.0][step / 4]).unwrap();
                    }
                    let [inputs, targets] = batch(&format!("scale {step}"), ROWS, TOKENS, sizes.vocabulary)
                        .map(|ids| ids.to_vec::<i32>().unwrap());
                    work.load(0, &Batch::whole(inputs, targets, ROWS)).unwrap();
                    let kind = if step % 3 == 2 { StepPrecision::High } else { StepPrecision::Recipe };
                    let done = work.run(&mut model, &mut optimizer, 1e-3, kind).unwrap();
                    seen.push((format!("step {step}"), vec![done.loss, done.grad_norm]));
                }
                let params = model.parameters();
                seen.extend(
                    params
                        .into_iter()
                        .map(|param| (param.identity.name().to_string(), values(&param.weights.value().unwrap()))),
                );
                seen
            };
            expect_same(&format!("{} on {device}", name.as_str()), &run(false), &run(true));
        }
    }
}

#[test]
fn weights_are_cast_to_the_same_bits_by_an_update_by_themselves_and_by_each_product() {
    for device in devices() {
        for (name, recipe) in recipes_on(&device).into_iter().filter(|(_, recipe)| recipe.casts.is_some()) {
            for kept in [MemoryPolicy::FULL, LEAN, at(Storage::MsampO3)] {
                let cast_by_update = run(&recipe, &device, kept, false, |_, _| StepPrecision::Recipe);
                let cast_again = run(&recipe, &device, kept, false, |model, _| {
                    model.quantize_weights().unwrap();
                    StepPrecision::Recipe
                });
                expect_same(&format!("{name} on {device}, {kept:?}"), &cast_by_update, &cast_again);
                let cast_by_products =
                    run(&recipe, &device, MemoryPolicy { weight_codes: false, ..kept }, false, |_, _| {
                        StepPrecision::Recipe
                    });
                let [once, often] = [&cast_by_update, &cast_by_products].map(|all| without_losses_of_casts(all));
                expect_same(&format!("{name} on {device}, {kept:?}, without codes"), &once, &often);
            }
        }
    }
}

/// Tensors are in the memory of the GPU or of the host, and the results are the same. A CPU has one memory, so there this compares equal runs.
#[test]
fn where_tensors_are_kept_changes_no_bit() {
    for device in devices() {
        for (name, recipe) in recipes_on(&device)
            .into_iter()
            .filter(|(name, _)| ["bf16", "fp8-current", "fp8-block"].contains(&name.as_str()))
        {
            let remainder = Formats { masters: Masters::Remainder, ..MemoryPolicy::FULL.formats };
            for kept in [
                MemoryPolicy::FULL,
                MemoryPolicy { formats: remainder, ..MemoryPolicy::FULL },
                at(Storage::MsampO2),
                at(Storage::MsampO3),
                at(Storage::Coat),
            ] {
                let here = run(&recipe, &device, kept, true, |_, _| StepPrecision::Recipe);
                let [half, all] = [0.5, 1.0].map(Share::new);
                for there in [
                    MemoryPolicy { offload_optimizer: half, ..kept },
                    MemoryPolicy { offload_optimizer: all, ..kept },
                    MemoryPolicy { offload_parameters: half, ..kept },
                    MemoryPolicy { offload_parameters: all, offload_optimizer: half, ..kept },
                    MemoryPolicy {
                        recompute: Recompute::Full,
                        offload_residuals: true,
                        offload_parameters: all,
                        ..kept
                    },
                ] {
                    let [here, there_run] = [&here, &run(&recipe, &device, there, true, |_, _| StepPrecision::Recipe)]
                        .map(|all| without_losses_of_casts(all));
                    expect_same(&format!("{name} on {device}, {there:?}"), &here, &there_run);
                }
            }
        }
    }
}

/// Ranks merge the amaxes of their slices before the update. Offloaded states are fetched for both passes.
#[test]
fn amaxes_found_before_the_update_change_no_bit() {
    for device in devices() {
        let kept = MemoryPolicy { offload_optimizer: Share::new(0.5), ..at(Storage::MsampO3) };
        let [together, apart] = [false, true].map(|apart| {
            let (sizes, recipe) = (tiny_llama(), recipe(RecipeName::Fp8Delayed, Fp8Format::Auto));
            let (purpose, weights) = (Purpose::Train(kept), &mut Seeded { std: 0.1 });
            let mut model = Decoder::new(&sizes, &recipe, &device, purpose, 32, weights).unwrap();
            model.quantize_weights().unwrap();
            let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
            let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
            for step in 0..STEPS {
                let ids = batch(&format!("amaxes {step}"), ROWS, TOKENS, sizes.vocabulary);
                let [inputs, targets] = ids.map(|ids| ids.to_device(&device).unwrap());
                losses_and_gradients(&mut model, &inputs, &targets, ROWS, 1.0 / targets.len() as f64).unwrap();
                let norm = grad_norm(&model.parameters()).unwrap();
                optimizer.begin_step(1e-2, 1.0).unwrap();
                let (mut params, scaling) = model.parameters_and_scaling();
                scaling.update().unwrap();
                let mut prepared = Prepared::default();
                if apart {
                    let found = find_amaxes(&mut optimizer, &mut params, 0, &prepared, &norm).unwrap();
                    prepared.amaxes = Some(found.expect("O3 has scales"));
                }
                update(&mut optimizer, &mut params, 0, &mut scaling.casts(Mode::TRAINING), &norm, prepared).unwrap();
                model.parameters().into_iter().for_each(|param| param.gradient.clear());
            }
            let mut seen = Vec::new();
            for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
                let name = param.identity.name().to_string();
                let bits = kept_of(&mut param.weights, states).into_iter().map(|kept| {
                    let bytes = kept.tensor.read_bytes().unwrap();
                    (format!("{} of {name}", kept.kind), bytes.into_iter().map(f64::from).collect())
                });
                seen.extend(bits);
            }
            seen
        });
        expect_same(&format!("on {device}"), &together, &apart);
    }
}
