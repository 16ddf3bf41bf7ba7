//! The sentinel in a run: its decisions, and what a resumed run makes of them.

use crate::resume::{STEPS, config, metrics, state, train, write_inputs};
use ottava_lm::config::{RunConfig, SentinelConfig};
use ottava_lm::recipe::RecipeName;
use ottava_lm::sentinel::SentinelPolicy;
use ottava_lm::trainer::{Start, Trainer};
use ottava_lm::{Error, Result};
use ottava_tensor::Device;
use ottava_tensor::planted::{Damage, ProductFault, plant};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A bound that no comparison meets, so that each one is a finding.
const NEVER_MET: f64 = 1e-9;

fn watched(inputs: &Path, output: &Path, recipe: RecipeName, policy: SentinelPolicy, loss_gap: f64) -> RunConfig {
    let sentinel = SentinelConfig {
        sentinel_steps: 2,
        sentinel_policy: policy,
        sentinel_hold_steps: 2,
        sentinel_loss_gap: loss_gap,
        sentinel_sequences: 2,
        ..SentinelConfig::default()
    };
    RunConfig { sentinel, ..config(inputs, output, recipe) }
}

fn checks(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("sentinel.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_sentinel_that_reports_changes_no_bit_of_a_run() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for recipe in [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Block] {
        let [alone, beside] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        train(&config(inputs.path(), alone.path(), recipe), &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let watched = watched(inputs.path(), beside.path(), recipe, SentinelPolicy::Report, NEVER_MET);
        train(&watched, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        assert_eq!(metrics(alone.path()), metrics(beside.path()), "{recipe:?}");
        assert!(state(alone.path()) == state(beside.path()), "{recipe:?}");
        let checks = checks(beside.path());
        assert_eq!(checks.iter().map(|check| check["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3, 5]);
        for check in checks {
            assert_eq!(check["decision"], "none");
            assert!(check["findings"][0]["text"].as_str().unwrap().starts_with("the loss is "), "{check}");
            for quantity in ["cast", "fprop", "dgrad", "wgrad", "output", "grad_input", "gradient"] {
                assert!(check[quantity].as_object().is_some_and(|tensors| !tensors.is_empty()), "{quantity}");
            }
        }
    }
}

#[test]
fn a_resumed_run_decides_as_the_interrupted_one() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for (recipe, policy) in [
        (RecipeName::Fp8Delayed, SentinelPolicy::Demote),
        (RecipeName::Fp8Delayed, SentinelPolicy::Bf16),
        (RecipeName::Fp8Row, SentinelPolicy::Demote),
    ] {
        let whole = tempfile::tempdir().unwrap();
        let of = |output: &Path| watched(inputs.path(), output, recipe, policy, NEVER_MET);
        train(&of(whole.path()), &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let decisions: Vec<_> = checks(whole.path()).iter().map(|check| check["decision"].clone()).collect();
        assert!(decisions.iter().any(|decision| decision != "none"), "{decisions:?}");
        for stop_after in 1..STEPS {
            let stopped = tempfile::tempdir().unwrap();
            train(&of(stopped.path()), &Device::Cpu, &Start::New, stop_after).unwrap_err();
            train(&of(stopped.path()), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
            let what = format!("{recipe:?}, {policy:?}, stopped after {stop_after}");
            assert_eq!(checks(whole.path()), checks(stopped.path()), "{what}");
            assert_eq!(metrics(whole.path()), metrics(stopped.path()), "{what}");
            assert!(state(whole.path()) == state(stopped.path()), "{what}");
        }
    }
}

#[test]
fn a_pause_saves_and_the_run_goes_on_from_there() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let output = tempfile::tempdir().unwrap();
    let config = watched(inputs.path(), output.path(), RecipeName::Fp8Delayed, SentinelPolicy::Pause, NEVER_MET);
    for (start, step) in [(Start::New, 1), (Start::Resume, 3), (Start::Resume, 5)] {
        let error = train(&config, &Device::Cpu, &start, u64::MAX).unwrap_err();
        assert!(matches!(error, Error::Paused(_)) && error.exit_code() == 76, "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("paused by the sentinel after step {step}: the loss is ")), "{text}");
        assert!(text.contains(&format!("`--resume` goes on from {}", output.path().display())), "{text}");
        assert!(output.path().join(format!("checkpoints/checkpoint-{step}/manifest.json")).is_file());
    }
    train(&config, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
}

/// Runs 48 steps; from step 9 on, dgrad of both down_proj is wrong.
fn losses_of_broken(config: &RunConfig) -> Result<f64> {
    plant(None);
    let mut trainer = Trainer::new(config.clone(), &Device::Cpu, &Start::New)?;
    trainer.run(&AtomicBool::new(false), &mut |report| {
        if report.step == 8 {
            // A micro-batch has 96 tokens, and a comparison 32.
            plant(Some(ProductFault { shape: [96, 48], first: 0, every: 1, damage: Damage::Factor(-3.0) }));
        }
    })?;
    plant(None);
    Ok(trainer.eval_losses().last().expect("it evaluates").1)
}

#[test]
fn demotion_and_bf16_repair_a_run_whose_products_break() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let loss = |recipe, policy: Option<SentinelPolicy>| {
        let output = tempfile::tempdir().unwrap();
        let mut config = match policy {
            // As many sequences as a micro-batch has, so that the fault finds the products of a comparison too.
            Some(policy) => watched(inputs.path(), output.path(), recipe, policy, 0.05),
            None => config(inputs.path(), output.path(), recipe),
        };
        config.sentinel.sentinel_sequences = 6;
        config.sentinel.sentinel_hold_steps = 100;
        (config.training.max_steps, config.training.learning_rate) = (48, 3e-3);
        losses_of_broken(&config).unwrap()
    };
    let bf16 = loss(RecipeName::Bf16, None);
    let broken = loss(RecipeName::Fp8Delayed, None);
    assert!(broken - bf16 > 0.1, "{broken} and {bf16}: the fault matters");
    for policy in [SentinelPolicy::Demote, SentinelPolicy::Bf16] {
        let repaired = loss(RecipeName::Fp8Delayed, Some(policy));
        assert!((repaired - bf16).abs() < 0.02, "{policy:?}: {repaired}, {bf16} in BF16, {broken} broken");
    }
}

#[test]
fn a_flipped_bit_ends_the_run_and_checks_change_none() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let [alone, beside] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let recipe = RecipeName::Fp8Current;
    train(&config(inputs.path(), alone.path(), recipe), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let mut checked = config(inputs.path(), beside.path(), recipe);
    checked.sentinel.repeat_steps = 2;
    train(&checked, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    assert_eq!(metrics(alone.path()), metrics(beside.path()));
    assert!(state(alone.path()) == state(beside.path()));

    let broken = tempfile::tempdir().unwrap();
    checked.output_dir = broken.path().to_path_buf();
    let mut trainer = Trainer::new(checked, &Device::Cpu, &Start::New).unwrap();
    let error = trainer.run(&AtomicBool::new(false), &mut |report| {
        if report.step == 2 {
            let damage = Damage::Flip { element: 5, bit: 14 };
            plant(Some(ProductFault { shape: [96, 48], first: 0, every: usize::MAX, damage }));
        }
    });
    plant(None);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Corruption(_)) && error.exit_code() == 8, "{error}");
    let text = error.to_string();
    assert!(text.starts_with("step 3: the same micro-batch gave other bits when it was computed again: "), "{text}");
    assert!(text.contains("the first difference is in the `gradient of model.layers.1."), "{text}");
}
