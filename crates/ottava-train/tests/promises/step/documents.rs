//! Documents that share a row, and targets that are ignored.

use crate::setup::{
    Seeded, batch, devices, devices_of, gradients, losses_and_gradients_of, recipe, recipes, tiny_llama,
};
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, Optimizer};
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::testing::values;
use ottava_train::step::TrainStep;

const TOKENS: usize = 13;

fn model(recipe: &Recipe, device: &Device, memory: MemoryPolicy) -> Decoder {
    let purpose = Purpose::Train(memory);
    let mut model = Decoder::new(&tiny_llama(), recipe, device, purpose, 64, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Returns losses and gradients of three documents of [`TOKENS`] tokens, in the layout of `sequences`.
fn documents(recipe: &Recipe, device: &Device, recompute: Recompute, sequences: &Sequences) -> Vec<(String, Vec<f64>)> {
    let mut model = model(recipe, device, MemoryPolicy { recompute, ..MemoryPolicy::FULL });
    let [inputs, targets] = batch("documents", 3, TOKENS, 96).map(|ids| ids.to_device(device).unwrap());
    let losses = losses_and_gradients_of(&mut model, &inputs, &targets, sequences.clone(), 0.01).unwrap();
    let mut seen = vec![("losses".to_string(), values(&losses))];
    seen.extend(gradients(&mut model));
    seen
}

/// Only attention and positions depend on where a document ends, so the bits are the same as with one document per row. On a GPU, this holds only for
/// types whose attention is one kernel in both cases.
#[test]
fn packed_documents_have_the_bits_of_separate_sequences() {
    for (name, recipe) in recipes() {
        for device in devices_of(&recipe) {
            if matches!(device, Device::Cuda(_)) && recipe.name != RecipeName::Fp32 {
                continue;
            }
            for recompute in [Recompute::None, Recompute::Attention, Recompute::Full] {
                let run = |sequences: &Sequences| documents(&recipe, &device, recompute, sequences);
                let separate = run(&Sequences::new(&device, 3, TOKENS).unwrap());
                let mut row = Sequences::packed(&device, 1, 3 * TOKENS, 5).unwrap();
                let leaking = run(&row);
                row.set_documents(&[TOKENS; 3]).unwrap();
                for ((tensor, expected), (_, got)) in separate.iter().zip(&run(&row)) {
                    assert!(expected == got, "{name} on {device}, {}: {tensor} differs", recompute.as_str());
                }
                assert!(separate[0].1[TOKENS..] != leaking[0].1[TOKENS..], "a leak between documents is noticed");
            }
        }
    }
}

#[test]
fn documents_that_do_not_fit_are_errors() {
    let mut sequences = Sequences::packed(&Device::Cpu, 2, 8, 3).unwrap();
    for (lengths, says) in [
        (&[8, 4][..], "they have 12 tokens"),
        (&[8, 4, 2, 2], "4 are more than the 3"),
        (&[6, 8, 2], "document 1 of 8 tokens at token 6 does not lie within one sequence"),
        (&[8, 0, 8], "document 1 of 0 tokens"),
    ] {
        let error = sequences.set_documents(lengths).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    sequences.set_documents(&[8, 3, 5]).unwrap();
    assert_eq!(sequences.positions.to_vec::<i32>().unwrap()[8..], [0, 1, 2, 0, 1, 2, 3, 4]);
    assert_eq!(sequences.cu_seqlens.unwrap().to_vec::<i32>().unwrap(), [0, 8, 11, 16]);
}

/// Returns loss, norm and weights after two steps of one micro-batch of `rows` rows. Rows from `row` on have no targets.
fn masked(recipe: &Recipe, device: &Device, rows: usize, row: usize) -> Vec<(String, Vec<f64>)> {
    let mut model = model(recipe, device, MemoryPolicy::FULL);
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let mut work = TrainStep::new(&model, 1, rows, TOKENS).unwrap();
    let mut seen = Vec::new();
    for step in 0..2 {
        let [inputs, mut targets] = batch(&format!("masked {step}"), 4, TOKENS, 96)
            .map(|ids| ids.to_vec::<i32>().unwrap()[..rows * TOKENS].to_vec());
        targets[row * TOKENS..].fill(IGNORE_INDEX);
        work.load(0, &Batch::whole(inputs, targets, rows)).unwrap();
        let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
    }
    seen.extend(
        model
            .parameters()
            .iter()
            .map(|param| (param.identity.name().to_string(), values(&param.weights.value().unwrap()))),
    );
    seen
}

/// If half of the rows are ignored, backward divides by twice the target tokens and the update multiplies by two, which is exact.
#[test]
fn ignored_targets_do_not_dilute_a_step() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    for device in devices() {
        let (whole, half) = (masked(&recipe, &device, 2, 2), masked(&recipe, &device, 4, 2));
        for ((name, expected), (_, got)) in whole.iter().zip(&half) {
            // Products of other shapes may sum in another order.
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * a.abs().max(1e-3);
            assert!(expected.iter().zip(got).all(near), "{name} on {device}: {expected:?} and {got:?}");
        }
    }
}

#[test]
fn a_step_without_targets_is_an_error() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut model = model(&recipe, &Device::Cpu, MemoryPolicy::FULL);
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let mut work = TrainStep::new(&model, 1, 1, TOKENS).unwrap();
    let (inputs, targets) = (vec![1; TOKENS], vec![IGNORE_INDEX; TOKENS]);
    work.load(0, &Batch::whole(inputs, targets, 1)).unwrap();
    let error = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap_err().to_string();
    assert!(error.contains("no target token"), "{error}");
    assert_eq!(optimizer.steps(), 0);
}
