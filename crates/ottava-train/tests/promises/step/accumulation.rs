//! The division of rows into micro-batches, and evaluations between them, change nothing.

use crate::setup::{
    batch, decoder, devices, devices_of, finish_step, gradients, logits, losses, losses_and_gradients, recipe, recipes,
    relative_error, tiny_llama,
};
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::{Fp8Format, ProductPrecision, Products, Recipe, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::step::TrainStep;

const ROWS: usize = 8;
const TOKENS: usize = 13;

/// Returns the rows `start..end` of a batch on `device`.
fn part(batch: &[Tensor; 2], start: usize, end: usize, device: &Device) -> [Tensor; 2] {
    batch.each_ref().map(|ids| ids.rows(start * TOKENS, end * TOKENS).unwrap().to_device(device).unwrap())
}

/// Runs forward and backward of the rows `start..end` of a batch of [`ROWS`] rows, and returns their losses.
fn micro_batch(decoder: &mut Decoder, batch: &[Tensor; 2], start: usize, end: usize) -> Vec<f64> {
    let [inputs, targets] = part(batch, start, end, decoder.device());
    let scale = 1.0 / (ROWS * TOKENS) as f64;
    values(&losses_and_gradients(decoder, &inputs, &targets, end - start, scale).unwrap())
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let (config, recipe) = (tiny_llama(), recipe(RecipeName::Fp32, Fp8Format::Hybrid));
    let data = batch("accumulation", ROWS, TOKENS, config.vocabulary);
    for device in devices() {
        let run = |rows: usize| {
            let mut decoder = decoder(&config, &recipe, &device, 0.1);
            let losses: Vec<f64> = (0..ROWS)
                .step_by(rows)
                .flat_map(|start| micro_batch(&mut decoder, &data, start, start + rows))
                .collect();
            (losses, gradients(&mut decoder))
        };
        let (losses, whole) = run(ROWS);
        for rows in [2, 1] {
            let (split_losses, split) = run(rows);
            let error = relative_error(&split_losses, &losses);
            // The loss of a token does not depend on other rows, except for the order of sums in products: a few roundings of 6e-8.
            assert!(error < 1e-6, "{device}: losses of micro-batches of {rows} are {error:e} apart");
            let mut worst: f64 = 0.0;
            for ((name, split), (_, whole)) in split.iter().zip(&whole) {
                let error = relative_error(split, whole);
                worst = worst.max(error);
                // Sums of 104 terms in another order differ by a few roundings of 6e-8 each.
                assert!(error < 1e-6, "{device}: gradient of `{name}` from micro-batches of {rows} is {error:e} apart");
            }
            eprintln!("{device}: gradients of micro-batches of {rows} are at most {worst:.1e} apart");
        }
    }
}

/// A step that leaves out its last micro-batches is a step that was made for fewer micro-batches, also when both numbers are captured in turn.
#[test]
fn micro_batches_without_rows_are_not_run() {
    const COUNTS: [usize; 9] = [2, 3, 2, 2, 3, 3, 1, 2, 3];
    let (config, recipe) = (tiny_llama(), recipe(RecipeName::Fp32, Fp8Format::Hybrid));
    let ids = |step: usize| -> Vec<i32> { (0..2 * TOKENS).map(|i| ((i * 31 + step * 17) % 96) as i32).collect() };
    for device in devices() {
        let run = |step_of: &dyn Fn(&Decoder) -> Vec<TrainStep>| -> Vec<[f64; 3]> {
            let mut model = decoder(&config, &recipe, &device, 0.1);
            let mut steps = step_of(&model);
            let how = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
            let mut optimizer = AdamWOptimizer::new(how, &model.parameters()).unwrap();
            let mut step = |(number, &count): (usize, &usize)| {
                let step = match &mut steps[..] {
                    [step] => step,
                    steps => &mut steps[count - 1],
                };
                step.use_micro_batches(count);
                for micro_batch in 0..count {
                    let ids = ids(3 * number + micro_batch);
                    step.load(micro_batch, &Batch::whole(ids.clone(), ids, 2)).unwrap();
                }
                let done = step.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
                [done.loss, done.grad_norm, done.tokens as f64]
            };
            COUNTS.iter().enumerate().map(&mut step).collect()
        };
        let one = run(&|model| vec![TrainStep::new(model, 3, 2, TOKENS).unwrap()]);
        let each = run(&|model| (1..=3).map(|count| TrainStep::new(model, count, 2, TOKENS).unwrap()).collect());
        for (step, (one, each)) in one.iter().zip(&each).enumerate() {
            // Losses are scaled by another number of tokens: a few roundings of 6e-8 in each of nine updates.
            let apart = relative_error(one, each);
            assert!(apart < 1e-5, "{device}, step {step}: {one:?} and {each:?}, {apart:e} apart");
        }
    }
}

/// Returns the newest row of the amax history.
fn newest_amax(decoder: &mut Decoder) -> Vec<f64> {
    let arrays = decoder.scaling().arrays().unwrap();
    let (_, history) = arrays.iter().find(|(name, _)| name == "scaling.amax_history").expect("scaling is delayed");
    let window = history.shape()[0];
    values(&history.rows(window - 1, window).unwrap())
}

/// In the first step, every cast has its own scale, and in the second step all casts read the history. In both steps, the amax of a step is the
/// largest amax of its micro-batches.
#[test]
fn the_amax_of_a_step_is_the_largest_of_its_micro_batches() {
    let config = tiny_llama();
    let data = batch("amax", ROWS, TOKENS, config.vocabulary);
    for (name, recipe) in recipes() {
        for device in devices_of(&recipe) {
            let run = |steps_before: usize, parts: &[(usize, usize)]| {
                let mut decoder = decoder(&config, &recipe, &device, 0.1);
                for _ in 0..steps_before {
                    micro_batch(&mut decoder, &data, 0, 3);
                    finish_step(&mut decoder);
                }
                for &(start, end) in parts {
                    micro_batch(&mut decoder, &data, start, end);
                }
                finish_step(&mut decoder);
                decoder
            };
            for steps_before in [0, 1] {
                let parts = [(3, 4), (4, 7), (7, 8)];
                let mut together = run(steps_before, &parts);
                if recipe.name != RecipeName::Fp8Delayed {
                    assert!(together.scaling().arrays().unwrap().is_empty(), "{name}: nothing is remembered");
                    continue;
                }
                let alone: Vec<_> = parts.iter().map(|&part| newest_amax(&mut run(steps_before, &[part]))).collect();
                let largest: Vec<f64> =
                    (0..alone[0].len()).map(|i| alone.iter().map(|a| a[i]).fold(0.0, f64::max)).collect();
                assert_eq!(newest_amax(&mut together), largest, "{name} on {device}, after {steps_before} steps");
                assert!(largest.iter().all(|&amax| amax > 0.0), "{name} on {device}: every cast was measured");
                assert!(
                    alone.iter().all(|alone| *alone != largest),
                    "{name}: no micro-batch has all the largest values"
                );
            }
        }
    }
}

/// Compares losses, scaling state and gradients of three steps, with and without evaluations between them.
#[test]
fn evaluation_changes_no_bit() {
    let config = tiny_llama();
    let data = batch("evaluation", ROWS, TOKENS, config.vocabulary);
    let other = batch("held out", ROWS, TOKENS, config.vocabulary);
    for (name, recipe) in recipes() {
        for device in devices_of(&recipe) {
            let run = |evaluate: bool| {
                let mut decoder = decoder(&config, &recipe, &device, 0.1);
                let mut seen = Vec::new();
                let evaluation = |decoder: &mut Decoder| {
                    if evaluate {
                        let [inputs, targets] = part(&other, 0, ROWS, &device);
                        losses(decoder, &inputs, &targets, ROWS).unwrap();
                        logits(decoder, &inputs.rows(0, TOKENS).unwrap());
                    }
                };
                for _ in 0..3 {
                    evaluation(&mut decoder);
                    seen.push(micro_batch(&mut decoder, &data, 0, 5));
                    evaluation(&mut decoder);
                    seen.push(micro_batch(&mut decoder, &data, 5, 8));
                    evaluation(&mut decoder);
                    let lost = finish_step(&mut decoder);
                    seen.push(vec![lost.saturated, lost.underflowed]);
                    seen.extend(
                        decoder
                            .scaling()
                            .arrays()
                            .unwrap()
                            .iter()
                            .filter(|(_, a)| a.dtype() == DType::F32)
                            .map(|(_, a)| values(a)),
                    );
                }
                seen.extend(gradients(&mut decoder).into_iter().map(|(_, gradient)| gradient));
                seen
            };
            let differing: Vec<_> =
                run(false).into_iter().zip(run(true)).map(|(without, with)| without != with).collect();
            let first = differing.iter().position(|&differs| differs);
            assert_eq!(first, None, "{name} on {device}: the first array that differs, of {}", differing.len());
        }
    }
}

/// If weights change, the model does not use them until they are quantized again, since forward does not cast weights.
#[test]
fn weights_are_quantized_once_per_step() {
    let config = tiny_llama();
    let data = batch("once", ROWS, TOKENS, config.vocabulary);
    let projections = |decoder: &mut Decoder, values: Option<Vec<Tensor>>| -> Vec<Tensor> {
        let params = decoder.parameters().into_iter().filter(|p| p.identity.name().contains("_proj."));
        let mut values = values.map(Vec::into_iter);
        params
            .map(|param| {
                let old = param.weights.value().unwrap();
                param.weights.set_value(match &mut values {
                    Some(values) => values.next().expect("as many"),
                    None => Tensor::zeros(old.device(), old.shape(), old.dtype()).unwrap(),
                });
                old
            })
            .collect()
    };
    // A linear without casts reads its weight in every call, and so does a linear that scales its weight by its input.
    let all_cast = |recipe: &Recipe| {
        let Products { fprop, dgrad, .. } = recipe.products;
        recipe.casts.is_some()
            && recipe.exceptions.patterns.is_empty()
            && !recipe.smooth_swiglu
            && ![fprop, dgrad].contains(&ProductPrecision::High)
    };
    for (name, recipe) in recipes().into_iter().filter(|(_, recipe)| all_cast(recipe)) {
        for device in devices_of(&recipe) {
            let mut decoder = decoder(&config, &recipe, &device, 0.1);
            let first = micro_batch(&mut decoder, &data, 0, 8);
            let weights = projections(&mut decoder, None);
            assert_eq!(
                micro_batch(&mut decoder, &data, 0, 8),
                first,
                "{name} on {device}: the codes of the step are kept"
            );
            decoder.quantize_weights().unwrap();
            assert_ne!(micro_batch(&mut decoder, &data, 0, 8), first, "{name} on {device}: new codes are read");
            projections(&mut decoder, Some(weights));
            decoder.quantize_weights().unwrap();
            assert_eq!(micro_batch(&mut decoder, &data, 0, 8), first, "{name} on {device}: the same codes again");
        }
    }
}
