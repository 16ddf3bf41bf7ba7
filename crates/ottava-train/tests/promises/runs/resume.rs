//! A run that stops and resumes equals the uninterrupted run, bit for bit.

use crate::setup::{devices, on_ranks, rotated};
use ottava_common::hash::{seal, unseal};
use ottava_common::{Error, Result};
use ottava_data::Documents;
use ottava_parallel::optim::{SchedulerType, StableDecay};
use ottava_recipe::recompute::SavedActivations;
use ottava_recipe::storage::{Masters, Storage};
use ottava_recipe::{Delayed, ExceptionsConfig, Precision, RecipeName};
use ottava_settings::{
    Algorithm, CheckpointConfig, DataConfig, DeviceChoice, EvaluationConfig, GenerationConfig, Interval, Lion,
    LrSchedulerConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecordsConfig, RunConfig, TrainingConfig, Warmup,
    WeightInit,
};
use ottava_tensor::{Device, Tensor};
use ottava_train::trainer::{Start, Trainer};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

pub const STEPS: u64 = 6;

/// Writes a tokenizer of single bytes, a model of two small blocks, and lines to learn.
pub fn write_inputs(folder: &Path) {
    let entries: Vec<String> =
        std::iter::once("\"<|endoftext|>\":0".to_string())
            .chain((0..96).map(|i| {
                format!("{}:{}", serde_json::to_string(&((32 + i) as u8 as char).to_string()).unwrap(), i + 1)
            }))
            .collect();
    let tokenizer = format!(
        r#"{{"version":"1.0","added_tokens":[{{"id":0,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"model":{{"type":"BPE","vocab":{{{}}},"merges":[]}}}}"#,
        entries.join(",")
    );
    std::fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let config = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":32,"intermediate_size":48,
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":100,"max_position_embeddings":64,
        "rms_norm_eps":1e-5,"rope_theta":10000.0,"unknown_key":"kept"}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let mut text = String::new();
    for i in 0..40u32 {
        writeln!(text, "line {i} says {} and {}", i * 7919 % 1000, "word ".repeat(i as usize % 5)).unwrap();
    }
    std::fs::write(folder.join("text.txt"), text).unwrap();
}

pub fn config(inputs: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    RunConfig {
        output_dir: output.to_path_buf(),
        seed: 3,
        model: ModelConfig { path: inputs.to_path_buf(), init: WeightInit::Random, tokenizer: PathBuf::new() },
        data: DataConfig {
            train_files: vec![inputs.join("text.txt")],
            records: RecordsConfig { text_documents: Documents::Line, ..RecordsConfig::default() },
            val_set_size: 4.0,
            max_length: 16,
            cache_dir: inputs.join("tokens"),
            ..DataConfig::default()
        },
        training: TrainingConfig {
            max_steps: Some(STEPS),
            // A step has 12 rows of 16 tokens, so the 40 lines are read more than once.
            per_device_train_batch_size: 6,
            gradient_accumulation_steps: 2,
            ..TrainingConfig::default()
        },
        optimizer: OptimizerConfig { learning_rate: 1e-2, ..OptimizerConfig::default() },
        lr_scheduler: LrSchedulerConfig { warmup_steps: Warmup::Steps(2), ..LrSchedulerConfig::default() },
        evaluation: EvaluationConfig { eval_steps: Interval::Every(2), ..EvaluationConfig::default() },
        checkpoint: CheckpointConfig { save_total_limit: 0, save_steps: Interval::End, ..CheckpointConfig::default() },
        precision: Precision {
            recipe,
            delayed: Delayed { amax_history_len: 3, ..Delayed::default() },
            exceptions: ExceptionsConfig { skip_slow_linears: false, ..ExceptionsConfig::default() },
            ..Precision::default()
        },
        generation: GenerationConfig::default(),
        ..RunConfig::default()
    }
}

/// Trains until a signal after step `stop_after`.
pub fn train(config: &RunConfig, device: &Device, start: &Start, stop_after: u64) -> Result<()> {
    let stop = AtomicBool::new(stop_after <= 1);
    let mut trainer = Trainer::new(config.clone(), device, start)?;
    trainer.run(&stop, &mut |report| {
        // The flag is read after the next step's update, so it is raised one step early.
        if report.step + 1 >= stop_after {
            stop.store(true, Ordering::Relaxed);
        }
    })
}

/// Returns all metrics that depend neither on a clock nor on the machine.
pub fn metrics(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
            let object = value.as_object_mut().unwrap();
            let of_time =
                ["tokens_per_second", "mfu", "peak_memory_bytes", "gpu_power_watts", "gpu_utilization", "time"];
            object.retain(|key, _| !of_time.contains(&key.as_str()) && !key.starts_with("timing_s/"));
            value
        })
        .collect()
}

/// Returns the tensors of the last checkpoint of a run, by file.
pub fn state(run: &Path) -> Vec<(String, Vec<u8>)> {
    let folder = run.join(format!("checkpoints/checkpoint-{STEPS}"));
    ["model.safetensors", "training/optimizer.safetensors", "training/scaling.safetensors"]
        .into_iter()
        .filter(|name| folder.join(name).is_file())
        .map(|name| (name.to_string(), std::fs::read(folder.join(name)).unwrap()))
        .collect()
}

/// Returns the metrics and the state of the run of `config` on `ranks` ranks, whose steps have four rows. Each rank has one row in a micro-batch.
pub fn four_rows_on(ranks: usize, mut config: RunConfig) -> (Vec<serde_json::Value>, Vec<(String, Vec<u8>)>) {
    let run = config.output_dir.clone();
    config.training.per_device_train_batch_size = 1;
    config.training.gradient_accumulation_steps = 4 / ranks;
    on_ranks(ranks, move |comm| {
        let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, comm, None).unwrap();
        trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    });
    (metrics(&run), state(&run))
}

#[test]
fn stopping_after_any_step_and_resuming_changes_nothing() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for device in devices() {
        let plain = |recipe| Precision {
            recipe,
            delayed: Delayed { amax_history_len: 3, ..Delayed::default() },
            exceptions: ExceptionsConfig { skip_slow_linears: false, ..ExceptionsConfig::default() },
            ..Precision::default()
        };
        let mixed = Precision {
            delayed: Delayed { amax_history_len: 3, interval: 2, ..Delayed::default() },
            exceptions: ExceptionsConfig {
                high_precision_layers: vec!["*.o_proj".into(), "*.0.mlp".into()],
                skip_slow_linears: false,
                ..ExceptionsConfig::default()
            },
            ..plain(RecipeName::Fp8Delayed)
        };
        let (usual, exact) = (OptimizerConfig::default, SavedActivations::Exact);
        let all = RecipeName::ALL.into_iter().map(|recipe| (plain(recipe), usual(), exact));
        let all = all.filter(|(precision, ..)| precision.recipe().expect_on(&device).is_ok());
        let storages = Storage::ALL.into_iter().skip(1).map(|storage| OptimizerConfig { storage, ..usual() });
        let storages = storages.map(|optimizer| (plain(RecipeName::Fp8Delayed), optimizer, exact));
        let remainder = OptimizerConfig { master_weights: Some(Masters::Remainder), ..usual() };
        let narrow = OptimizerConfig { storage: Storage::MsampO2, ..usual() };
        let others = [
            (mixed, usual(), exact),
            (plain(RecipeName::Fp8Delayed), usual(), SavedActivations::Float8),
            (plain(RecipeName::Fp8Current), remainder, exact),
            (plain(RecipeName::Bf16), narrow.clone(), exact),
            (plain(RecipeName::Fp32), narrow.clone(), exact),
            (plain(RecipeName::Fp16), narrow, exact),
        ];
        for (number, (precision, optimizer, saved_activations)) in all.chain(storages).chain(others).enumerate() {
            let recipe = precision.recipe;
            let what = format!("{} with {optimizer:?}", recipe.as_str());
            let config = |inputs: &Path, output: &Path, recipe| RunConfig {
                optimizer: optimizer.clone(),
                precision: precision.clone(),
                memory: MemoryConfig { saved_activations, ..MemoryConfig::default() },
                ..config(inputs, output, recipe)
            };
            let straight = inputs.path().join(format!("{}-straight", recipe.as_str()));
            train(&config(inputs.path(), &straight, recipe), &device, &Start::New, u64::MAX).unwrap();
            for k in rotated(&(1..STEPS).collect::<Vec<_>>(), 2, number) {
                let split = inputs.path().join(format!("{}-{k}", recipe.as_str()));
                let config = config(inputs.path(), &split, recipe);
                let stopped = train(&config, &device, &Start::New, k).unwrap_err();
                assert!(matches!(stopped, Error::Interrupted(_)), "{stopped}");
                assert_eq!(stopped.exit_code(), 75);
                train(&config, &device, &Start::Resume, u64::MAX).unwrap();
                assert_eq!(metrics(&straight), metrics(&split), "{what} stopped after step {k}");
                assert!(state(&straight) == state(&split), "{what} stopped after step {k}: weights differ");
                std::fs::remove_dir_all(split).unwrap();
            }
            std::fs::remove_dir_all(straight).unwrap();
        }
    }
}

/// Lists the files that `checkpoint` now holds in its manifest, as a checkpoint of `format`.
fn rewrite_manifest(checkpoint: &Path, format: u32) {
    let path = checkpoint.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    manifest["format"] = format.into();
    manifest["files"] = serde_json::json!({});
    for folder in ["", "training/"] {
        for entry in std::fs::read_dir(checkpoint.join(folder)).into_iter().flatten() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let (size, sha256) = ottava_common::hash::sha256_file(&entry.path()).unwrap();
                let name = format!("{folder}{}", entry.file_name().to_str().unwrap());
                manifest["files"][name] = serde_json::json!({ "size": size, "sha256": sha256 });
            }
        }
    }
    manifest.as_object_mut().unwrap().remove("checksum");
    let body = serde_json::to_string_pretty(&manifest).unwrap() + "\n";
    let body = body.strip_prefix("{\n").unwrap();
    let checksum = ottava_common::hash::sha256(body.as_bytes());
    std::fs::write(&path, format!("{{\n  \"checksum\": \"{checksum}\",\n{body}")).unwrap();
}

/// Rewrites a checkpoint in format 1, with the files of `training/` next to the weights and without an index.
fn to_format_1(checkpoint: &Path) {
    for name in ["optimizer.safetensors", "scaling.safetensors"] {
        std::fs::rename(checkpoint.join("training").join(name), checkpoint.join(name)).unwrap();
    }
    std::fs::remove_dir_all(checkpoint.join("training")).unwrap();
    rewrite_manifest(checkpoint, 1);
}

/// Divides the optimizer states of a checkpoint among three files, as three processes would write them.
fn to_three_files(checkpoint: &Path) {
    use safetensors::tensor::{SafeTensors, TensorView};
    let folder = checkpoint.join("training");
    let whole = std::fs::read(folder.join("optimizer.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&whole).unwrap();
    let mut index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap();
    for name in tensors.names() {
        index["tensors"][name]["slices"] = serde_json::json!([]);
    }
    for part in 0..3 {
        let file = format!("optimizer-{part}.safetensors");
        let mut held = Vec::new();
        for (name, tensor) in tensors.tensors() {
            let n: usize = tensor.shape().iter().product();
            let size = tensor.data().len() / n;
            let (start, end) = [(0, n / 5), (n / 5, n / 2), (n / 2, n)][part];
            if start < end {
                let slice = serde_json::json!({ "file": file, "start": start, "end": end });
                index["tensors"][&name]["slices"].as_array_mut().unwrap().insert(0, slice);
                held.push((name, tensor.dtype(), end - start, tensor.data()[start * size..end * size].to_vec()));
            }
        }
        let views = held.iter().map(|(name, dtype, n, data)| (name, TensorView::new(*dtype, vec![*n], data).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.join(file)).unwrap();
    }
    std::fs::write(folder.join("index.json"), index.to_string()).unwrap();
    std::fs::remove_file(folder.join("optimizer.safetensors")).unwrap();
    rewrite_manifest(checkpoint, 2);
}

#[test]
fn a_checkpoint_in_another_layout_resumes_with_the_same_bits() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let [straight, other] = ["straight", "other"].map(|name| inputs.path().join(name));
    let config = |run: &Path| config(inputs.path(), run, RecipeName::Fp8Delayed);
    train(&config(&straight), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    for change in [to_format_1, to_three_files] {
        train(&config(&other), &Device::Cpu, &Start::New, 3).unwrap_err();
        let checkpoint = other.join("checkpoints/checkpoint-3");
        change(&checkpoint);
        assert!(!checkpoint.join("training/optimizer.safetensors").exists());
        train(&config(&other), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&straight), metrics(&other));
        assert!(state(&straight) == state(&other));
        std::fs::remove_dir_all(&other).unwrap();
    }
}

/// A resumed run may compute other linears in FP8. Linears that stay in FP8 keep their histories.
#[test]
fn exceptions_may_change_when_a_run_goes_on() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    let mut config = config(inputs.path(), &run, RecipeName::Fp8Delayed);
    let history = |trainer: &mut Trainer| {
        let scaling = trainer.run.model.scaling();
        let (names, arrays) = (scaling.names(), scaling.arrays().unwrap());
        let values = arrays[0].1.to_vec::<f32>().unwrap();
        let columns = names.len();
        let of = move |i: usize| values.iter().skip(i).step_by(columns).copied().collect::<Vec<_>>();
        names.into_iter().enumerate().map(|(i, name)| (name, of(i))).collect::<Vec<_>>()
    };
    train(&config, &Device::Cpu, &Start::New, 2).unwrap_err();
    let all = history(&mut Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).unwrap());
    config.precision.exceptions.high_precision_layers = vec!["*.down_proj".into()];
    let fewer = history(&mut Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).unwrap());
    let left: Vec<_> = all.iter().filter(|(name, _)| !name.contains("down_proj")).cloned().collect();
    assert_eq!(fewer, left);
    train(&config, &Device::Cpu, &Start::Resume, 4).unwrap_err();
    config.precision.exceptions.high_precision_layers.clear();
    let back = history(&mut Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).unwrap());
    assert_eq!(back.len(), all.len());
    assert!(back.iter().all(|(name, column)| name.contains("down_proj") == column.iter().all(|&a| a == 0.0)));
    train(&config, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
}

#[test]
fn a_run_is_never_written_over_and_never_shared() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    let config = config(inputs.path(), &run, RecipeName::Fp32);
    let nothing = Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).err().unwrap();
    assert!(nothing.to_string().contains("no complete checkpoint"), "{nothing}");
    train(&config, &Device::Cpu, &Start::New, 2).unwrap_err();
    let again = Trainer::new(config.clone(), &Device::Cpu, &Start::New).err().unwrap();
    assert!(again.to_string().contains("already holds a run"), "{again}");
    let open = Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).unwrap();
    let second = Trainer::new(config.clone(), &Device::Cpu, &Start::Resume).err().unwrap();
    assert!(second.to_string().contains("another process"), "{second}");
    drop(open);
    let mut other = config;
    other.data.max_length = 8;
    let changed = Trainer::new(other, &Device::Cpu, &Start::Resume).err().unwrap();
    assert!(changed.to_string().contains("`data.max_length` was 16"), "{changed}");
}

#[test]
fn a_checkpoint_is_a_model_folder_that_starts_a_new_run() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    train(&config(inputs.path(), &run, RecipeName::Bf16), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let folder = run.join(format!("checkpoints/checkpoint-{STEPS}"));
    let values: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    assert_eq!((&values["dtype"], &values["unknown_key"]), (&"bfloat16".into(), &"kept".into()));
    assert!(folder.join("tokenizer.json").is_file() && folder.join("generation_config.json").is_file());
    let mut next = config(&folder, &inputs.path().join("next"), RecipeName::Bf16);
    next.model.init = WeightInit::Pretrained;
    next.data.train_files = vec![inputs.path().join("text.txt")];
    let end = metrics(&run).last().unwrap()["eval_loss"].as_f64().unwrap();
    train(&next, &Device::Cpu, &Start::New, 2).unwrap_err();
    let start = metrics(&inputs.path().join("next"))[0]["eval_loss"].as_f64().unwrap();
    assert_eq!(start, end, "the loaded weights are the saved ones");
}

#[test]
fn a_gradient_that_is_not_finite_stops_before_the_update_and_is_named() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    let mut config = config(inputs.path(), &run, RecipeName::Fp32);
    // The validation before the first step would also notice this.
    config.data.val_set_size = 0.0;
    let mut trainer = Trainer::new(config, &Device::Cpu, &Start::New).unwrap();
    let poisoned = "model.layers.1.mlp.down_proj.weight";
    let before: Vec<Vec<u8>> = {
        let mut params = trainer.run.model.parameters();
        let param = params.iter_mut().find(|p| p.identity.name() == poisoned).unwrap();
        let mut values = param.weights.value().unwrap().to_vec::<f32>().unwrap();
        values[5] = f32::NAN;
        let value = Tensor::from_slice(param.weights.device(), param.weights.shape(), &values).unwrap();
        param.weights.set_value(value);
        params.iter().map(|p| p.weights.value().unwrap().read_bytes().unwrap()).collect()
    };
    let error = trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap_err();
    assert_eq!(error.exit_code(), 4);
    assert!(error.to_string().starts_with("step 1: the loss is NaN"), "{error}");
    let after: Vec<Vec<u8>> =
        trainer.run.model.parameters().iter().map(|p| p.weights.value().unwrap().read_bytes().unwrap()).collect();
    assert!(before == after, "no weight was changed");
}

/// The settings of [`earlier`] as version 0.1 wrote them into manifests, with `INPUTS` and `OUTPUT` in place of its folders.
const EARLIER: &str = include_str!("../../../../ottava-settings/tests/data/old_settings.toml");

/// Returns a run with settings whose keys have changed since version 0.1. Its optimizer and its schedule are not the defaults.
fn earlier(inputs: &Path, output: &Path) -> RunConfig {
    let mut config = config(inputs, output, RecipeName::Fp8Delayed);
    config.device = DeviceChoice::Cpu;
    config.optimizer.algorithm = Algorithm::Lion(Lion { beta1: 0.85, beta2: 0.98 });
    (config.optimizer.weight_decay, config.optimizer.storage) = (0.2, Storage::MsampO2);
    let decay = StableDecay { min_learning_rate: 1e-4, decay_steps: 3 };
    let kind = SchedulerType::WarmupStableDecay(decay);
    config.lr_scheduler = LrSchedulerConfig { kind, warmup_steps: Warmup::Share(0.25) };
    config
}

/// Writes the settings of version 0.1 into the manifest of `checkpoint`.
fn write_earlier_settings(checkpoint: &Path, inputs: &Path, output: &Path) {
    let path = checkpoint.join("manifest.json");
    let mut manifest = unseal(&std::fs::read(&path).unwrap()).unwrap();
    let texts = [("INPUTS", inputs), ("OUTPUT", output)];
    let settings =
        texts.into_iter().fold(EARLIER.to_string(), |text, (word, path)| text.replace(word, path.to_str().unwrap()));
    manifest["extra"]["config"] = settings.into();
    std::fs::write(path, seal(&manifest)).unwrap();
}

#[test]
fn a_run_that_version_0_1_saved_resumes_with_the_same_bits() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let [whole, output] = ["whole", "run"].map(|name| inputs.path().join(name));
    train(&earlier(inputs.path(), &whole), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let config = earlier(inputs.path(), &output);
    assert!(train(&config, &Device::Cpu, &Start::New, 3).is_err(), "it was stopped");
    let checkpoint = output.join("checkpoints/checkpoint-3");
    let now = RunConfig::saved_in(&checkpoint).unwrap().unwrap().0;
    write_earlier_settings(&checkpoint, inputs.path(), &output);
    assert_eq!(RunConfig::saved_in(&checkpoint).unwrap().unwrap().0, now);
    train(&config, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&output), metrics(&whole));
    assert!(state(&output) == state(&whole), "weights, states and scales");
}
