//! Several ranks, as threads, train as one does.

use crate::setup::{Seeded, batch, recipes, tiny_llama};
use ottava_lm::data::Batch;
use ottava_lm::level::Level;
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::Decoder;
use ottava_lm::optim::{AdamWConfig, AdamWOptimizer};
use ottava_lm::parallel::{DataParallel, Partition, Zero};
use ottava_lm::param::{MemoryPolicy, Purpose};
use ottava_lm::recipe::Recipe;
use ottava_lm::step::TrainStep;
use ottava_tensor::Device;
use ottava_tensor::comm::{Comm, threads};
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::testing::values;
use std::rc::Rc;

const ROWS: usize = 4;
const TOKENS: usize = 13;
const STEPS: usize = 3;

/// Loss, norm, weights and scales after steps of [`ROWS`] rows, of which this rank has its share, a row in each micro-batch. Rows have
/// different numbers of targets.
fn run(recipe: &Recipe, memory: MemoryPolicy, zero: Zero, comm: Comm) -> Vec<(String, Vec<f64>)> {
    let (sizes, purpose) = (tiny_llama(), Purpose::Train(memory));
    let mut model = Decoder::new(&sizes, recipe, &Device::Cpu, purpose, 32, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let ranks = Rc::new(DataParallel::new(comm, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero).unwrap();
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let passes = ROWS / ranks.size();
    let mut work = TrainStep::shared(&model, passes, 1, TOKENS, partition).unwrap();
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let [inputs, mut targets] =
            batch(&format!("ranks {step}"), ROWS, TOKENS, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
        targets[..TOKENS - 2].fill(IGNORE_INDEX);
        for pass in 0..passes {
            let row = pass * ranks.size() + ranks.rank();
            let [inputs, targets] = [&inputs, &targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
            work.load(pass, &Batch { inputs, targets, rows: 1, seq_len: TOKENS }).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
    }
    seen.extend(model.parameters().iter().map(|param| (param.name().to_string(), values(&param.value().unwrap()))));
    let arrays = model.scaling().arrays().unwrap();
    seen.extend(arrays.into_iter().filter(|(name, _)| name.ends_with("scale")).map(|(name, x)| (name, values(&x))));
    seen
}

/// Runs a group of threads, and expects equal weights on all of them.
fn on_threads(recipe: &Recipe, memory: MemoryPolicy, zero: Zero, ranks: usize) -> Vec<(String, Vec<f64>)> {
    let group = threads::group(ranks).into_iter().map(|comm| {
        let recipe = recipe.clone();
        std::thread::spawn(move || run(&recipe, memory, zero, comm))
    });
    let mut all: Vec<_> = group.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect();
    let first = all.swap_remove(0);
    for other in all {
        assert!(first == other, "ranks have the same bits");
    }
    first
}

#[test]
fn ranks_that_share_a_step_train_as_one_does() {
    for (name, recipe) in recipes() {
        let alone = run(&recipe, MemoryPolicy::FULL, Zero::Nothing, Comm::solo());
        for ranks in [2, 4] {
            let shared = on_threads(&recipe, MemoryPolicy::FULL, Zero::Nothing, ranks);
            assert_eq!(shared.len(), alone.len());
            for ((tensor, expected), (_, got)) in alone.iter().zip(&shared) {
                // Gradients are the same terms, summed in another order; AdamW's first steps may turn a difference in a tiny gradient
                // into one of some learning rates.
                let size = expected.iter().map(|x| x.abs()).fold(1e-3, f64::max);
                let worst = expected.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst <= 2e-2 * size, "{name}, {ranks} ranks: {tensor} differs by {worst:e} of {size:e}");
            }
            let loss = |seen: &[(String, Vec<f64>)]| seen[0].1.clone();
            for (a, b) in loss(&alone).iter().zip(loss(&shared)) {
                assert!((a - b).abs() <= 2e-3 * a, "{name}, {ranks} ranks: {a} alone and {b}");
            }
        }
    }
}

/// What ranks divide changes who computes, and no bit. Slices are uneven: the matrices of the model are no multiples of 128 · 3.
#[test]
fn divided_updates_have_the_bits_of_whole_ones() {
    for (name, recipe) in recipes() {
        for level in [Level::O0, Level::Bf16] {
            let memory = MemoryPolicy { formats: level.formats(), ..MemoryPolicy::FULL };
            if memory.formats.problem(recipe.compute).is_some() {
                continue;
            }
            for ranks in [2, 4] {
                let whole = on_threads(&recipe, memory, Zero::Nothing, ranks);
                for zero in [Zero::OptimizerStates, Zero::Gradients] {
                    if zero == Zero::Gradients && ranks < ROWS {
                        // Micro-batches are added in another order.
                        continue;
                    }
                    let divided = on_threads(&recipe, memory, zero, ranks);
                    for ((tensor, expected), (_, got)) in whole.iter().zip(&divided) {
                        assert!(expected == got, "{name}, {level:?}, {ranks} ranks, {zero:?}: {tensor}");
                    }
                }
            }
        }
    }
}
