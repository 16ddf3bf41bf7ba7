//! Reward models: losses and rewards compared with TRL, gradients, ranks, folders, adapters, and runs that stop and resume.

use crate::models::recorded::Recorded;
use crate::objectives::preference::{
    PAIRS, STEPS, TOKENS, empty, load_preferences, run_config, with_preference, write_records,
};
use crate::objectives::preference_losses::{Moved, scaled_loss};
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance};
use crate::runs::resume::{metrics, train};
use crate::setup::{double, fp8_names_on, gradients, on_ranks, recipe, tiny_llama};
use ottava_checkpoint::{AdapterFolder, merge};
use ottava_data::{Batch, PreferenceBatch, RowLayout, SourceOptions, Tokenizer, prepare};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config, language_model_config, reward_model};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Schedule, ScheduleKind, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{LoraConfig, LossType, PreferenceConfig, RunConfig, WeightInit};
use ottava_tensor::comm::Group;
use ottava_tensor::ops::{IGNORE_INDEX, PreferenceLoss};
use ottava_tensor::testing::integers;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::preference::{MicroBatchPreference, Preference, evaluate_rewards};
use ottava_train::step::TrainStep;
use ottava_train::trainer::{Start, build};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the results of reward models that `scripts/make_preference_referee.py` recorded.
fn recorded() -> Recorded {
    Recorded::open("referee_reward", "")
}

fn bradley_terry(centering: f64) -> Preference {
    Preference::of(PreferenceLoss::BradleyTerry { centering }, 1.0)
}

/// Appends a row whose last token gets the reward.
fn row(ids: &[i32], batch: &mut Batch) {
    let start = batch.inputs.len();
    batch.inputs.extend(ids);
    batch.inputs.resize(start + TOKENS, 0);
    batch.targets.resize(start + TOKENS, IGNORE_INDEX);
    batch.targets[start + ids.len() - 1] = 0;
    batch.padding.push(TOKENS - ids.len());
    batch.rows += 1;
}

/// Returns the recorded pairs of a step.
fn recorded_batch(step: usize) -> PreferenceBatch {
    let all = recorded().ids("ids");
    let ids = |pair: usize, key: usize| {
        let list = &all[(3 * pair + key) * 16..];
        list[1..1 + list[0] as usize].to_vec()
    };
    let mut batch = empty();
    for pair in step * PAIRS..(step + 1) * PAIRS {
        row(&[ids(pair, 0), ids(pair, 1)].concat(), &mut batch);
        row(&[ids(pair, 0), ids(pair, 2)].concat(), &mut batch);
    }
    of_rows(batch)
}

fn of_rows(batch: Batch) -> PreferenceBatch {
    let chosen = (0..batch.rows).map(|row| row % 2 == 0).collect();
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: None }
}

/// Returns the loss and the metrics of the first `steps` recorded steps, by name.
fn steps_of(
    name: RecipeName,
    centering: f64,
    with_margins: bool,
    steps: usize,
) -> Vec<BTreeMap<Cow<'static, str>, f64>> {
    let recipe = recipe(name, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let how = bradley_terry(centering);
    let mut work = with_preference(TrainStep::new(&model, 1, 2 * PAIRS, TOKENS).unwrap(), &how);
    let margins = recorded().values("margins");
    let step = |step: usize| {
        let of_pair = |pair: usize| [if with_margins { margins[pair] } else { 0.0 }, 0.0];
        let margins: Vec<f64> = (step * PAIRS..(step + 1) * PAIRS).flat_map(of_pair).collect();
        load_preferences(&mut work, 0, &recorded_batch(step), Some(&margins));
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        work.metrics(&done.sums).named.into_iter().chain([("loss".into(), done.loss)]).collect()
    };
    (0..steps).map(step).collect()
}

#[test]
fn rewards_and_losses_are_those_of_trl() {
    let largest = |name: &str, found: &[BTreeMap<Cow<'static, str>, f64>]| {
        let mut apart: f64 = 0.0;
        for metric in ["loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"] {
            let expected = recorded().values(&format!("{name}/{metric}"));
            assert_eq!(expected.len(), STEPS);
            for (found, expected) in found.iter().zip(expected) {
                apart = apart.max((found[metric] - expected).abs());
            }
        }
        apart
    };
    for (name, centering, with_margins) in [("plain", 0.0, false), ("centered", 0.1, false), ("margins", 0.0, true)] {
        let apart = largest(name, &steps_of(RecipeName::Fp32, centering, with_margins, STEPS));
        eprintln!("{name}: losses and rewards are at most {apart:.1e} apart from TRL's");
        // Sums in F32 have another order than in TRL. Measured on the CPU, differences are at most 6.6e-7.
        assert!(apart < 1e-5, "{name}: {apart:e}");
    }
    let wrong = largest("centered", &steps_of(RecipeName::Fp32, 0.11, false, 6));
    assert!(wrong > 1e-4, "a coefficient that is a tenth too large goes unnoticed: {wrong:e}");
}

/// Measured on the CPU, losses differ by at most 2.0e-3 in BF16 and by 1.8e-2 to 3.4e-2 in FP8.
#[test]
fn losses_in_fp8_are_near_those_in_f32() {
    let losses = |name| steps_of(name, 0.0, false, STEPS).iter().map(|step| step["loss"]).collect::<Vec<_>>();
    let exact = losses(RecipeName::Fp32);
    for name in [RecipeName::Bf16].into_iter().chain(fp8_names_on(&Device::Cpu)) {
        let apart = exact.iter().zip(losses(name)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        eprintln!("{}: losses are at most {apart:.1e} apart from those in F32", name.as_str());
        let allowed = if name == RecipeName::Bf16 { 1e-2 } else { 1e-1 };
        assert!(apart < allowed, "{}: {apart:e}", name.as_str());
    }
}

/// Returns `1.7 · Σ losses` of a model in F64, and its gradients.
fn loss_and_gradients(weights: &mut Moved) -> (f64, Vec<(String, Vec<f64>)>) {
    let (sizes, purpose) = (recorded().sizes(), Purpose::Train(MemoryPolicy::FULL));
    let mut model = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let PreferenceBatch { batch, chosen, .. } = recorded_batch(0);
    let mut preference = MicroBatchPreference::new(bradley_terry(0.3), batch.rows, &Device::Cpu, DType::F64).unwrap();
    let margins: Vec<f64> = (0..batch.rows).map(|s| if s % 2 == 0 { 0.4 } else { 0.0 }).collect();
    preference.targets.reference = Tensor::from_slice(&Device::Cpu, &[margins.len()], &margins).unwrap();
    preference.chosen = chosen;
    (scaled_loss(&mut model, &batch, preference), gradients(&mut model))
}

/// The gradients are compared with central differences of fourth order, for weights all over the model.
#[test]
fn backward_is_the_gradient_of_the_loss() {
    let (_, all) = loss_and_gradients(&mut Moved { tensor: String::new(), element: 0, by: 0.0 });
    for tensor in ["score", "model.norm", "model.layers.0.input_layernorm", "model.layers.1.mlp.down_proj"] {
        let tensor = format!("{tensor}.weight");
        let (_, gradient) = all.iter().find(|(name, _)| *name == tensor).unwrap_or_else(|| panic!("{tensor}"));
        for element in [0, gradient.len() / 2, gradient.len() - 1] {
            let at = |by| loss_and_gradients(&mut Moved { tensor: tensor.clone(), element, by }).0;
            let step = 1.0 / 1024.0;
            let apart = |steps: f64| at(steps * step) - at(-steps * step);
            let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
            let error = (difference - gradient[element]).abs();
            // In F64, the differences have an error of `step⁴ / 30`, 3e-14, of the fifth derivative, and roundings of 2⁻⁵³ of the loss over `step`,
            // 1e-13. Differences of up to 2e-10 are seen.
            assert!(
                difference != 0.0 && error < 1e-7 * difference.abs().max(1.0),
                "{tensor}[{element}]: {difference} and {}",
                gradient[element]
            );
        }
    }
}

/// Returns losses, norms and metrics of three steps of one rank, and the score's weights after them.
fn train_on(mesh: &Mesh, comm: Group) -> Seen {
    let ranks = mesh.join(comm);
    let MeshRank { mut model, mut optimizer, work, .. } = mesh.run(&ranks);
    work.partition().quantize_weights(&mut model).unwrap();
    let mut work = with_preference(work, &bradley_terry(0.1));
    let (rank, world) = ranks.rows();
    let count = mesh.rows[0] / 2;
    let mut seen = Seen::new();
    for step in 0..3 {
        for micro_batch in 0..mesh.schedule.micro_batches {
            let (mut batch, first) = (empty(), (micro_batch * world + rank) * count);
            for pair in first..first + count {
                let ids = integers(&format!("rewards {step} {pair}"), 24, 96).to_vec::<i32>().unwrap();
                row(&ids[..8 + pair % 3], &mut batch);
                row(&ids[10..22], &mut batch);
            }
            load_preferences(&mut work, micro_batch, &of_rows(batch), Some(&vec![0.0; 2 * count]));
        }
        let done = work.run(&mut model, &mut *optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.insert(format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]);
        let metrics = work.metrics(&done.sums).named;
        seen.insert(format!("metrics of step {step}"), metrics.into_iter().map(|(_, value)| value).collect());
    }
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    ranks.finish().unwrap();
    seen
}

/// The meshes include pipelines, in which only the last rank has the head.
#[test]
fn micro_batches_and_ranks_change_only_the_order_of_sums() {
    let mut sizes = tiny_llama();
    sizes.head.labels = Some(1);
    let one = Mesh::of_one_rank(sizes, recipe(RecipeName::Fp32, Fp8Format::Auto), [8, TOKENS]);
    let (schedule, zero) = (one.schedule, one.zero);
    let pipeline = Schedule { kind: ScheduleKind::default(), ranks: 2, stages: 1, micro_batches: 2 };
    let expected = train_on(&one, Group::solo());
    let with = |schedule, data, zero, rows| Mesh { schedule, data, zero, rows: [rows, TOKENS], ..one.clone() };
    for (name, mesh) in [
        ("2 micro-batches", with(Schedule::of_one_rank(2), 1, zero, 4)),
        ("2 ranks", with(schedule, 2, zero, 4)),
        ("2 ranks that divide weights", with(schedule, 2, Zero::Weights, 4)),
        ("2 ranks of a pipeline", with(pipeline, 1, zero, 4)),
    ] {
        let run = mesh.clone();
        for (rank, got) in on_ranks(mesh.ranks(), move |comm| train_on(&run, comm)).into_iter().enumerate() {
            // Only ranks with the head have the metrics of a step.
            let last = mesh.schedule.ranks == 1 || rank + 1 == mesh.ranks();
            let known = |seen: &Seen| -> Seen {
                let is_known = |(name, _): &(&String, &Vec<f64>)| last || name.starts_with("loss");
                seen.iter().filter(is_known).map(|(name, values)| (name.clone(), values.clone())).collect()
            };
            let (apart, what) = distance(&known(&expected), &known(&got));
            assert!(apart < 1e-4, "{name}, rank {rank}: {what} is {apart:e} apart");
        }
    }
}

/// Makes the language model from which reward models start: random weights, trained for two steps.
fn language_model(inputs: &Path) -> PathBuf {
    let folder = inputs.join("language-model");
    if !folder.exists() {
        let mut config = run_config(inputs, &folder, RecipeName::Fp32, "text.txt");
        (config.training.max_steps, config.preference) = (Some(2), PreferenceConfig::default());
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    }
    folder.join("checkpoints/checkpoint-2")
}

/// Returns a run of a reward model that starts from `model`.
fn reward_run(inputs: &Path, model: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    let mut config = run_config(inputs, output, recipe, "pairs.jsonl");
    (config.model.path, config.model.init) = (model.to_path_buf(), WeightInit::Pretrained);
    config.preference =
        PreferenceConfig { loss_type: Some(LossType::BradleyTerry.into()), ..PreferenceConfig::default() };
    config
}

fn last_checkpoint(run: &RunConfig) -> PathBuf {
    run.output_dir.join("checkpoints/checkpoint-8")
}

/// Returns the names, shapes and bytes of the tensors of a file.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, view)| (name.to_string(), (view.shape().to_vec(), view.data().to_vec()))).collect()
}

/// Returns loss and metrics of the pairs for the model of `folder`, with `adapter` if it is given.
fn evaluate_folder(
    inputs: &Path,
    folder: &Path,
    adapter: Option<&Path>,
    seq_len: usize,
) -> BTreeMap<Cow<'static, str>, f64> {
    let tokenizer = Tokenizer::load(inputs).unwrap();
    let adapter = adapter.map(|folder| AdapterFolder::open(folder).unwrap());
    let file = reward_model(&ConfigFile::read(folder).unwrap(), None).unwrap();
    let lora = adapter.as_ref().map(|adapter| adapter.lora.clone());
    let sizes = DecoderConfig { lora, ..decoder_config(&file).unwrap() };
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut model = build(Some(folder), adapter, 0, &Device::Cpu, &sizes, |weights| {
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, seq_len, weights)
    })
    .unwrap();
    model.quantize_weights().unwrap();
    let cache = inputs.join("evaluated");
    let data = prepare(&[inputs.join("pairs.jsonl")], &SourceOptions::default(), &tokenizer, &cache).unwrap();
    let (layout, padding) = (RowLayout::wrapped(seq_len), tokenizer.padding_id().map(i64::from));
    let (sums, left_out) = evaluate_rewards(&mut model, Arc::new(data), layout, padding, 3).unwrap();
    let more = [("loss".into(), sums.loss()), ("left out".into(), left_out as f64)];
    sums.metrics().named.into_iter().chain(more).collect()
}

#[test]
fn margins_rise_and_resuming_changes_nothing() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let base = language_model(inputs.path());
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let runs = tempfile::tempdir().unwrap();
        let whole = reward_run(inputs.path(), &base, &runs.path().join("whole"), name);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        let seen = metrics(&whole.output_dir);
        let margins: Vec<f64> = seen.iter().filter_map(|line| line["eval_margin"].as_f64()).collect();
        assert!(margins.len() >= 4 && margins.windows(2).all(|pair| pair[0] < pair[1]), "{margins:?}");
        assert_eq!(seen.last().unwrap()["eval_accuracy"], 1.0, "{:?}", seen.last());
        assert!(!whole.output_dir.join("reference.json").exists());
        let stopped = reward_run(inputs.path(), &base, &runs.path().join("stopped"), name);
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), seen);
        let weights = |run: &RunConfig| tensors(&last_checkpoint(run).join("model.safetensors"));
        assert_eq!(weights(&stopped), weights(&whole));
    }
}

/// The folder has the form of transformers, and another run starts from it without changing it.
#[test]
fn folders_of_reward_models_are_read_as_they_were_written() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let base = language_model(inputs.path());
    let first = reward_run(inputs.path(), &base, &inputs.path().join("first"), RecipeName::Fp32);
    train(&first, &Device::Cpu, &Start::New, 8).unwrap();
    let folder = last_checkpoint(&first);
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!((&config["id2label"], &config["pad_token_id"]), (&json!({"0": "LABEL_0"}), &json!(0)));
    assert_eq!(config["unknown_key"], "kept");
    let written = tensors(&folder.join("model.safetensors"));
    assert_eq!(written["score.weight"].0, [1, 32]);
    assert!(!written.contains_key("lm_head.weight"));
    // `auto` trains a reward model, since the folder holds a reward model.
    let mut second = reward_run(inputs.path(), &folder, &inputs.path().join("second"), RecipeName::Fp32);
    (second.preference.loss_type, second.optimizer.learning_rate) = (None, 0.0);
    train(&second, &Device::Cpu, &Start::New, 8).unwrap();
    assert_eq!(tensors(&last_checkpoint(&second).join("model.safetensors")), written);
    let evaluated = evaluate_folder(inputs.path(), &folder, None, 32);
    assert_eq!((evaluated["accuracy"], evaluated["left out"]), (1.0, 0.0));
    let lines = metrics(&second.output_dir);
    let of_run: Vec<&Value> = lines.iter().filter(|line| line["eval_loss"].is_number()).collect();
    assert!(of_run.windows(2).all(|pair| pair[0]["eval_max_reward"] == pair[1]["eval_max_reward"]));
    let max = of_run[0]["eval_max_reward"].as_f64().unwrap();
    assert!(max <= evaluated["max_reward"], "{max} of held-out pairs and {} of all", evaluated["max_reward"]);
}

/// The head is trained and saved with the adapters, as in PEFT with `modules_to_save = ["score"]`.
#[test]
fn adapters_of_reward_models_have_the_head() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let base = language_model(inputs.path());
    let lora = LoraConfig { r: 3, lora_alpha: 4.0, ..LoraConfig::default() };
    let mut whole = reward_run(inputs.path(), &base, &inputs.path().join("whole"), RecipeName::Fp8Current);
    whole.lora = lora.clone();
    let mut stopped = whole.clone();
    stopped.output_dir = inputs.path().join("stopped");
    train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
    train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
    assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
    let folder = last_checkpoint(&whole);
    let weights = |run: &RunConfig| tensors(&last_checkpoint(run).join("adapter_model.safetensors"));
    assert_eq!(weights(&stopped), weights(&whole));
    assert_eq!(weights(&whole)["base_model.model.score.weight"].0, [1, 32]);
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["task_type"], &config["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["score"])));
    // The base and the adapter in F32 rank the pairs as the run in FP8 did.
    let evaluated = evaluate_folder(inputs.path(), &base, Some(&folder), 32);
    assert!(evaluated["accuracy"] > 0.9, "{evaluated:?}");
    // Merged, they are a reward model.
    let merged = inputs.path().join("merged");
    merge(&base, &AdapterFolder::open(&folder).unwrap(), None, &merged).unwrap();
    let of_merged = evaluate_folder(inputs.path(), &merged, None, 32);
    for key in ["loss", "accuracy", "margin", "max_reward"] {
        let (own, other) = (of_merged[key], evaluated[key]);
        assert!((own - other).abs() < 1e-4 * (1.0 + other.abs()), "{key}: {own} merged, {other} with the adapter");
    }
    // New adapters on a reward model start from its head.
    let full = reward_run(inputs.path(), &base, &inputs.path().join("full"), RecipeName::Fp32);
    train(&full, &Device::Cpu, &Start::New, 8).unwrap();
    let mut more = reward_run(inputs.path(), &last_checkpoint(&full), &inputs.path().join("more"), RecipeName::Fp32);
    more.lora = lora;
    train(&more, &Device::Cpu, &Start::New, 8).unwrap();
    let loss = |run: &RunConfig, at: usize| metrics(&run.output_dir)[at]["eval_loss"].as_f64().unwrap();
    assert_eq!(loss(&more, 0), loss(&full, metrics(&full.output_dir).len() - 1));
    // A run continues with adapters and head.
    let mut further = reward_run(inputs.path(), &base, &inputs.path().join("further"), RecipeName::Fp8Current);
    further.lora = LoraConfig { init_from: folder, ..LoraConfig::default() };
    let further = further.with_adapter().unwrap();
    train(&further, &Device::Cpu, &Start::New, 8).unwrap();
    assert_eq!(loss(&further, 0), loss(&whole, metrics(&whole.output_dir).len() - 1));
}

#[test]
fn what_a_reward_model_cannot_do_is_refused() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let base = language_model(inputs.path());
    let run = reward_run(inputs.path(), &base, &inputs.path().join("run"), RecipeName::Fp32);
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run.clone();
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, 8).unwrap_err().to_string()
    };
    let text = error(&|config| config.generation.prompts = vec!["a".into()]);
    assert!(text.contains("a reward model writes no text"), "{text}");
    let text = error(&|config| config.data.train_files = vec![inputs.path().join("labels.jsonl")]);
    assert!(text.contains("`preference.loss_type` is \"bradley_terry\", and the data hold completions with"), "{text}");
    let text = error(&|config| config.data.max_length = 8);
    assert!(text.contains("a sequence has more tokens than `data.max_length` = 8"), "{text}");
    train(&run, &Device::Cpu, &Start::New, 8).unwrap();
    let folder = last_checkpoint(&run);
    let from_it = |change: &dyn Fn(&mut RunConfig)| {
        error(&|config| {
            (config.model.path, config.output_dir) = (folder.clone(), inputs.path().join("other"));
            config.preference.loss_type = None;
            change(config);
        })
    };
    let text = from_it(&|config| config.data.train_files = vec![inputs.path().join("text.txt")]);
    assert!(text.contains("a reward model is trained on pairs"), "{text}");
    let text = from_it(&|config| config.preference.loss_type = Some(LossType::Sigmoid.into()));
    assert!(text.contains("a reward model is trained on pairs"), "{text}");
    let text = language_model_config(&ConfigFile::read(&folder).unwrap()).unwrap_err().to_string();
    assert!(text.contains("whose head computes a score and no tokens"), "{text}");
    let labels = |labels: Value| {
        let mut values = ConfigFile::read(&folder).unwrap().values().clone();
        values.insert("id2label".into(), labels);
        reward_model(&ConfigFile::from_values("config.json", values), None).unwrap_err().to_string()
    };
    let text = labels(json!({"0": "no", "1": "yes"}));
    assert!(text.contains("the head has 2 labels (`id2label`)"), "{text}");
    let granite = json!({"architectures": ["GraniteForCausalLM"], "model_type": "granite"});
    let granite = ConfigFile::from_values("config.json", granite.as_object().unwrap().clone());
    let text = reward_model(&granite, None).unwrap_err().to_string();
    assert!(text.contains("transformers has no classifier with the decoder of `GraniteForCausalLM`"), "{text}");
}
