//! Preference tuning: losses and rewards beside TRL's, gradients, the reference model, ranks, and runs that stop and resume.

use crate::recorded::Recorded;
use crate::resume::{config, metrics, train, write_inputs};
use crate::setup::{Seeded, double, fp8_names_on, gradients, loss_scale, on_ranks, recipe, sequences, tiny_llama};
use ottava_lm::config::{DataConfig, LossType, PreferenceConfig, RunConfig, TrainingConfig};
use ottava_lm::data::{Batch, Packing, PreferenceBatch};
use ottava_lm::lora::{Lora, Targets};
use ottava_lm::mode::{Pass, StepPrecision};
use ottava_lm::models::{Decoder, DecoderConfig};
use ottava_lm::optim::{AdamWConfig, AdamWOptimizer};
use ottava_lm::parallel::{Partition, Ranks, ReduceFormat, Schedule, Zero};
use ottava_lm::param::{FolderTensor, Init, MemoryPolicy, Purpose, WeightSource};
use ottava_lm::recipe::{Fp8Format, Recipe, RecipeName};
use ottava_lm::step::{MicroBatch, MicroBatchPreference, Preference, Program, ProgramInputs, TrainStep};
use ottava_lm::trainer::Start;
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::{IGNORE_INDEX, PreferenceLoss, cast};
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device, Tensor};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

pub const STEPS: usize = 20;
pub const PAIRS: usize = 4;
/// Tokens of a row; prompt and completion have at most 12.
pub const TOKENS: usize = 16;

/// What `scripts/make_preference_referee.py` recorded.
fn recorded() -> Recorded {
    Recorded::open("referee_preference", "")
}

/// A row of `prompt` and `completion`.
fn row(prompt: &[i32], completion: &[i32], batch: &mut Batch) {
    let end = batch.inputs.len() + TOKENS;
    let ids = [prompt, completion].concat();
    batch.inputs.extend(&ids[..ids.len() - 1]);
    batch.padding.push(end - batch.inputs.len());
    batch.inputs.resize(end, 0);
    batch.targets.extend(vec![IGNORE_INDEX; prompt.len() - 1]);
    batch.targets.extend(completion);
    batch.targets.resize(end, IGNORE_INDEX);
    batch.rows += 1;
}

pub fn empty() -> Batch {
    Batch { inputs: vec![], targets: vec![], rows: 0, seq_len: TOKENS, documents: None, padding: vec![] }
}

/// The recorded batch of a step: of pairs, or of completions with labels.
fn recorded_batch(step: usize, labels: bool) -> PreferenceBatch {
    let all = recorded().ids("ids");
    let ids = |pair: usize, key: usize| {
        let list = &all[(3 * pair + key) * 16..];
        list[1..1 + list[0] as usize].to_vec()
    };
    let (mut batch, mut mismatched, mut chosen) = (empty(), empty(), vec![]);
    let pairs: Vec<usize> = (step * PAIRS..(step + 1) * PAIRS).collect();
    let label = |pair: usize| pair % 3 != 1;
    let completion = |pair: usize| ids(pair, if label(pair) { 1 } else { 2 });
    for (i, &pair) in pairs.iter().enumerate() {
        if labels {
            row(&ids(pair, 0), &completion(pair), &mut batch);
            row(&ids(pair, 0), &completion(pairs[(i + PAIRS - 1) % PAIRS]), &mut mismatched);
            chosen.push(label(pair));
        } else {
            row(&ids(pair, 0), &ids(pair, 1), &mut batch);
            row(&ids(pair, 0), &ids(pair, 2), &mut batch);
            chosen.extend([true, false]);
        }
    }
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: labels.then_some(mismatched) }
}

const LOSSES: [(&str, PreferenceLoss); 5] = [
    ("sigmoid", PreferenceLoss::Sigmoid { label_smoothing: 0.0 }),
    ("robust", PreferenceLoss::Robust { label_smoothing: 0.2 }),
    ("hinge", PreferenceLoss::Hinge),
    ("ipo", PreferenceLoss::Ipo),
    ("kto", PreferenceLoss::Kto { desirable_weight: 1.5, undesirable_weight: 0.5 }),
];

const NAMES: [&str; 7] =
    ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"];

/// The largest differences from TRL's losses and rewards, and from its log-probabilities, in `steps` steps.
fn apart(name: &str, how: Preference, recipe_name: RecipeName, steps: usize) -> [f64; 3] {
    let recipe = recipe(recipe_name, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let rows = PAIRS * how.loss.sequences();
    let mut work = TrainStep::new(&model, 1, rows, TOKENS).unwrap().with_preference(how).unwrap();
    let batches: Vec<_> = (0..steps).map(|step| recorded_batch(step, name == "kto")).collect();
    let log_probs = |work: &TrainStep, model: &mut Decoder, batch: &Batch| {
        work.log_probs(model, &[batch], Pass::Evaluation, StepPrecision::Recipe).unwrap().remove(0)
    };
    // Before the first step.
    let reference: Vec<_> = batches.iter().map(|batch| log_probs(&work, &mut model, &batch.batch)).collect();
    let of_others: Vec<_> =
        batches.iter().map(|batch| batch.mismatched.as_ref().map(|rows| log_probs(&work, &mut model, rows))).collect();
    // Only KTO has a divergence.
    let names = &NAMES[..if name == "kto" { 7 } else { 6 }];
    let expected: Vec<_> = names.iter().map(|metric| recorded().values(&format!("{name}/{metric}"))).collect();
    let mut apart = [0.0; 3];
    for (step, batch) in batches.iter().enumerate() {
        work.load_preferences(0, batch, Some(&reference[step])).unwrap();
        if let (Some(rows), Some(reference)) = (&batch.mismatched, &of_others[step]) {
            let policy = log_probs(&work, &mut model, rows);
            let kl: f64 = policy.iter().zip(reference).map(|(a, b)| a - b).sum::<f64>() / rows.rows as f64;
            work.set_kl(0, kl.max(0.0)).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        let sums = done.preference.unwrap();
        assert!((sums.loss() - done.loss).abs() < 1e-9);
        let found = sums.metrics();
        for (metric, expected) in names.iter().zip(&expected) {
            let found = match *metric {
                "loss" => Some(done.loss),
                name => found.iter().find(|(other, _)| *other == name).map(|(_, value)| *value),
            };
            let Some(found) = found else { panic!("{metric} of step {step} is missing") };
            let kind = if *metric == "loss" { 0 } else { 1 + usize::from(metric.starts_with("logps")) };
            apart[kind] = f64::max(apart[kind], (found - expected[step]).abs());
        }
    }
    apart
}

/// Measured on the CPU, losses were at most 2.7e-6, rewards 3.8e-6 and log-probabilities 8.1e-6 apart.
#[test]
fn losses_and_rewards_are_those_of_trl() {
    for (name, loss) in LOSSES {
        let how = Preference { loss, beta: 0.5 };
        let [losses, rewards, log_probs] = apart(name, how, RecipeName::Fp32, STEPS);
        eprintln!(
            "{name}: losses are at most {losses:.1e}, rewards {rewards:.1e}, log-probabilities {log_probs:.1e} apart from TRL's"
        );
        assert!(losses < 2e-5 && rewards < 2e-5 && log_probs < 1e-4, "{name}: {losses:e}, {rewards:e}, {log_probs:e}");
    }
    let wrong = Preference { loss: LOSSES[0].1, beta: 0.55 };
    let [losses, ..] = apart("sigmoid", wrong, RecipeName::Fp32, 6);
    assert!(losses > 1e-3, "a beta that is a tenth too large goes unnoticed: {losses:e}");
}

/// Measured on the CPU, losses were at most 8.4e-4 apart in BF16 and 5.4e-3 to 1.2e-2 in FP8.
#[test]
fn losses_in_fp8_are_near_those_in_f32() {
    for name in [RecipeName::Bf16].into_iter().chain(fp8_names_on(&Device::Cpu)) {
        let how = Preference { loss: LOSSES[0].1, beta: 0.1 };
        let exact = final_losses(how, RecipeName::Fp32);
        let found = final_losses(how, name);
        let apart = exact.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        eprintln!("{}: losses are at most {apart:.1e} apart from those in F32", name.as_str());
        assert!(apart < 2e-2, "{}: {apart:e}", name.as_str());
    }
}

/// The losses of twenty steps, whose reference is the model before them.
fn final_losses(how: Preference, name: RecipeName) -> Vec<f64> {
    let recipe = recipe(name, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let mut work = TrainStep::new(&model, 1, 2 * PAIRS, TOKENS).unwrap().with_preference(how).unwrap();
    let batches: Vec<_> = (0..STEPS).map(|step| recorded_batch(step, false)).collect();
    let reference = batches.iter().map(|batch| {
        work.log_probs(&mut model, &[&batch.batch], Pass::Evaluation, StepPrecision::Recipe).unwrap().remove(0)
    });
    let reference: Vec<_> = reference.collect();
    let step = |(batch, reference): (&PreferenceBatch, &Vec<f64>)| {
        work.load_preferences(0, batch, Some(reference)).unwrap();
        work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap().loss
    };
    batches.iter().zip(&reference).map(step).collect()
}

/// Seeded weights, rounded so that moving one of them is exact in F32, and of which one is moved.
pub struct Moved {
    pub tensor: String,
    pub element: usize,
    pub by: f64,
}

impl WeightSource for Moved {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_lm::Result<Tensor> {
        let drawn = values(&Seeded { std: 0.3 }.read(tensor, elements.clone(), init)?);
        let mut rounded: Vec<f64> = drawn.into_iter().map(|value| (value * 4096.0).round() / 4096.0).collect();
        if tensor.name == self.tensor && elements.contains(&self.element) {
            rounded[self.element - elements.start] += self.by;
        }
        let rounded = Tensor::from_slice(&Device::Cpu, &[rounded.len()], &rounded)?;
        Ok(cast(&rounded, DType::F32)?)
    }
}

/// The loss of preferences of a model in F64, and the gradients of `1.7 · Σ losses`.
fn loss_and_gradients(how: Preference, weights: &mut dyn WeightSource) -> (f64, Vec<(String, Vec<f64>)>) {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let sizes = recorded().sizes();
    let mut model = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let PreferenceBatch { batch, chosen, .. } = recorded_batch(0, how.loss.sequences() == 1);
    let mut preference = MicroBatchPreference::new(how, batch.rows, &Device::Cpu, DType::F64).unwrap();
    let tensor = |values: Vec<f64>| Tensor::from_slice(&Device::Cpu, &[values.len()], &values).unwrap();
    preference.targets.reference = tensor((0..batch.rows).map(|s| -30.0 - 0.7 * s as f64).collect());
    preference.targets.lengths = tensor((0..batch.rows).map(|s| 2.0 + s as f64).collect());
    preference.targets.labels = tensor(chosen.iter().map(|chosen| f64::from(u8::from(*chosen))).collect());
    preference.targets.kl = tensor(vec![0.2]);
    preference.chosen = chosen;
    let rows = sequences(&Device::Cpu, batch.rows, batch.inputs.len());
    let ids = |ids: &[i32]| Tensor::from_slice(&Device::Cpu, &[ids.len()], ids).unwrap();
    let (inputs, targets) = (ids(&batch.inputs), ids(&batch.targets));
    let micro_batches = &[MicroBatch { inputs, targets, sequences: rows, preference: Some(preference) }];
    let (scale, partition) = (&loss_scale(tensor(vec![1.7])), &Partition::solo());
    let inputs = ProgramInputs { micro_batches, loss_scale: Some(scale), precision: StepPrecision::Recipe, partition };
    let all = Program::gradients_of(&Schedule::of_one_rank(1), 0).run(&mut model, &inputs, None).unwrap().remove(0);
    let loss = values(&all)[..batch.rows].iter().sum::<f64>();
    (1.7 * loss, gradients(&mut model))
}

/// Central differences of fourth order, of weights all over the model.
#[test]
fn backward_is_the_gradient_of_the_loss() {
    let plain = || Moved { tensor: String::new(), element: 0, by: 0.0 };
    for (name, loss) in LOSSES {
        let how = Preference { loss, beta: 0.1 };
        let (_, all) = loss_and_gradients(how, &mut plain());
        let mut compared = 0;
        for tensor in ["lm_head", "model.norm", "model.layers.0.input_layernorm", "model.layers.1.mlp.down_proj"] {
            let tensor = format!("{tensor}.weight");
            let (_, gradient) = all.iter().find(|(name, _)| *name == tensor).unwrap_or_else(|| panic!("{tensor}"));
            for element in [0, gradient.len() / 2, gradient.len() - 1] {
                let at = |by| loss_and_gradients(how, &mut Moved { tensor: tensor.clone(), element, by }).0;
                let step = 1.0 / 1024.0;
                let apart = |steps: f64| at(steps * step) - at(-steps * step);
                let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
                let error = (difference - gradient[element]).abs();
                assert!(
                    error < 1e-7 * difference.abs().max(1.0),
                    "{name}, {tensor}[{element}]: {difference} and {}",
                    gradient[element]
                );
                compared += usize::from(difference != 0.0);
            }
        }
        assert!(compared > 8, "{name}: {compared} gradients are not zero");
    }
}

fn seeded(sizes: &DecoderConfig, recipe: &Recipe) -> Decoder {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(sizes, recipe, &Device::Cpu, purpose, TOKENS, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Pairs `first..first + count` of `step`, of any tokens.
fn pairs(step: usize, first: usize, count: usize) -> PreferenceBatch {
    let mut batch = empty();
    for pair in first..first + count {
        let ids = integers(&format!("pair {step} {pair}"), 20, 96).to_vec::<i32>().unwrap();
        row(&ids[..4], &ids[4..8 + pair % 3], &mut batch);
        row(&ids[..4], &ids[12..18], &mut batch);
    }
    let chosen = (0..2 * count).map(|row| row % 2 == 0).collect();
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: None }
}

/// The base without its adapters has the bits of a model that never had any, also after the adapters have been trained.
#[test]
fn the_model_without_adapters_is_the_reference() {
    let lora = Some(Lora {
        r: 3,
        alpha: 4.0,
        use_rslora: false,
        use_dora: false,
        targets: Targets::AllLinear,
        ..Lora::default()
    });
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Current] {
        let recipe = recipe(name, Fp8Format::Auto);
        let how = Preference { loss: LOSSES[0].1, beta: 0.1 };
        let batch = pairs(0, 0, 3);
        let of = |model: &mut Decoder, pass| {
            let work = TrainStep::new(model, 1, 6, TOKENS).unwrap();
            work.log_probs(model, &[&batch.batch], pass, StepPrecision::Recipe).unwrap().remove(0)
        };
        let plain = of(&mut seeded(&tiny_llama(), &recipe), Pass::Evaluation);
        let mut model = seeded(&DecoderConfig { lora: lora.clone(), ..tiny_llama() }, &recipe);
        let adapted = of(&mut model, Pass::Evaluation);
        let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
        let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
        let mut work = TrainStep::new(&model, 1, 6, TOKENS).unwrap().with_preference(how).unwrap();
        for step in 0..3 {
            work.load_preferences(0, &batch, None).unwrap();
            work.compute_reference(&mut model, StepPrecision::Recipe).unwrap();
            let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
            // The reference is the base in every step: rewards of the first one are those of adapters that are not zero.
            let sums = done.preference.unwrap();
            let reference = sums.log_probs[0] - sums.rewards[0] / how.beta;
            let expected: f64 = plain.iter().step_by(2).sum();
            assert!((reference - expected).abs() < 1e-3, "step {step}: {reference} and {expected}");
        }
        assert_eq!(of(&mut model, Pass::Reference), plain, "{}", name.as_str());
        assert_ne!(adapted, plain, "{}: adapters have no effect", name.as_str());
    }
}

/// Losses, norms and metrics of two steps, and the weights after them.
fn train_on(comm: Group, micro_batches: usize, zero: Zero) -> Vec<(String, Vec<f64>)> {
    const ALL: usize = 4;
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::unloaded(&tiny_llama(), &recipe, &Device::Cpu, purpose, TOKENS).unwrap();
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
    partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
    partition.quantize_weights(&mut model).unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-4, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let count = ALL / ranks.size() / micro_batches;
    let how = Preference { loss: LOSSES[0].1, beta: 0.5 };
    let mut work = TrainStep::shared(&model, Schedule::of_one_rank(micro_batches), 2 * count, TOKENS, partition)
        .unwrap()
        .with_preference(how)
        .unwrap();
    let mut seen = Vec::new();
    for step in 0..3 {
        for micro_batch in 0..micro_batches {
            let batch = pairs(step, (micro_batch * ranks.size() + ranks.rank()) * count, count);
            let reference = vec![-20.0; 2 * count];
            work.load_preferences(micro_batch, &batch, Some(&reference)).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
        let metrics = done.preference.unwrap().metrics().into_iter().map(|(_, value)| value).collect();
        seen.push((format!("metrics of step {step}"), metrics));
    }
    seen
}

#[test]
fn micro_batches_and_ranks_change_only_the_order_of_sums() {
    let whole = train_on(Group::solo(), 1, Zero::Nothing);
    let mut others = vec![("2 micro-batches", train_on(Group::solo(), 2, Zero::Nothing))];
    for (how, zero) in [("2 ranks", Zero::Nothing), ("2 ranks that divide weights", Zero::Weights)] {
        others.push((how, on_ranks(2, move |comm| train_on(comm, 1, zero)).remove(0)));
    }
    for (how, seen) in others {
        for ((name, expected), (_, got)) in whole.iter().zip(&seen) {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 5e-5 * a.abs().max(0.1);
            assert!(expected.iter().zip(got).all(near), "{name} with {how}: {expected:?} and {got:?}");
        }
    }
}

/// A run on pairs, of which some are for validation. A chosen text goes on in lower case, a rejected one in capitals.
pub fn run_config(inputs: &Path, output: &Path, recipe: RecipeName, records: &str) -> RunConfig {
    let of_text = config(inputs, output, recipe);
    RunConfig {
        data: DataConfig { train_files: vec![inputs.join(records)], max_length: 32, ..of_text.data },
        preference: PreferenceConfig { beta: 0.5, ..PreferenceConfig::default() },
        training: TrainingConfig { max_steps: 8, per_device_train_batch_size: 2, ..of_text.training },
        ..of_text
    }
}

pub fn write_records(folder: &Path) {
    write_inputs(folder);
    let (mut pairs, mut labels) = (String::new(), String::new());
    for i in 0..20 {
        let (prompt, [good, bad]) = (format!("say {}:", i * 37 % 100), ["yes we do", "NO NEVER"]);
        pairs += &format!("{}\n", json!({"prompt": prompt, "chosen": good, "rejected": bad}));
        let completion = if i % 2 == 0 { good } else { bad };
        labels += &format!("{}\n", json!({"prompt": prompt, "completion": completion, "label": i % 2 == 0}));
    }
    std::fs::write(folder.join("pairs.jsonl"), pairs).unwrap();
    std::fs::write(folder.join("labels.jsonl"), labels).unwrap();
}

pub fn checkpoint(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("checkpoints/checkpoint-8/model.safetensors")).unwrap()
}

#[test]
fn margins_rise_and_resuming_changes_nothing() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    for (recipe, records) in
        [(RecipeName::Fp32, "pairs.jsonl"), (RecipeName::Fp8Delayed, "pairs.jsonl"), (RecipeName::Fp32, "labels.jsonl")]
    {
        let runs = tempfile::tempdir().unwrap();
        let whole = run_config(inputs.path(), &runs.path().join("whole"), recipe, records);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        let seen = metrics(&whole.output_dir);
        let margin = |line: &serde_json::Value| line["eval_rewards/margins"].as_f64();
        let margins: Vec<f64> = seen.iter().filter_map(margin).collect();
        assert!(margins.len() >= 4 && margins.windows(2).all(|pair| pair[0] < pair[1]), "{records}: {margins:?}");
        assert!(seen.last().unwrap()["rewards/chosen"].is_number(), "{:?}", seen.last());
        let stopped = run_config(inputs.path(), &runs.path().join("stopped"), recipe, records);
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        // Without the stored log-probabilities they are computed again, by the model of the start.
        std::fs::remove_file(stopped.output_dir.join("reference.json")).unwrap();
        train(&stopped, &Device::Cpu, &Start::Resume, 5).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), seen, "{records}");
        assert_eq!(checkpoint(&stopped.output_dir), checkpoint(&whole.output_dir), "{records}");
    }
}

/// Another model's log-probabilities of the same data are not those of the reference.
#[test]
fn a_reference_that_the_run_has_not_written_is_computed_again() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_records(inputs.path());
    let of = |name: &str, seed| RunConfig {
        seed,
        ..run_config(inputs.path(), &runs.path().join(name), RecipeName::Fp32, "pairs.jsonl")
    };
    let [whole, stopped, other] = [of("whole", 3), of("stopped", 3), of("other", 4)];
    train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
    train(&other, &Device::Cpu, &Start::New, 8).unwrap();
    train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
    let reference = |run: &RunConfig| run.output_dir.join("reference.json");
    let [own, foreign] = [&whole, &other].map(|run| std::fs::read(reference(run)).unwrap());
    assert!(own != foreign);
    std::fs::write(reference(&stopped), &foreign).unwrap();
    train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
    assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
    assert!(std::fs::read(reference(&stopped)).unwrap() == own);
}

#[test]
fn settings_that_do_not_fit_the_data_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let runs = tempfile::tempdir().unwrap();
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run_config(inputs.path(), &runs.path().join("run"), RecipeName::Fp32, "pairs.jsonl");
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, 8).unwrap_err().to_string()
    };
    let text = error(&|config| config.preference.loss_type = Some(LossType::Kto));
    assert!(text.contains("`preference.loss_type` is \"kto\", and the data hold pairs"), "{text}");
    let text = error(&|config| {
        config.data.train_files = vec![inputs.path().join("labels.jsonl"), inputs.path().join("pairs.jsonl")]
    });
    assert!(text.contains("preferences are trained without other data, and pairs without labels"), "{text}");
    let text = error(&|config| config.data.packing = Packing::Bfd);
    assert!(text.contains("each completion of which has a row of its own"), "{text}");
    let text = error(&|config| config.preference.precompute_ref_log_probs = Some(false));
    assert!(text.contains("no reference model is left after the first step"), "{text}");
    let text = error(&|config| config.data.train_on_inputs = true);
    assert!(text.contains("`data.train_on_inputs` is true, and the data are preferences"), "{text}");
    let text = error(&|config| {
        config.data.train_files = vec![inputs.path().join("text.txt")];
        config.preference.loss_type = Some(LossType::Sigmoid);
    });
    assert!(text.contains("the data hold no preferences"), "{text}");
}
