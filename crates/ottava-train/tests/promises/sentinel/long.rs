//! Alarms and checks in long, healthy runs: `scripts/nightly.sh sentinel`.

use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::sentinel::comparisons::differences_of_checks;
use crate::setup::text;
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, RunConfig, Warmup};
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use serde_json::Value;
use std::path::Path;
use std::time::Instant;
use tempfile::TempDir;

const STEPS: u64 = 2000;

/// Writes text that the steps do not read twice.
fn inputs() -> TempDir {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let readable = |c: &char| *c == '\n' || (' '..='~').contains(c);
    let text: String = text()[..3_000_000].iter().map(|&id| char::from(id as u8)).filter(readable).collect();
    std::fs::write(inputs.path().join("text.txt"), text).unwrap();
    inputs
}

fn long(inputs: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    let mut config = config(inputs, output, recipe);
    config.training.max_steps = Some(STEPS);
    (config.optimizer.learning_rate, config.lr_scheduler.warmup_steps, config.evaluation.eval_steps) =
        (3e-3, Warmup::Steps(50), Interval::End);
    (config.logging.cast_statistics_steps, config.precision.delayed.amax_history_len) = (10, 16);
    config
}

/// Returns the lines of `sentinel.jsonl`. Returns no lines if the file does not exist.
fn checks(run: &Path) -> Vec<Value> {
    let log = std::fs::read_to_string(run.join("sentinel.jsonl")).unwrap_or_default();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
#[ignore = "takes minutes; scripts/nightly.sh sentinel runs it"]
fn healthy_runs_of_each_recipe_raise_no_alarm() {
    let inputs = inputs();
    // The bounds of the sentinel are for FP8.
    for recipe in
        std::iter::once(RecipeName::Bf16).chain(RecipeName::FP8.into_iter().filter(|name| *name != RecipeName::Nvfp4))
    {
        let output = tempfile::tempdir().unwrap();
        let mut config = long(inputs.path(), output.path(), recipe);
        config.sentinel.sentinel_steps = if recipe == RecipeName::Bf16 { 0 } else { 50 };
        let begin = Instant::now();
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        let alarms = std::fs::read_to_string(output.path().join("alarms.jsonl")).unwrap_or_default();
        let checks = checks(output.path());
        let findings: usize = checks.iter().map(|check| check["findings"].as_array().unwrap().len()).sum();
        let loss = metrics(output.path()).last().unwrap()["loss"].as_f64().unwrap();
        println!(
            "{recipe:?}: {STEPS} steps in {seconds:.0} s, loss {loss:.3}, {} comparisons with {findings} findings, {} alarms",
            checks.len(),
            alarms.lines().count()
        );
        assert_eq!((findings, alarms.as_str()), (0, ""), "{recipe:?}: {checks:?}");
    }
}

/// Returns the mean of `values` and its standard error.
fn mean(values: &[f64]) -> [f64; 2] {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    [mean, (variance / count).sqrt()]
}

/// The difference of two losses of a few hundred tokens is noisy. Its mean over many comparisons equals the sum of the costs.
#[test]
#[ignore = "takes minutes; scripts/nightly.sh sentinel runs it"]
fn estimated_loss_costs_add_up_to_the_measured_loss_gap() {
    let inputs = inputs();
    for recipe in [RecipeName::Fp8Delayed, RecipeName::Fp8Block] {
        let output = tempfile::tempdir().unwrap();
        let mut config = long(inputs.path(), output.path(), recipe);
        (config.sentinel.sentinel_steps, config.sentinel.sentinel_sequences) = (2, 6);
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let checks = checks(output.path()).split_off(300);
        let sum =
            |check: &Value| check["loss_cost"].as_object().unwrap().values().map(|cost| cost.as_f64().unwrap()).sum();
        let [gap, error] = mean(&checks.iter().map(|check| check["loss_gap"].as_f64().unwrap()).collect::<Vec<_>>());
        let [cost, _] = mean(&checks.iter().map(sum).collect::<Vec<_>>());
        println!("{recipe:?}: loss gap {gap:.5} ± {error:.5} nats, estimated {cost:.5}, {} comparisons", checks.len());
        assert!((gap - cost).abs() < 3.0 * error + 0.3 * cost && cost > 2.0 * error, "{recipe:?}");
    }
}

#[test]
#[ignore = "takes minutes; scripts/nightly.sh sentinel runs it"]
fn ten_thousand_repeated_passes_give_no_false_alarm() {
    let begin = Instant::now();
    let (checks, different) = differences_of_checks(100, 100);
    println!("{checks} repeated passes with {different} differences in {:.0} s", begin.elapsed().as_secs_f64());
    assert_eq!((checks, different), (10_000, 0));
}
