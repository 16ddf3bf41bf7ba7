//! FP16 training: a loss scale that is too large is halved, at the cost of only the skipped step.

use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::devices;
use ottava_common::Error;
use ottava_recipe::storage::Storage;
use ottava_recipe::{Fp16, Precision, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use std::path::Path;

/// Returns the metrics of all steps of a run with this loss scale and storage of the optimizer.
fn run(
    inputs: &Path,
    name: &str,
    storage: Storage,
    initial_loss_scale: f64,
    device: &Device,
) -> Vec<serde_json::Value> {
    let output = inputs.join(name);
    let mut plain = config(inputs, &output, RecipeName::Fp16);
    plain.optimizer.storage = storage;
    let precision =
        Precision { fp16: Fp16 { initial_loss_scale, loss_scale_window: 3, ..Fp16::default() }, ..plain.precision };
    train(&RunConfig { precision, ..plain }, device, &Start::New, u64::MAX).unwrap();
    metrics(&output).into_iter().filter(|line| line.get("loss").is_some()).collect()
}

fn column(metrics: &[serde_json::Value], key: &str) -> Vec<f64> {
    metrics.iter().map(|line| line[key].as_f64().unwrap_or(f64::NAN)).collect()
}

#[test]
fn a_scale_that_is_too_large_costs_a_step_and_no_more() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    // A skipped step also leaves states with their own scales unchanged.
    let storages = |device: Device| [Storage::Float32, Storage::MsampO2].map(|storage| (device.clone(), storage));
    for (i, (device, storage)) in devices().into_iter().flat_map(storages).enumerate() {
        let calm = run(inputs.path(), &format!("calm {i}"), storage, 1024.0, &device);
        assert_eq!(column(&calm, "skipped_steps"), [0.0; 6]);
        assert_eq!(column(&calm, "loss_scale"), [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0]);
        let wild = run(inputs.path(), &format!("wild {i}"), storage, 2f64.powi(30), &device);
        let skipped = column(&wild, "skipped_steps");
        assert!(skipped[0] == 1.0, "the largest of gradients is beyond float16: {skipped:?}");
        assert_eq!(column(&wild, "loss_scale")[0], 2f64.powi(29));
        // Skipped steps do not change weights, so the loss first differs from the loss of an untrained model after the first update.
        let untrained = column(&calm, "loss")[0];
        let [calm, wild] = [column(&calm, "loss"), column(&wild, "loss")];
        assert_eq!(wild[0], untrained, "{device}");
        assert!(calm[5] < calm[0] - 0.05, "{device}: it learns: {calm:?}");
    }
}

#[test]
fn losses_are_close_to_those_in_binary32() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for (i, device) in devices().into_iter().enumerate() {
        let half = column(&run(inputs.path(), &format!("half {i}"), Storage::Float32, 1024.0, &device), "loss");
        let output = inputs.path().join(format!("single {i}"));
        train(&config(inputs.path(), &output, RecipeName::Fp32), &device, &Start::New, u64::MAX).unwrap();
        let single: Vec<_> = metrics(&output).into_iter().filter(|line| line.get("loss").is_some()).collect();
        for (half, single) in half.iter().zip(column(&single, "loss")) {
            // Products round their results by up to 2⁻¹¹, 5e-4. After six steps, losses differ by up to 1.5e-3.
            assert!((half - single).abs() < 3e-3, "{device}: {half} is not {single}");
        }
    }
}

#[test]
fn a_scale_that_cannot_be_halved_ends_the_run() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let plain = config(inputs.path(), &inputs.path().join("hopeless"), RecipeName::Fp16);
    let huge = 2f64.powi(30);
    let precision = Precision {
        fp16: Fp16 { initial_loss_scale: huge, min_loss_scale: huge, ..Fp16::default() },
        ..plain.precision
    };
    let error = train(&RunConfig { precision, ..plain }, &Device::Cpu, &Start::New, u64::MAX).unwrap_err();
    assert!(matches!(error, Error::NonFinite(_)) && error.to_string().starts_with("step 1: "), "{error}");
}
