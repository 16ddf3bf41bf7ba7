//! The sentinel compares a metric of evaluations by the recipe and in BF16.

use crate::runs::resume::metrics;
use crate::runs::resume::write_inputs;
use crate::runs::tasks::run;
use ottava_common::Error;
use ottava_recipe::RecipeName;
use ottava_sentinel::SentinelPolicy;
use ottava_settings::{RunConfig, SentinelConfig};
use ottava_tensor::Device;
use ottava_tensor::planted::{Damage, ProductFault, plant};
use ottava_train::trainer::{Start, Trainer};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// A fault in products of gate and up with 64 tokens. Batches of tasks have 64 tokens; micro-batches and validation batches have 80, and comparisons 40.
const FAULT: ProductFault = ProductFault { shape: [64, 96], first: 0, every: 1, damage: Damage::Factor(1e3) };

/// Returns a run whose sentinel compares losses and gradients, and the perplexity of a task.
fn watched(inputs: &Path, name: &str, policy: SentinelPolicy) -> RunConfig {
    let mut config = run(inputs, name, RecipeName::Fp8Row);
    config.data.max_length = 40;
    config.sentinel = SentinelConfig {
        sentinel_steps: 1,
        sentinel_policy: policy,
        sentinel_metric: "eval_text_byte_perplexity".into(),
        sentinel_metric_gap: 5.0,
        sentinel_metric_return: 2.0,
        ..SentinelConfig::default()
    };
    config
}

/// Trains a run that has `done` steps, until a signal after step `stop_after`. Products have [`FAULT`] in the evaluations after steps 3 and 4.
fn train(config: &RunConfig, start: &Start, done: u64, stop_after: u64) -> ottava_common::Result<()> {
    train_with(FAULT, config, start, done, stop_after)
}

/// Trains like [`train`], with another fault.
fn train_with(
    fault: ProductFault,
    config: &RunConfig,
    start: &Start,
    done: u64,
    stop_after: u64,
) -> ottava_common::Result<()> {
    let mut trainer = Trainer::new(config.clone(), &Device::Cpu, start)?;
    let set = |step: u64| plant((2..4).contains(&step).then_some(fault));
    set(done);
    let stop = AtomicBool::new(stop_after <= done + 1);
    let result = trainer.run(&stop, &mut |report| {
        set(report.step);
        if report.step + 1 >= stop_after {
            stop.store(true, Ordering::Relaxed);
        }
    });
    plant(None);
    result
}

/// Returns the lines of a log of the run.
fn lines(run: &Path, log: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join(log)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_fault_that_breaks_only_a_task_is_found_and_a_resumed_run_decides_alike() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let whole = watched(inputs.path(), "whole", SentinelPolicy::Bf16);
    train(&whole, &Start::New, 0, 100).unwrap();
    let decisions = lines(&whole.output_dir, "alarms.jsonl");
    let told = |at: usize, step: u64, end: &str| {
        let text = decisions[at]["text"].as_str().unwrap();
        assert!(decisions[at]["step"] == step && text.ends_with(end), "{decisions:?}");
    };
    assert_eq!(decisions.len(), 2, "{decisions:?}");
    told(0, 3, "(bound 5); all products in BF16 until the difference is at most 2");
    told(1, 5, ": all products by the recipe again");
    for comparison in lines(&whole.output_dir, "sentinel.jsonl") {
        assert_eq!(comparison["findings"], Value::Array(Vec::new()), "losses and gradients are within their bounds");
    }
    let steps = metrics(&whole.output_dir);
    for done in [3, 4] {
        let broken = watched(inputs.path(), &format!("broken-{done}"), SentinelPolicy::Bf16);
        train(&broken, &Start::New, 0, done).unwrap_err();
        train(&broken, &Start::Resume, done, 100).unwrap();
        assert_eq!(lines(&broken.output_dir, "alarms.jsonl"), decisions, "stopped after step {done}");
        assert_eq!(metrics(&broken.output_dir), steps, "stopped after step {done}");
    }
}

/// Returns the lines of metrics.jsonl without the metric of the sentinel.
fn without_gap(run: &RunConfig) -> Vec<Value> {
    let mut lines = metrics(&run.output_dir);
    lines.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove("eval_sentinel_metric_gap")));
    lines
}

#[test]
fn a_run_that_compares_no_metric_any_more_returns_to_the_recipe() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let mut alone = watched(inputs.path(), "alone", SentinelPolicy::Bf16);
    alone.sentinel = SentinelConfig::default();
    train(&alone, &Start::New, 0, 100).unwrap();
    let mut watched = watched(inputs.path(), "watched", SentinelPolicy::Bf16);
    train(&watched, &Start::New, 0, 3).unwrap_err();
    assert_eq!(lines(&watched.output_dir, "alarms.jsonl").len(), 1, "the run changes to BF16 after step 3");
    watched.sentinel = SentinelConfig::default();
    train(&watched, &Start::Resume, 3, 100).unwrap();
    assert_eq!(without_gap(&watched), without_gap(&alone));
}

#[test]
fn values_that_are_not_finite_by_the_recipe_change_to_bf16() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let fault = ProductFault { damage: Damage::Factor(f32::NAN), ..FAULT };
    let mut alone = watched(inputs.path(), "alone", SentinelPolicy::Bf16);
    alone.sentinel = SentinelConfig::default();
    let error = train_with(fault, &alone, &Start::New, 0, 100).unwrap_err();
    assert!(matches!(error, Error::NonFinite(_)), "without a comparison, the run ends: {error}");
    let mut whole = watched(inputs.path(), "whole", SentinelPolicy::Bf16);
    whole.evaluation.load_best_model_at_end = true;
    train_with(fault, &whole, &Start::New, 0, 100).unwrap();
    let decisions = lines(&whole.output_dir, "alarms.jsonl");
    let texts: Vec<_> = decisions.iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert!(texts.len() == 2 && texts[0].contains(" is NaN by the recipe, and "), "{texts:?}");
    assert!(texts[1].ends_with(": all products by the recipe again"), "{texts:?}");
    let evaluated: Vec<_> = metrics(&whole.output_dir).iter().map(|line| line["eval_loss"].is_f64()).collect();
    assert_eq!(evaluated[..6], [true, true, true, false, true, true], "the evaluation after step 3 has no values");
}

#[test]
fn a_policy_that_reports_changes_no_bit_and_a_pause_ends_the_run() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let reported = watched(inputs.path(), "reported", SentinelPolicy::Report);
    train(&reported, &Start::New, 0, 100).unwrap();
    let mut alone = reported.clone();
    (alone.output_dir, alone.sentinel) = (inputs.path().join("alone"), SentinelConfig::default());
    train(&alone, &Start::New, 0, 100).unwrap();
    assert_eq!(without_gap(&reported), without_gap(&alone));
    let paused = watched(inputs.path(), "paused", SentinelPolicy::Pause);
    let error = train(&paused, &Start::New, 0, 100).unwrap_err();
    let text = error.to_string();
    assert!(error.exit_code() == 76 && text.contains("after step 3: eval_text_byte_perplexity is "), "{text}");
}
