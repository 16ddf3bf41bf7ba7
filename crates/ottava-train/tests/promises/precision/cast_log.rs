//! The statistics that a run logs of its casts are correct, and a resumed run logs the same.

use crate::runs::resume::{config, train, write_inputs};
use crate::setup::{devices, fp8_names_on};
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::ops::AmaxReducer;
use ottava_train::trainer::Start;
use serde_json::Value;
use std::path::Path;

fn lines(file: &Path) -> Vec<Value> {
    std::fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns every recipe that casts, on every device that supports its products.
fn runs() -> Vec<(Device, RecipeName)> {
    let on = |device: Device| fp8_names_on(&device).into_iter().map(move |recipe| (device.clone(), recipe));
    devices().into_iter().flat_map(on).collect()
}

/// Returns a run of six steps that logs its casts every `every` steps and saves every `save` steps.
fn logged(inputs: &Path, name: &str, recipe: RecipeName, every: u64, save: u64) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), recipe);
    (config.logging.cast_statistics_steps, config.checkpoint.save_steps) = (every, Interval::Every(save));
    config.precision.delayed.amax_compute_algo = AmaxReducer::MostRecent;
    config
}

#[test]
fn casts_are_logged_as_they_were() {
    for (device, recipe) in runs() {
        let inputs = tempfile::tempdir().unwrap();
        write_inputs(inputs.path());
        let config = logged(inputs.path(), "run", recipe, 1, 0);
        train(&config, &device, &Start::New, u64::MAX).unwrap();
        let metrics = lines(&config.output_dir.join("metrics.jsonl"));
        let log = lines(&config.output_dir.join("casts.jsonl"));
        let what = format!("{} on {device}", recipe.as_str());
        assert_eq!(log.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        for (i, line) in log.iter().enumerate() {
            assert_eq!(line["since"], i, "{what}");
            let casts = line["casts"].as_object().unwrap();
            assert_eq!(casts.len(), 2 * 4 * 3, "{what}: two blocks of four linears with three operands");
            let sum = |key: &str| casts.values().map(|cast| cast[key].as_f64().unwrap()).sum::<f64>();
            let summary = metrics.iter().find(|metrics| metrics["step"] == line["step"] && metrics["loss"].is_number());
            let summary = summary.unwrap();
            for key in ["saturated", "underflowed"] {
                let (share, expected) = (sum(key) / sum("elements"), summary[format!("fp8_{key}")].as_f64().unwrap());
                // Both are quotients of the same whole numbers in F64, written with 17 digits.
                assert!((share - expected).abs() < 1e-12, "{what}, step {}: {key} {share}, {expected}", i + 1);
            }
            for (name, cast) in casts {
                let amax = cast["amax"].as_f64().unwrap() as f32;
                assert!(amax > 0.0, "{what}: {name} was measured");
                if recipe != RecipeName::Fp8Delayed || i == 0 {
                    assert!(cast["scale"].is_null(), "{what}: {name} has no scale before the step");
                    continue;
                }
                // The scale of the next step depends only on the newest amax.
                let before = log[i - 1]["casts"][name]["amax"].as_f64().unwrap() as f32;
                let largest = cast["largest"].as_f64().unwrap() as f32;
                assert_eq!(cast["scale"].as_f64().unwrap() as f32, largest / before, "{what}: {name}, step {}", i + 1);
            }
        }
    }
}

#[test]
fn a_resumed_run_logs_what_an_unbroken_one_does() {
    for (device, recipe) in runs() {
        let inputs = tempfile::tempdir().unwrap();
        write_inputs(inputs.path());
        let [straight, split] = ["straight", "split"].map(|name| logged(inputs.path(), name, recipe, 2, 3));
        train(&straight, &device, &Start::New, u64::MAX).unwrap();
        // The run is stopped after a step without a line, and again after another such step, whose checkpoint is then removed.
        train(&split, &device, &Start::New, 3).unwrap_err();
        train(&split, &device, &Start::Resume, 5).unwrap_err();
        std::fs::remove_dir_all(split.output_dir.join("checkpoints/checkpoint-5")).unwrap();
        train(&split, &device, &Start::Resume, u64::MAX).unwrap();
        let text = |config: &RunConfig| std::fs::read_to_string(config.output_dir.join("casts.jsonl")).unwrap();
        assert_eq!(text(&straight), text(&split), "{} on {device}", recipe.as_str());
        let steps: Vec<_> =
            lines(&split.output_dir.join("casts.jsonl")).iter().map(|line| line["step"].clone()).collect();
        assert_eq!(steps, [2, 4, 6]);
    }
}

#[test]
fn a_run_without_casts_or_interest_logs_none() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = |name: &str, recipe, every| {
        let config = logged(inputs.path(), name, recipe, every, 0);
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let weights = std::fs::read(config.output_dir.join("checkpoints/checkpoint-6/model.safetensors")).unwrap();
        (config.output_dir.join("casts.jsonl").exists(), weights)
    };
    let (plain, silent) = (run("plain", RecipeName::Bf16, 1), run("silent", RecipeName::Fp8Current, 0));
    assert!(!plain.0 && !silent.0);
    assert!(run("logged", RecipeName::Fp8Current, 1) == (true, silent.1), "a log changes no weight");
}
