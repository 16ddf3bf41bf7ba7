//! The average of the weights of a run: it changes nothing in the run, resumes with the same bits, and is divided among ranks.

use super::resume::{config, metrics, train, write_inputs};
use crate::setup::on_ranks;
use ottava_checkpoint::average;
use ottava_models::ConfigFile;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Storage;
use ottava_settings::{EmaSettings, Interval, LoraConfig, ParallelConfig, RunConfig, WeightInit};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const EMA: EmaSettings = EmaSettings { decay: 0.75, start: 2, every: 2, evaluate: true };

fn run(inputs: &Path, output: &str, recipe: RecipeName, ema: EmaSettings) -> RunConfig {
    let mut run = config(inputs, &inputs.join(output), recipe);
    (run.ema, run.training.max_steps) = (ema, Some(6));
    run
}

/// Returns the F32 values of the tensors of a file, by name.
fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |view: safetensors::tensor::TensorView| -> Vec<f32> {
        match view.dtype() {
            safetensors::Dtype::F32 => {
                view.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
            }
            _ => view
                .data()
                .chunks_exact(2)
                .map(|x| f32::from_bits(u32::from(u16::from_le_bytes(x.try_into().unwrap())) << 16))
                .collect(),
        }
    };
    file.iter().map(|(name, view)| (name.to_string(), of(view))).collect()
}

fn weights(run: &RunConfig, step: u64) -> BTreeMap<String, Vec<f32>> {
    tensors(&run.output_dir.join(format!("checkpoints/checkpoint-{step}/model.safetensors")))
}

fn averaged(run: &RunConfig) -> PathBuf {
    run.output_dir.join("ema/checkpoint-6")
}

/// Returns the metrics without the metrics of the average.
fn without_average(run: &RunConfig) -> Vec<Value> {
    let mut lines = metrics(&run.output_dir);
    lines.iter_mut().for_each(|line| line.as_object_mut().unwrap().retain(|key, _| !key.starts_with("eval_ema_")));
    lines
}

#[test]
fn an_average_changes_nothing_and_resumes_with_the_same_bits() {
    for recipe in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Block] {
        let inputs = tempfile::tempdir().unwrap();
        write_inputs(inputs.path());
        let without = run(inputs.path(), "without", recipe, EmaSettings::default());
        let with = run(inputs.path(), "with", recipe, EMA);
        let stopped = run(inputs.path(), "stopped", recipe, EMA);
        train(&without, &Device::Cpu, &Start::New, 6).unwrap();
        train(&with, &Device::Cpu, &Start::New, 6).unwrap();
        assert_eq!(without_average(&with), metrics(&without.output_dir), "{}", recipe.as_str());
        assert_eq!(weights(&with, 6), weights(&without, 6), "{}", recipe.as_str());
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 6).unwrap();
        assert_eq!(metrics(&stopped.output_dir), metrics(&with.output_dir));
        let of_average = |run: &RunConfig| tensors(&averaged(run).join("model.safetensors"));
        assert_eq!(of_average(&stopped), of_average(&with));
    }
}

/// By hand: the weights after steps 2, 4 and 6, of which each addition leaves three quarters of the average.
#[test]
fn the_average_is_that_of_the_weights_of_its_steps() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let mut run = run(inputs.path(), "run", RecipeName::Fp32, EMA);
    run.checkpoint.save_steps = Interval::Every(2);
    train(&run, &Device::Cpu, &Start::New, 6).unwrap();
    let [first, second, third] = [2, 4, 6].map(|step| weights(&run, step));
    let found = tensors(&averaged(&run).join("model.safetensors"));
    assert_eq!(found.len(), first.len());
    for (name, found) in &found {
        for (i, &found) in found.iter().enumerate() {
            let lerp = |average: f32, weight: f32| average + 0.25 * (weight - average);
            assert_eq!(found, lerp(lerp(first[name][i], second[name][i]), third[name][i]), "{name}[{i}]");
        }
    }
    // Another run starts from the average, with the loss that this run has evaluated.
    let lines = metrics(&run.output_dir);
    let evaluated = lines.last().unwrap()["eval_ema_loss"].as_f64().unwrap();
    assert!(lines[0]["eval_ema_loss"].is_null(), "before the first addition, there is no average");
    let mut next = self::run(inputs.path(), "next", RecipeName::Fp32, EmaSettings::default());
    (next.model.path, next.model.init, next.training.max_steps) = (averaged(&run), WeightInit::Pretrained, Some(2));
    next.lr_scheduler.warmup_steps = ottava_settings::Warmup::Steps(1);
    train(&next, &Device::Cpu, &Start::New, 2).unwrap();
    assert_eq!(metrics(&next.output_dir)[0]["eval_loss"].as_f64().unwrap(), evaluated);
}

/// Averages of ranks that divide the optimizer's states are the averages of one rank, and so are averages of every storage of weights.
#[test]
fn ranks_divide_the_average_and_every_storage_has_one() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for zero in [Zero::Nothing, Zero::OptimizerStates, Zero::Weights] {
        let of_ranks = |output: &str, ema: EmaSettings| {
            let mut run = run(inputs.path(), &format!("{output}-{zero:?}"), RecipeName::Fp8Current, ema);
            run.training.per_device_train_batch_size = 3;
            run.parallel = ParallelConfig { zero, ..ParallelConfig::default() };
            let shared = run.clone();
            on_ranks(2, move |world| {
                let trainer = Trainer::shared(shared.clone(), &Device::Cpu, &Start::New, world, None);
                trainer.unwrap().run(&AtomicBool::new(false), &mut |_| {}).unwrap();
            });
            run
        };
        let (without, with) = (of_ranks("without", EmaSettings::default()), of_ranks("with", EMA));
        assert_eq!(without_average(&with), metrics(&without.output_dir), "{zero:?}");
        let eval = |key: &str| metrics(&with.output_dir).last().unwrap()[key].as_f64().unwrap();
        assert_ne!(eval("eval_ema_loss"), eval("eval_loss"));
        let average = tensors(&averaged(&with).join("model.safetensors"));
        let alone = run(inputs.path(), &format!("alone-{zero:?}"), RecipeName::Fp8Current, EMA);
        train(&alone, &Device::Cpu, &Start::New, 6).unwrap();
        let expected = tensors(&averaged(&alone).join("model.safetensors"));
        for (name, average) in average {
            let apart = average.iter().zip(&expected[&name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 0.05, "{zero:?}: {name} is {apart} apart from the average of one rank");
        }
    }
    for storage in [Storage::MsampO2, Storage::MsampO3, Storage::Coat, Storage::Bfloat16] {
        let name = format!("{storage:?}");
        let stored = |output: &str, ema| {
            let mut run = run(inputs.path(), &format!("{output}-{name}"), RecipeName::Fp8Current, ema);
            run.optimizer.storage = storage;
            train(&run, &Device::Cpu, &Start::New, 6).unwrap();
            run
        };
        let (without, with) = (stored("without", EmaSettings::default()), stored("with", EMA));
        assert_eq!(without_average(&with), metrics(&without.output_dir), "{name}");
        assert!(averaged(&with).join("model.safetensors").exists());
    }
}

#[test]
fn averages_of_adapters_are_adapters() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = run(inputs.path(), "base", RecipeName::Fp32, EmaSettings::default());
    train(&base, &Device::Cpu, &Start::New, 6).unwrap();
    let adapted = |output: &str, ema| {
        let mut run = run(inputs.path(), output, RecipeName::Fp8Current, ema);
        (run.model.path, run.model.init) = (base.output_dir.join("checkpoints/checkpoint-6"), WeightInit::Pretrained);
        run.lora = LoraConfig { r: 4, ..LoraConfig::default() };
        train(&run, &Device::Cpu, &Start::New, 6).unwrap();
        run
    };
    let (without, with) = (adapted("without", EmaSettings::default()), adapted("with", EMA));
    assert_eq!(without_average(&with), metrics(&without.output_dir));
    assert!(averaged(&with).join("adapter_model.safetensors").exists());
    let output = inputs.path().join("averaged");
    let error = average(&[(&averaged(&with), 1.0)], &output).unwrap_err().to_string();
    assert!(error.contains("this is an adapter"), "{error}");
}

#[test]
fn folders_are_averaged_with_their_weights() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let mut run = run(inputs.path(), "run", RecipeName::Fp32, EmaSettings::default());
    run.checkpoint.save_steps = Interval::Every(3);
    train(&run, &Device::Cpu, &Start::New, 6).unwrap();
    let folder = |step: u64| run.output_dir.join(format!("checkpoints/checkpoint-{step}"));
    let (first, second, output) = (folder(3), folder(6), inputs.path().join("averaged"));
    let count = average(&[(&first, 3.0), (&second, 1.0)], &output).unwrap();
    let (a, b, found) = (weights(&run, 3), weights(&run, 6), tensors(&output.join("model.safetensors")));
    assert_eq!((found.len(), count), (a.len(), a.len()));
    for (name, found) in &found {
        for (i, &found) in found.iter().enumerate() {
            let expected = 0.75 * f64::from(a[name][i]) + 0.25 * f64::from(b[name][i]);
            assert_eq!(found, expected as f32, "{name}[{i}]");
        }
    }
    let config = |folder: &Path| ConfigFile::read(folder).unwrap().values().clone();
    assert_eq!(config(&output), config(&first));
    assert!(output.join("tokenizer.json").exists());
    let error = |folders: &[(&Path, f64)], output: &Path| average(folders, output).unwrap_err().to_string();
    let other = inputs.path().join("other");
    assert!(error(&[(&first, 1.0)], &output).contains("this exists already"));
    assert!(error(&[(&first, 1.0), (&second, -1.0)], &other).contains("add up to 0"));
    let mut small = run.clone();
    small.output_dir = inputs.path().join("small");
    let text = std::fs::read_to_string(inputs.path().join("config.json")).unwrap();
    std::fs::write(
        inputs.path().join("config.json"),
        text.replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":1"),
    )
    .unwrap();
    train(&small, &Device::Cpu, &Start::New, 6).unwrap();
    let text = error(&[(&first, 1.0), (&small.output_dir.join("checkpoints/checkpoint-6"), 1.0)], &other);
    assert!(text.contains("config.json describes another model than"), "{text}");
    assert!(!other.exists());
}
