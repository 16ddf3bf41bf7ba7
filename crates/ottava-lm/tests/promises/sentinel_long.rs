//! Alarms and checks of long runs that are healthy: `scripts/nightly.sh sentinel`.

use crate::resume::{config, metrics, train, write_inputs};
use crate::sentinel::differences_of_checks;
use crate::setup::text;
use ottava_lm::config::SentinelConfig;
use ottava_lm::recipe::RecipeName;
use ottava_lm::trainer::Start;
use ottava_tensor::Device;
use serde_json::Value;
use std::time::Instant;

const STEPS: u64 = 2000;

#[test]
#[ignore = "takes minutes; scripts/nightly.sh sentinel runs it"]
fn healthy_runs_of_each_recipe_raise_no_alarm() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    // Text that the steps do not read twice.
    let readable = |c: &char| *c == '\n' || (' '..='~').contains(c);
    let text: String = text()[..3_000_000].iter().map(|&id| char::from(id as u8)).filter(readable).collect();
    std::fs::write(inputs.path().join("text.txt"), text).unwrap();
    for recipe in std::iter::once(RecipeName::Bf16).chain(RecipeName::FP8.iter().copied()) {
        let output = tempfile::tempdir().unwrap();
        let mut config = config(inputs.path(), output.path(), recipe);
        let is_fp8 = recipe != RecipeName::Bf16;
        config.sentinel = SentinelConfig { sentinel_steps: if is_fp8 { 50 } else { 0 }, ..SentinelConfig::default() };
        config.training.max_steps = STEPS;
        (config.training.learning_rate, config.training.warmup_steps, config.training.eval_steps) = (3e-3, 50, 0);
        config.training.cast_statistics_steps = 10;
        config.precision.amax_history_len = 16;
        let begin = Instant::now();
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        let alarms = std::fs::read_to_string(output.path().join("alarms.jsonl")).unwrap_or_default();
        let log = std::fs::read_to_string(output.path().join("sentinel.jsonl")).unwrap_or_default();
        let checks: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
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

#[test]
#[ignore = "takes minutes; scripts/nightly.sh sentinel runs it"]
fn ten_thousand_repeated_passes_give_no_false_alarm() {
    let begin = Instant::now();
    let (checks, different) = differences_of_checks(100, 100);
    println!("{checks} repeated passes with {different} differences in {:.0} s", begin.elapsed().as_secs_f64());
    assert_eq!((checks, different), (10_000, 0));
}
