//! The same seed gives the same bits, in every run and with any number of threads.

use crate::setup::{Training, batch, decoder, devices, recipes, recipes_on, tiny_llama};
use ottava_recipe::{Precision, Recipe, RecipeName};
use ottava_tensor::Device;

/// Returns losses, weights and scaling state after three steps on the data called `name`, as bytes.
fn three_steps(recipe: &Recipe, device: &Device, name: &str) -> Vec<Vec<u8>> {
    three_steps_of(recipe, device, name, 17)
}

/// Returns the state after three steps on sequences of `tokens` tokens.
fn three_steps_of(recipe: &Recipe, device: &Device, name: &str, tokens: usize) -> Vec<Vec<u8>> {
    let config = tiny_llama();
    let mut training = Training::new(decoder(&config, recipe, device, 0.1));
    let step = |i: usize| batch(&format!("{name}, step {i}"), 3, tokens, config.vocabulary);
    let losses = (0..3).map(|i| training.step(&step(i), 3).to_bits().to_le_bytes().to_vec()).collect();
    [losses, training.bits()].concat()
}

/// Panics unless both runs have the same bytes. Does not print megabytes of them.
fn expect_same(what: &str, a: &[Vec<u8>], b: &[Vec<u8>]) {
    assert_eq!(a.len(), b.len(), "{what}: as many tensors");
    let differing: Vec<usize> = (0..a.len()).filter(|&i| a[i] != b[i]).collect();
    assert!(differing.is_empty(), "{what}: tensors {differing:?} of {} differ", a.len());
}

#[test]
fn two_runs_leave_the_same_bits() {
    for device in devices() {
        for (name, recipe) in recipes_on(&device) {
            let (a, b) = (three_steps(&recipe, &device, "data"), three_steps(&recipe, &device, "data"));
            expect_same(&format!("{name} on {device}"), &a, &b);
            let other = three_steps(&recipe, &device, "other data");
            let same = a.iter().zip(&other).filter(|(a, b)| a == b).count();
            // The number of updates is always the same, and so are the zeros in a history.
            assert!(same <= 2, "{name} on {device}: {same} tensors do not depend on the data");
        }
    }
}

/// On a GPU, the sums of attention run over many blocks of threads. On a CPU, they always have the same order.
#[test]
fn long_sequences_leave_the_same_bits_where_that_is_asked_for() {
    for device in devices() {
        for name in [RecipeName::Bf16, RecipeName::Fp8Current] {
            let precision = Precision { recipe: name, deterministic: true, ..Precision::default() };
            let tokens = if matches!(device, Device::Cuda(_)) { 1000 } else { 50 };
            let run = || three_steps_of(&precision.recipe(), &device, "data", tokens);
            let first = run();
            for _ in 0..3 {
                expect_same(&format!("{} on {device}", name.as_str()), &first, &run());
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let with_threads = |n: usize, recipe: &Recipe| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads start");
        pool.install(|| three_steps(recipe, &Device::Cpu, "data"))
    };
    for (name, recipe) in recipes() {
        let one = with_threads(1, &recipe);
        for threads in [2, 3] {
            expect_same(&format!("{name} with 1 and {threads} threads"), &one, &with_threads(threads, &recipe));
        }
    }
}
