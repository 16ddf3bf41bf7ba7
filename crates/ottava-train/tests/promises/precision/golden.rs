//! The losses of twenty steps of a tiny model, per recipe: bit for bit on the CPU, and closely on a GPU.
//!  If a change is meant to change these losses, record them again with `OTTAVA_GOLDEN=record`, and give the reason in the commit.

use crate::setup::{Training, batch, decoder, recipes, recipes_on, tiny_llama};
use ottava_recipe::Recipe;
use ottava_tensor::testing::gpu;
use ottava_tensor::{DType, Device};
use std::collections::BTreeMap;

const STEPS: usize = 20;
const ROWS: usize = 4;
const TOKENS: usize = 24;
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden_losses.json");

/// Losses by recipe. They are written as the shortest decimals that read back as the same binary32, so the file is exact and legible.
type Losses = BTreeMap<String, Vec<f32>>;

fn losses(recipe: &Recipe, device: &Device) -> Vec<f32> {
    let config = tiny_llama();
    let mut training = Training::new(decoder(&config, recipe, device, 0.08));
    let step = |i: usize| batch(&format!("golden, step {i}"), ROWS, TOKENS, config.vocabulary);
    (0..STEPS).map(|i| training.step(&step(i), ROWS) as f32).collect()
}

fn recorded() -> Losses {
    let text =
        std::fs::read_to_string(FILE).expect("tests/data/golden_losses.json is there; OTTAVA_GOLDEN=record makes it");
    serde_json::from_str(&text).expect("a list of losses per recipe")
}

fn record(losses: &Losses) {
    let line =
        |(name, losses)| format!("  {}: {}", serde_json::json!(name), serde_json::to_string(losses).expect("numbers"));
    let lines: Vec<String> = losses.iter().map(|(name, losses): (&String, &Vec<f32>)| line((name, losses))).collect();
    std::fs::write(FILE, format!("{{\n{}\n}}\n", lines.join(",\n"))).expect("the file is written");
}

#[test]
fn losses_of_twenty_steps_are_the_recorded_bits() {
    let seen: Losses = recipes().into_iter().map(|(name, recipe)| (name, losses(&recipe, &Device::Cpu))).collect();
    if std::env::var("OTTAVA_GOLDEN").is_ok_and(|value| value == "record") {
        record(&seen);
    }
    let recorded = recorded();
    assert_eq!(seen.keys().collect::<Vec<_>>(), recorded.keys().collect::<Vec<_>>(), "recipes");
    for (name, seen) in &seen {
        let differing = (0..STEPS).find(|&i| seen[i].to_bits() != recorded[name][i].to_bits());
        assert_eq!(
            differing, None,
            "{name}: the first step that differs, of {seen:?}, recorded as {:?}",
            recorded[name]
        );
        assert!(seen[STEPS - 1] < seen[0], "{name} learns: {seen:?}");
    }
}

#[test]
fn losses_on_a_gpu_are_close_to_the_recorded_ones() {
    let Some(gpu) = gpu() else { return };
    let recorded = recorded();
    for (name, recipe) in recipes_on(&gpu) {
        let seen = losses(&recipe, &gpu);
        let apart = |i: usize| (seen[i] / recorded[&name][i] - 1.0).abs();
        let worst = (0..STEPS).max_by(|&i, &j| apart(i).total_cmp(&apart(j))).expect("steps");
        // Sums in another order change a few roundings to BF16, and these change a few roundings to FP8, which is 16 or 32 times coarser.
        let allowed = match (recipe.compute, recipe.casts) {
            (DType::F32, _) => 1e-5,
            (_, None) => 2e-3,
            (_, Some(_)) => 1e-2,
        };
        eprintln!("{name} on {gpu}: losses are at most {:.1e} from the recorded ones, in step {worst}", apart(worst));
        assert!(apart(worst) < allowed, "{name} on {gpu}: step {worst} of {seen:?}, recorded as {:?}", recorded[&name]);
    }
}
