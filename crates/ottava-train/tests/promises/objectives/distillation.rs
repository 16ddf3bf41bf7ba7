//! Distillation: divergences beside TRL's values, their gradients through a model, ranks, plans, and runs that stop and resume.

use crate::objectives::preference_losses::Moved;
use crate::runs::resume::{STEPS, config, metrics, state, train, write_inputs};
use crate::setup::{
    Seeded, batch, double, gradients, loss_scale, on_ranks, recipe, sequences, tiny_llama, tiny_llama_with,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Schedule, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, WeightSource};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_settings::{ResolvedConfig, RunConfig, WeightInit};
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::{Divergence, divergence_gradient};
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use ottava_train::objective::FrozenModel;
use ottava_train::objective::distillation::DistillationLoss;
use ottava_train::plan::MemoryPlan;
use ottava_train::step::{MicroBatch, Program, ProgramInputs, TrainStep};
use ottava_train::trainer::{Start, Trainer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::AtomicBool;

const RECORDED: &str = include_str!("../../data/referee_divergence.json");

/// Divergences and gradients as TRL's `GKDTrainer` computes them (`scripts/make_divergence_referee.py`).
#[test]
fn divergences_equal_trl() {
    let recorded: Value = serde_json::from_str(RECORDED).unwrap();
    let numbers = |value: &Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let labels: Vec<i32> = numbers(&recorded["labels"]).into_iter().map(|label| label as i32).collect();
    let (tokens, counted) = (labels.len(), labels.iter().filter(|&&label| label >= 0).count() as f64);
    let targets = Tensor::from_slice(&Device::Cpu, &[tokens], &labels).unwrap();
    let logits = |name: &str| {
        let all = numbers(&recorded[name]);
        Tensor::from_slice(&Device::Cpu, &[tokens, all.len() / tokens], &all).unwrap()
    };
    let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0 / counted]).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let [beta, temperature, loss] = ["beta", "temperature", "loss"].map(|key| case[key].as_f64().unwrap());
        let (mut student, teacher) = (logits("student"), logits("teacher"));
        let (how, vocabulary) = (Divergence { beta, temperature }, teacher.shape()[1]);
        let found = divergence_gradient(&mut student, &teacher, vocabulary, &targets, &scale, how).unwrap();
        let found = values(&found).into_iter().sum::<f64>() / counted;
        // Both compute in F64.
        assert!((found - loss).abs() < 1e-12, "{how:?}: {found}, {loss} in TRL");
        for (found, expected) in values(&student).into_iter().zip(numbers(&case["gradient"])) {
            assert!((found - expected).abs() < 1e-12, "{how:?}: {found}, {expected} in TRL");
        }
    }
}

const TOKENS: usize = 12;
const ROWS: usize = 2;

/// A teacher that is wider than the model, with another seed.
fn teacher(recipe: &Recipe) -> Rc<FrozenModel> {
    let sizes = tiny_llama_with(serde_json::json!({"hidden_size": 48, "num_hidden_layers": 1}));
    Rc::new(FrozenModel::new("teacher", &sizes, recipe, &Device::Cpu, TOKENS, &mut Seeded { std: 0.2 }).unwrap())
}

/// `1.7 · Σ divergences` of a micro-batch of a model in F64, and its gradients.
fn loss_and_gradients(how: Divergence, weights: &mut dyn WeightSource) -> (f64, Vec<(String, Vec<f64>)>) {
    const SCALE: f64 = 1.7;
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let sizes = wide(tiny_llama());
    let mut model = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let [inputs, targets] = batch("distillation", ROWS, TOKENS, sizes.vocabulary);
    let sequences = sequences(&Device::Cpu, ROWS, ROWS * TOKENS);
    let mut loss = DistillationLoss::new(teacher(&double()), how, ROWS * TOKENS).unwrap();
    loss.observe(&inputs, &sequences).unwrap();
    let micro_batches = &[MicroBatch { inputs, targets, sequences, loss: Box::new(loss) }];
    let scale = loss_scale(Tensor::from_slice(&Device::Cpu, &[1], &[SCALE]).unwrap());
    let (loss_scale, partition) = (Some(&scale), &Partition::solo());
    let inputs = ProgramInputs { micro_batches, loss_scale, precision: StepPrecision::Recipe, partition };
    let all = Program::gradients_of(&Schedule::of_one_rank(1), 0).run(&mut model, &inputs, None).unwrap().remove(0);
    (SCALE * values(&all).iter().sum::<f64>(), gradients(&mut model))
}

/// The sizes of a model whose loss reads logits in the type of sums.
fn wide(mut sizes: DecoderConfig) -> DecoderConfig {
    sizes.head.wide_logits = true;
    sizes
}

/// Central differences of fourth order.
#[test]
fn backward_is_the_gradient_of_the_divergence() {
    let plain = || Moved { tensor: String::new(), element: 0, by: 0.0 };
    for (beta, temperature) in [(0.0, 1.0), (0.4, 0.9), (1.0, 1.3)] {
        let how = Divergence { beta, temperature };
        let (_, all) = loss_and_gradients(how, &mut plain());
        for tensor in ["model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"] {
            let (_, gradient) = all.iter().find(|(name, _)| name == tensor).unwrap_or_else(|| panic!("{tensor}"));
            let element = gradient.len() / 2;
            let at = |by| loss_and_gradients(how, &mut Moved { tensor: tensor.into(), element, by }).0;
            let step = 1.0 / 1024.0;
            let apart = |steps: f64| at(steps * step) - at(-steps * step);
            let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
            let found = gradient[element];
            // As for losses of preferences: the fifth derivative and roundings of F64.
            assert!(
                (difference - found).abs() < 1e-7 * difference.abs().max(1.0) && difference != 0.0,
                "{how:?}, {tensor}: {difference} and {found}"
            );
        }
    }
}

/// Losses and norms of three steps.
fn train_on(comm: Group, micro_batches: usize, zero: Zero) -> Vec<f64> {
    const ALL: usize = 4;
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::unloaded(&wide(tiny_llama()), &recipe, &Device::Cpu, purpose, TOKENS).unwrap();
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
    partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
    partition.quantize_weights(&mut model).unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-4, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let rows = ALL / ranks.size() / micro_batches;
    let work = TrainStep::shared(&model, Schedule::of_one_rank(micro_batches), rows, TOKENS, partition).unwrap();
    let (teacher, how) = (teacher(&recipe), Divergence { beta: 0.5, temperature: 0.9 });
    let loss = |rows: usize| DistillationLoss::new(teacher.clone(), how, rows * TOKENS);
    let mut work = work.with_losses(|rows, _, _| Ok(Box::new(loss(rows)?))).unwrap();
    let mut seen = Vec::new();
    for step in 0..3 {
        let all = batch(&format!("step {step}"), ALL, TOKENS, 96).map(|ids| ids.to_vec::<i32>().unwrap());
        for micro_batch in 0..micro_batches {
            let first = (micro_batch * ranks.size() + ranks.rank()) * rows;
            let [inputs, targets] = all.each_ref().map(|ids| ids[first * TOKENS..][..rows * TOKENS].to_vec());
            work.load(micro_batch, &ottava_data::Batch::whole(inputs, targets, rows)).unwrap();
        }
        work.each_loaded(|loaded, loss: &mut DistillationLoss| loss.observe(loaded.inputs, loaded.sequences)).unwrap();
        let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.extend([done.loss, done.grad_norm]);
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
        // Three steps of sums in F32 in another order.
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 5e-5 * a.abs().max(0.1);
        assert!(whole.iter().zip(&seen).all(near), "{how}: {whole:?} and {seen:?}");
    }
}

/// The folder of a model that a run has trained, for a teacher.
pub fn teacher_folder(inputs: &Path, runs: &Path) -> PathBuf {
    let run = config(inputs, &runs.join("teacher"), RecipeName::Fp32);
    train(&run, &Device::Cpu, &Start::New, STEPS).unwrap();
    run.output_dir.join(format!("checkpoints/checkpoint-{STEPS}"))
}

pub fn student(inputs: &Path, output: &Path, teacher: &Path, recipe: RecipeName) -> RunConfig {
    let mut run = RunConfig { seed: 4, ..config(inputs, output, recipe) };
    run.distillation.teacher = teacher.to_path_buf();
    run
}

#[test]
fn students_approach_their_teacher_and_resuming_changes_nothing() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let teacher = teacher_folder(inputs.path(), runs.path());
    for (recipe, beta) in [(RecipeName::Fp32, 0.5), (RecipeName::Fp8Delayed, 0.0), (RecipeName::Bf16, 1.0)] {
        let of = |name: &str| {
            let output = runs.path().join(format!("{name}-{}", recipe.as_str()));
            let mut run = student(inputs.path(), &output, &teacher, recipe);
            run.distillation.beta = beta;
            run
        };
        let [whole, stopped] = ["whole", "stopped"].map(of);
        train(&whole, &Device::Cpu, &Start::New, STEPS).unwrap();
        let seen = metrics(&whole.output_dir);
        let losses: Vec<f64> = seen.iter().filter_map(|line| line["loss"].as_f64()).collect();
        assert!(losses.len() == STEPS as usize && losses.last() < losses.first(), "{beta}: {losses:?}");
        assert!(seen.iter().any(|line| line["eval_loss"].is_number()), "{seen:?}");
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, STEPS).unwrap();
        assert_eq!(metrics(&stopped.output_dir), seen, "{beta}");
        assert_eq!(state(&stopped.output_dir), state(&whole.output_dir), "{beta}");
    }
}

/// Prompts with completions, beside the other inputs.
fn write_answers(folder: &Path) {
    write_inputs(folder);
    let record = |i| serde_json::json!({"prompt": format!("say {}:", i * 37 % 100), "completion": " yes we do"});
    let records: Vec<String> = (0..40).map(|i| record(i).to_string()).collect();
    std::fs::write(folder.join("answers.jsonl"), records.join("\n")).unwrap();
}

/// A run whose student draws the completions of this share of the steps.
fn on_policy(inputs: &Path, output: &Path, teacher: &Path, lmbda: f64) -> RunConfig {
    let mut run = student(inputs, output, teacher, RecipeName::Fp32);
    (run.data.train_files, run.data.max_length) = (vec![inputs.join("answers.jsonl")], 32);
    (run.distillation.lmbda, run.distillation.max_completion_length) = (lmbda, 5);
    run
}

pub fn column(lines: &[Value], key: &str) -> Vec<f64> {
    lines.iter().filter_map(|line| line[key].as_f64()).collect()
}

/// Each rank draws for its own rows, with the seeds of their places: two ranks draw what one rank draws in two micro-batches. Ranks that divide tensors draw
/// the same completions, and compute divergences over the whole vocabulary.
#[test]
fn ranks_draw_the_completions_of_one_rank() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_answers(inputs.path());
    let teacher = teacher_folder(inputs.path(), runs.path());
    let logged = |name: &str, data: usize, tensor: usize| {
        let mut run = on_policy(inputs.path(), &runs.path().join(name), &teacher, 1.0);
        (run.training.max_steps, run.training.gradient_accumulation_steps) = (Some(2), 2 / data);
        run.parallel.tensor = tensor;
        let output = run.output_dir.clone();
        on_ranks(data * tensor, move |group| {
            let mut trainer = Trainer::shared(run.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        let lines = metrics(&output);
        ["loss", "grad_norm", "completions/mean_length"].map(|key| column(&lines, key)).concat()
    };
    let one = logged("one", 1, 1);
    assert_eq!(one.len(), 6);
    for (name, data, tensor) in [("data", 2, 1), ("tensor", 1, 2), ("data and tensor", 2, 2)] {
        let several = logged(name, data, tensor);
        // Sums in F32 in another order.
        assert!(one.iter().zip(&several).all(|(a, b)| (a - b).abs() < 1e-5), "{name}: {one:?}, {several:?}");
    }
}

/// The model draws the completions of a share of the steps, and a resumed run draws the same completions as the whole run.
#[test]
fn students_learn_from_their_own_completions() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_answers(inputs.path());
    let teacher = teacher_folder(inputs.path(), runs.path());
    let of =
        |name: &str, lmbda| on_policy(inputs.path(), &runs.path().join(format!("{name}-{lmbda}")), &teacher, lmbda);
    for lmbda in [1.0, 0.5] {
        let [whole, stopped] = ["whole", "stopped"].map(|name| of(name, lmbda));
        train(&whole, &Device::Cpu, &Start::New, STEPS).unwrap();
        let seen = metrics(&whole.output_dir);
        let (losses, draws) = (column(&seen, "loss"), column(&seen, "on_policy"));
        assert_eq!((losses.len(), draws.len()), (STEPS as usize, STEPS as usize), "{seen:?}");
        assert!(losses.iter().all(|loss| *loss > 0.0), "{losses:?}");
        assert!(draws.contains(&1.0) && draws.contains(&0.0) == (lmbda < 1.0), "{draws:?}");
        let lengths = column(&seen, "completions/mean_length");
        assert!(lengths.len() == draws.iter().filter(|&&draw| draw == 1.0).count(), "{lengths:?}");
        assert!(lengths.iter().all(|length| (1.0..=5.0).contains(length)), "{lengths:?}");
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, STEPS).unwrap();
        assert_eq!(metrics(&stopped.output_dir), seen, "{lmbda}");
        assert_eq!(state(&stopped.output_dir), state(&whole.output_dir), "{lmbda}");
    }
}

/// A model that is its own teacher has nothing to learn.
#[test]
fn a_model_does_not_diverge_from_itself() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let teacher = teacher_folder(inputs.path(), runs.path());
    let mut run = student(inputs.path(), &runs.path().join("same"), &teacher, RecipeName::Fp32);
    (run.model.path, run.model.init, run.optimizer.learning_rate) = (teacher, WeightInit::Pretrained, 0.0);
    train(&run, &Device::Cpu, &Start::New, STEPS).unwrap();
    let losses: Vec<f64> = metrics(&run.output_dir).iter().filter_map(|line| line["loss"].as_f64()).collect();
    // Both compute the same log-probabilities; the mixture of equal probabilities is rounded.
    assert!(losses.len() == STEPS as usize && losses.iter().all(|loss| loss.abs() < 1e-6), "{losses:?}");
}

#[test]
fn teachers_with_another_vocabulary_are_errors() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let teacher = teacher_folder(inputs.path(), runs.path());
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut run = student(inputs.path(), &runs.path().join("run"), &teacher, RecipeName::Fp32);
        change(&mut run);
        train(&run, &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string()
    };
    let config = std::fs::read_to_string(teacher.join("config.json")).unwrap();
    std::fs::write(teacher.join("config.json"), config.replace("\"vocab_size\": 100", "\"vocab_size\": 104")).unwrap();
    let text = error(&|_| {});
    assert!(text.contains("has 104 tokens in its vocabulary (`vocab_size`), and the model of"), "{text}");
    std::fs::write(teacher.join("config.json"), &config).unwrap();
    let tokenizer = std::fs::read_to_string(teacher.join("tokenizer.json")).unwrap();
    std::fs::write(teacher.join("tokenizer.json"), tokenizer.replace("\"a\":66", "\"ab\":66")).unwrap();
    let text = error(&|_| {});
    assert!(text.contains("has other tokens than the tokenizer of the run"), "{text}");
    let text = error(&|run| run.distillation.teacher = "missing".into());
    assert!(text.contains("missing"), "{text}");
}

/// A plan has the teacher once, however many micro-batches a step has.
#[test]
fn plans_count_the_teacher_once() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let mut large: Value = serde_json::from_slice(&std::fs::read(inputs.path().join("config.json")).unwrap()).unwrap();
    (large["hidden_size"], large["intermediate_size"]) = (512.into(), 1024.into());
    let folder = inputs.path().join("large");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("config.json"), large.to_string()).unwrap();
    let plan = |teacher: &Path, micro_batches: usize| {
        let mut run = student(inputs.path(), &runs.path().join("run"), teacher, RecipeName::Fp32);
        run.training.gradient_accumulation_steps = micro_batches;
        let sizes = run.decoder_config().unwrap();
        MemoryPlan::new(&ResolvedConfig::fastest(&run), &sizes, &Device::Cpu).unwrap().peak_bytes
    };
    let weights = {
        let mut run = student(inputs.path(), &runs.path().join("run"), &folder, RecipeName::Fp32);
        run.model.path = folder.clone();
        let sizes = run.decoder_config().unwrap();
        let tensors = Decoder::folder_tensors(&sizes, &run.precision.recipe()).unwrap();
        4 * tensors.iter().map(|tensor| tensor.elements() as u64).sum::<u64>()
    };
    for micro_batches in [1, 4] {
        let apart = plan(&folder, micro_batches) - plan(inputs.path(), micro_batches);
        assert!((weights * 9 / 10..weights * 3 / 2).contains(&apart), "{micro_batches}: {apart} of {weights} bytes");
    }
}
