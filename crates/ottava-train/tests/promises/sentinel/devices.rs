//! Comparisons with BF16 on each device have the numbers of the CPU, also between steps that are captured and replayed.

use crate::parallel::mesh::rows;
use crate::setup::{Seeded, devices, fp8_recipes_on, tiny_llama};
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::Recipe;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_sentinel::{Bounds, Verdict};
use ottava_tensor::Device;
use ottava_tensor::testing::values;
use ottava_train::step::TrainStep;
use std::collections::BTreeSet;

const ROWS: [usize; 2] = [2, 32];
const BOUNDS: Bounds = Bounds { loss_gap: 0.05, cosine: 0.8 };

/// Returns the verdicts before the steps in `checks`, and the weights and losses after six steps. From step 3 on, one linear is in BF16.
fn run(recipe: &Recipe, device: &Device, checks: &[usize]) -> (Vec<Verdict>, Vec<Vec<f64>>) {
    let sizes = tiny_llama();
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&sizes, recipe, device, purpose, ROWS[1], &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let mut work = TrainStep::new(&model, 1, ROWS[0], ROWS[1]).unwrap();
    let (mut verdicts, mut left) = (Vec::new(), Vec::new());
    for step in 0..6 {
        let batch = rows(&format!("sentinel {step}"), ROWS, 0..0, &sizes);
        work.load(0, &batch).unwrap();
        if checks.contains(&step) {
            verdicts.push(Verdict::of(&work.compare(&mut model, &batch.first_rows(1)).unwrap(), BOUNDS, &[], false));
        }
        if step == 3 {
            model.scaling().set_high_precision(&BTreeSet::from(["model.layers.1.mlp.down_proj".to_string()]));
            work.forget_captures();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        left.push(vec![done.loss, done.grad_norm]);
    }
    left.extend(model.parameters().into_iter().map(|param| values(&param.weights.value().unwrap())));
    (verdicts, left)
}

#[test]
fn comparisons_on_a_gpu_change_no_bit_and_agree_with_the_cpu() {
    // The bounds of the sentinel are for FP8.
    let recipes = fp8_recipes_on(&Device::Cpu).into_iter().filter(|(name, _)| name != "nvfp4");
    for (name, recipe) in recipes {
        let (expected, _) = run(&recipe, &Device::Cpu, &[0, 2, 4]);
        for device in devices().into_iter().filter(|device| recipe.expect_on(device).is_ok()) {
            let (verdicts, left) = run(&recipe, &device, &[0, 2, 4]);
            assert!(left == run(&recipe, &device, &[]).1, "{name} on {device}");
            for (got, expected) in verdicts.iter().zip(&expected) {
                assert_eq!(got.findings, [], "{name} on {device}");
                assert!((got.cosine - expected.cosine).abs() < 0.02, "{name} on {device}: {got:?} {expected:?}");
                // There is one row of 32 tokens: roundings to neighbouring codes change its loss by 0.02 nats.
                assert!((got.loss_gap - expected.loss_gap).abs() < 0.05, "{name} on {device}: {got:?} {expected:?}");
                for ((name, error), (_, of_cpu)) in got.ranking.iter().zip(&expected.ranking) {
                    assert!((error - of_cpu).abs() < 0.02, "{name} on {device}: {error} and {of_cpu}");
                }
            }
        }
    }
}
