//! The best checkpoint of a run, and early stopping.

use crate::runs::resume::{self, config, metrics, train, write_inputs};
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, RunConfig, Warmup};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Returns a run of twelve steps whose learning rate rises until it is far too high. The validation loss falls at first, and then rises.
fn overshooting(inputs: &Path, name: &str) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), RecipeName::Fp32);
    (config.training.max_steps, config.optimizer.learning_rate) = (Some(12), 1.0);
    config.lr_scheduler.warmup_steps = Warmup::Steps(12);
    (config.evaluation.eval_steps, config.evaluation.load_best_model_at_end) = (Interval::Every(1), true);
    config.checkpoint.save_total_limit = 1;
    config
}

/// Returns the validation losses after each step, and the step of the lowest loss.
fn evaluations(run: &Path) -> (Vec<f64>, u64) {
    let losses: Vec<f64> = metrics(run).iter().skip(1).map(|line| line["eval_loss"].as_f64().unwrap()).collect();
    let best = (0..losses.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap();
    (losses, best as u64 + 1)
}

fn checkpoints(run: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run.join("checkpoints")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_best_checkpoint_is_kept_and_is_the_model_at_the_end() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let config = overshooting(inputs.path(), "run");
    let mut trainer = Trainer::new(config.clone(), &Device::Cpu, &Start::New).unwrap();
    trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    let (losses, step) = evaluations(&config.output_dir);
    assert!(step < 11, "the best of {losses:?} is not one of the last");
    assert_eq!(checkpoints(&config.output_dir), ["checkpoint-12".to_string(), format!("checkpoint-{step}")]);
    let (best, path) = trainer.best().map(|(best, path)| (best.clone(), path)).unwrap();
    assert_eq!((best.step, best.value), (step, losses[step as usize - 1]));
    assert!(path.ends_with(format!("checkpoint-{step}")));
    let (mut model, _) = trainer.into_model().unwrap();
    let weights: Vec<_> =
        model.parameters().iter().map(|param| param.weights.value().unwrap().to_vec::<f32>().unwrap()).collect();
    let from_best = RunConfig { output_dir: inputs.path().join("other"), ..config };
    let from_best = Trainer::new(from_best, &Device::Cpu, &Start::ResumeFrom(path)).unwrap();
    let mut expected = from_best.run;
    let expected: Vec<_> = expected
        .model
        .parameters()
        .iter()
        .map(|param| param.weights.value().unwrap().to_vec::<f32>().unwrap())
        .collect();
    assert!(weights == expected, "the model at the end is that of the best checkpoint");
}

#[test]
fn a_run_that_does_not_improve_ends_and_goes_on_with_more_patience() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let unbroken = overshooting(inputs.path(), "unbroken");
    train(&unbroken, &Device::Cpu, &Start::New, 100).unwrap();
    let (losses, _) = evaluations(&unbroken.output_dir);
    // The first of two consecutive evaluations that are not lower than all earlier evaluations.
    let lowest = |count: usize| losses[..count].iter().copied().fold(f64::INFINITY, f64::min);
    let ends = (2..losses.len()).find(|&i| lowest(i - 1) <= losses[i - 1] && lowest(i) <= losses[i]).unwrap() + 1;
    assert!(ends < losses.len(), "{losses:?}");
    let mut early = overshooting(inputs.path(), "early");
    early.evaluation.early_stopping_patience = 2;
    train(&early, &Device::Cpu, &Start::New, 100).unwrap();
    let (seen, _) = evaluations(&early.output_dir);
    assert_eq!(seen, losses[..ends], "two evaluations in a row without improvement");
    assert!(checkpoints(&early.output_dir).contains(&format!("checkpoint-{ends}")));
    // The run has ended, and does not continue until the patience is raised.
    train(&early, &Device::Cpu, &Start::Resume, 100).unwrap();
    assert_eq!(evaluations(&early.output_dir).0, seen);
    early.evaluation.early_stopping_patience = 100;
    train(&early, &Device::Cpu, &Start::Resume, 100).unwrap();
    assert_eq!(evaluations(&early.output_dir).0, losses);
}

#[test]
fn a_run_that_stops_and_goes_on_has_the_same_best_checkpoint() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let unbroken = overshooting(inputs.path(), "unbroken");
    train(&unbroken, &Device::Cpu, &Start::New, 100).unwrap();
    let broken = overshooting(inputs.path(), "broken");
    for stop_after in [3, 7, 9] {
        let start = if stop_after == 3 { Start::New } else { Start::Resume };
        assert!(train(&broken, &Device::Cpu, &start, stop_after).is_err());
    }
    train(&broken, &Device::Cpu, &Start::Resume, 100).unwrap();
    assert_eq!(metrics(&broken.output_dir), metrics(&unbroken.output_dir));
    assert_eq!(checkpoints(&broken.output_dir), checkpoints(&unbroken.output_dir));
}

#[test]
fn a_metric_that_does_not_exist_is_an_error_with_those_that_do() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let mut config = overshooting(inputs.path(), "run");
    config.evaluation.metric_for_best_model = "accuracy".into();
    let error = resume::train(&config, &Device::Cpu, &Start::New, 100).unwrap_err().to_string();
    assert!(error.contains("is \"accuracy\"; an evaluation of this run has eval_loss, eval_bits_per_byte"), "{error}");
    assert!(!config.output_dir.join("metrics.jsonl").exists(), "it ends before the first evaluation");
}
