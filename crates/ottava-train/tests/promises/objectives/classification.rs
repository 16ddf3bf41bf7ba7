//! Classifiers: losses and gradients compared with transformers, ranks, folders, adapters, and runs that stop and resume.

use crate::models::recorded::Recorded;
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance};
use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::{eight_bit_names_on, gradients, on_ranks, recipe, tiny_llama};
use ottava_data::{Batch, ExampleRows};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Schedule, ScheduleKind, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, Resident};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{
    ClassificationConfig, DataConfig, LoraConfig, Pairs, ProblemType, RunConfig, TrainingConfig, WeightInit,
};
use ottava_tensor::comm::Group;
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{Device, Tensor};
use ottava_train::objective::classification::{LabelMicroBatch, scores_of};
use ottava_train::step::{Loss, MicroBatch, TrainStep};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The recorded cases of `scripts/make_classification_referee.py`, and their numbers of labels.
const CASES: [(&str, ProblemType, usize); 5] = [
    ("single", ProblemType::SingleLabelClassification, 3),
    ("multi", ProblemType::MultiLabelClassification, 3),
    ("reranker", ProblemType::MultiLabelClassification, 1),
    ("number", ProblemType::Regression, 1),
    ("numbers", ProblemType::Regression, 2),
];

const ROWS: usize = 4;
const TOKENS: usize = 16;

fn recorded(case: &'static str) -> Recorded {
    Recorded::open("referee_classification", case)
}

fn example_rows(seq_len: usize) -> ExampleRows {
    ExampleRows { seq_len, after: Vec::new(), end: 0, padding: Some(0), of_encoder: false }
}

/// Returns the recorded texts and the labels of a step.
fn recorded_step(case: &'static str, step: usize) -> (Batch, Vec<f64>) {
    let (ids, labels) = (recorded(case).ids("ids"), recorded(case).values("labels"));
    let texts: Vec<Vec<u32>> = ids[step * ROWS * TOKENS..(step + 1) * ROWS * TOKENS]
        .chunks_exact(TOKENS)
        .map(|row| row.iter().map(|&id| id as u32).collect())
        .collect();
    let each = labels.len() / (ids.len() / TOKENS) * ROWS;
    (example_rows(TOKENS).batch(&texts, ROWS), labels[step * each..(step + 1) * each].to_vec())
}

fn model_of(case: &'static str, name: RecipeName) -> Decoder {
    let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let sizes = recorded(case).sizes();
    let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded(case)).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Returns the losses of the first `steps` recorded steps.
fn losses_of(case: &'static str, problem: ProblemType, count: usize, name: RecipeName, steps: usize) -> Vec<f64> {
    let mut model = model_of(case, name);
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let mut work = with_labels(TrainStep::new(&model, 1, ROWS, TOKENS).unwrap(), problem, count);
    let step = |step: usize| {
        let (batch, labels) = recorded_step(case, step);
        work.loss_mut::<LabelMicroBatch>(0).set_labels(&labels).unwrap();
        work.load(0, &batch).unwrap();
        work.run(&mut model, &mut optimizer, 3e-3, StepPrecision::Recipe).unwrap().loss
    };
    (0..steps).map(step).collect()
}

fn with_labels(work: TrainStep, problem: ProblemType, count: usize) -> TrainStep {
    work.with_losses(|rows, device, dtype| {
        Ok(Box::new(LabelMicroBatch::new(problem.loss(), [rows, count], device, dtype)?))
    })
    .unwrap()
}

fn largest_distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn losses_are_those_of_transformers() {
    for (case, problem, count) in CASES {
        let expected = recorded(case).values("losses");
        let found = losses_of(case, problem, count, RecipeName::Fp32, expected.len());
        let apart = largest_distance(&found, &expected);
        eprintln!("{case}: losses are at most {apart:.1e} apart from transformers'");
        assert!(apart < 1e-5, "{case}: {apart:e}, {found:?} {expected:?}");
        assert!((expected[0] - expected[expected.len() - 1]).abs() > 1e-2, "{case}: nothing changes");
    }
}

/// The gradients of the first step, and the scores that an evaluation computes.
#[test]
fn gradients_and_scores_are_those_of_transformers() {
    for (case, problem, count) in CASES {
        let mut model = model_of(case, RecipeName::Fp32);
        let (batch, labels) = recorded_step(case, 0);
        let mut loss =
            LabelMicroBatch::new(problem.loss(), [ROWS, count], &Device::Cpu, ottava_tensor::DType::F32).unwrap();
        loss.set_labels(&labels).unwrap();
        let MicroBatch { inputs, targets, sequences, .. } =
            MicroBatch::new(&batch, &Device::Cpu, ottava_recipe::layer_ranks::ShardPlace::ALONE).unwrap();
        let (normed, saved) = model.forward(0, &inputs, &sequences, StepPrecision::Recipe, &mut Resident).unwrap();
        let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0f32 / ROWS as f32]).unwrap();
        let (_, dy) = loss.losses_and_gradient(&mut model, &normed, &targets, &scale, &mut Resident).unwrap();
        let pass = ottava_models::BackwardPass {
            sequences: &sequences,
            precision: StepPrecision::Recipe,
            layer_loss_scale: &scale,
        };
        model.backward(0, dy, saved, pass, &mut Resident).unwrap();
        let found = gradients(&mut model);
        let identities: Vec<_> = model.parameters().iter().map(|param| param.identity.shards.clone()).collect();
        let mut largest: f64 = 0.0;
        for ((name, found), shards) in found.iter().zip(identities) {
            let expected: Vec<f64> =
                shards.iter().flat_map(|shard| values(&recorded(case).of_tensor("gradients", &shard.tensor))).collect();
            let apart = largest_distance(found, &expected);
            assert!(apart < 1e-5, "{case}: the gradient of {name} is {apart:e} apart");
            largest = largest.max(apart);
        }
        eprintln!("{case}: gradients are at most {largest:.1e} apart from transformers'");
        let texts: Vec<Vec<u32>> =
            batch.inputs.chunks_exact(TOKENS).map(|row| row.iter().map(|&id| id as u32).collect()).collect();
        let texts: Vec<&Vec<u32>> = texts.iter().collect();
        let (partition, rows) = (Partition::solo(), example_rows(TOKENS));
        // Batches of three rows. The last is not full.
        let scores = scores_of(&mut model, &partition, &texts, &rows, 3, StepPrecision::Recipe).unwrap();
        assert!(largest_distance(&scores.concat(), &recorded(case).values("scores")) < 1e-5, "{case}: {scores:?}");
    }
}

#[test]
fn losses_in_fp8_are_near_those_in_f32() {
    let exact = losses_of("single", ProblemType::SingleLabelClassification, 3, RecipeName::Fp32, 12);
    for name in [RecipeName::Bf16].into_iter().chain(eight_bit_names_on(&Device::Cpu)) {
        let found = losses_of("single", ProblemType::SingleLabelClassification, 3, name, 12);
        let apart = largest_distance(&found, &exact);
        eprintln!("{}: losses are at most {apart:.1e} apart from those in F32", name.as_str());
        let allowed = if name == RecipeName::Bf16 { 3e-2 } else { 2e-1 };
        assert!(apart < allowed, "{}: {apart:e}", name.as_str());
    }
}

/// Returns losses and norms of three steps of one rank, and the scores of held-out texts after them.
fn train_on(mesh: &Mesh, comm: Group) -> Seen {
    let (ranks, [rows, tokens]) = (mesh.join(comm), mesh.rows);
    let MeshRank { mut model, mut optimizer, work, .. } = mesh.run(&ranks);
    work.partition().quantize_weights(&mut model).unwrap();
    let mut work = with_labels(work, ProblemType::MultiLabelClassification, 3);
    let (rank, world) = ranks.rows();
    let text = |name: String, length: usize| -> Vec<u32> {
        let ids = integers(&name, length, 95).to_vec::<i32>().unwrap();
        ids.into_iter().map(|id| id as u32 + 1).collect()
    };
    let mut seen = Seen::new();
    for step in 0..3 {
        for micro_batch in 0..mesh.schedule.micro_batches {
            let first = (micro_batch * world + rank) * rows;
            let texts: Vec<_> =
                (first..first + rows).map(|i| text(format!("text {step} {i}"), 5 + 3 * i % 11)).collect();
            let labels: Vec<f64> = (first * 3..(first + rows) * 3).map(|at| (at * 7 % 5) as f64 / 4.0).collect();
            work.loss_mut::<LabelMicroBatch>(micro_batch).set_labels(&labels).unwrap();
            work.load(micro_batch, &example_rows(tokens).batch(&texts, rows)).unwrap();
        }
        let done = work.run(&mut model, &mut *optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.insert(format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]);
    }
    let texts: Vec<_> = (0..7).map(|i| text(format!("held out {i}"), 4 + i)).collect();
    let texts: Vec<&Vec<u32>> = texts.iter().collect();
    let rows_of_text = example_rows(tokens);
    let scores = scores_of(&mut model, work.partition(), &texts, &rows_of_text, rows, StepPrecision::Recipe).unwrap();
    seen.insert("scores".into(), scores.concat());
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    ranks.finish().unwrap();
    seen
}

#[test]
fn micro_batches_and_ranks_change_only_the_order_of_sums() {
    let mut sizes = tiny_llama();
    sizes.head.labels = Some(3);
    let one = Mesh::of_one_rank(sizes, recipe(RecipeName::Fp32, Fp8Format::Auto), [8, 16]);
    let (schedule, zero) = (one.schedule, one.zero);
    let pipeline = Schedule { kind: ScheduleKind::default(), ranks: 2, stages: 1, micro_batches: 2 };
    let expected = train_on(&one, Group::solo());
    let with = |schedule, data, zero, rows| Mesh { schedule, data, zero, rows: [rows, 16], ..one.clone() };
    for (name, mesh) in [
        ("2 micro-batches", with(Schedule::of_one_rank(2), 1, zero, 4)),
        ("2 ranks", with(schedule, 2, zero, 4)),
        ("2 ranks that divide weights", with(schedule, 2, Zero::Weights, 4)),
        ("2 ranks of a pipeline", with(pipeline, 1, zero, 4)),
        ("2 ranks that divide tensors", Mesh { tensor: 2, ..one.clone() }),
        ("2 ranks that divide sequences", Mesh { context: 2, ..one.clone() }),
    ] {
        let run = mesh.clone();
        for (rank, got) in on_ranks(mesh.ranks(), move |comm| train_on(&run, comm)).into_iter().enumerate() {
            let (apart, what) = distance(&expected, &got);
            assert!(apart < 1e-4, "{name}, rank {rank}: {what} is {apart:e} apart");
        }
    }
}

/// Writes texts of two kinds with their labels, and returns a run on them.
fn labeled_run(inputs: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    write_inputs(inputs);
    let record = |i: usize| {
        let is_digit = i.is_multiple_of(2);
        let text: String = (0..3 + i % 5)
            .map(|at| {
                if is_digit {
                    char::from(b'0' + ((i * 7 + at * 3) % 10) as u8)
                } else {
                    char::from(b'a' + ((i * 5 + at) % 26) as u8)
                }
            })
            .collect();
        json!({"text": text, "label": if is_digit { "digits" } else { "letters" }, "both": [is_digit, i.is_multiple_of(3)], "size": text.len()})
    };
    let records: String = (0..40).map(|i| format!("{}\n", record(i))).collect();
    std::fs::write(inputs.join("labeled.jsonl"), records).unwrap();
    let of_text = config(inputs, output, recipe);
    RunConfig {
        data: DataConfig { train_files: vec![inputs.join("labeled.jsonl")], ..of_text.data },
        classification: ClassificationConfig {
            label_names: vec!["digits".into(), "letters".into()],
            ..ClassificationConfig::default()
        },
        training: TrainingConfig { max_steps: Some(8), per_device_train_batch_size: 4, ..of_text.training },
        ..of_text
    }
}

fn last_checkpoint(run: &RunConfig) -> PathBuf {
    run.output_dir.join("checkpoints/checkpoint-8")
}

fn numbers(run: &RunConfig, key: &str) -> Vec<f64> {
    metrics(&run.output_dir).iter().filter_map(|line| line[key].as_f64()).collect()
}

#[test]
fn a_classifier_learns_and_resuming_changes_nothing() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let inputs = tempfile::tempdir().unwrap();
        let whole = labeled_run(inputs.path(), &inputs.path().join("whole"), name);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        let accuracies = numbers(&whole, "eval_accuracy");
        assert!(accuracies.len() >= 4 && accuracies.last() == Some(&1.0), "{accuracies:?}");
        assert_eq!(numbers(&whole, "eval_f1").last(), Some(&1.0));
        let stopped = RunConfig { output_dir: inputs.path().join("stopped"), ..whole.clone() };
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
        let weights = |run: &RunConfig| std::fs::read(last_checkpoint(run).join("model.safetensors")).unwrap();
        assert!(weights(&stopped) == weights(&whole), "the weights differ");
    }
}

#[test]
fn problems_have_their_metrics_and_their_records() {
    let inputs = tempfile::tempdir().unwrap();
    let run = |output: &str, problem: ProblemType, count: usize, label: &str| {
        let mut run = labeled_run(inputs.path(), &inputs.path().join(output), RecipeName::Fp8Current);
        run.classification =
            ClassificationConfig { problem_type: Some(problem), num_labels: count, label_names: vec![] };
        run.data.records.fields = Pairs(vec![("label".into(), label.into())]);
        run.evaluation.load_best_model_at_end = true;
        run
    };
    let mut several = run("several", ProblemType::MultiLabelClassification, 2, "both");
    several.evaluation.metric_for_best_model = "eval_f1".into();
    train(&several, &Device::Cpu, &Start::New, 8).unwrap();
    let f1 = numbers(&several, "eval_f1");
    assert!(f1.last() > f1.first(), "{f1:?}");
    let mut size = run("size", ProblemType::Regression, 1, "size");
    size.evaluation.metric_for_best_model = "eval_mse".into();
    train(&size, &Device::Cpu, &Start::New, 8).unwrap();
    let errors = numbers(&size, "eval_mse");
    assert!(errors.last().unwrap() < &(errors[0] * 0.6), "{errors:?}");
    assert_eq!(errors, numbers(&size, "eval_loss"));
    assert!(!numbers(&size, "eval_pearson").is_empty());
    size.evaluation.metric_for_best_model = "eval_f2".into();
    size.output_dir = inputs.path().join("other");
    let text = train(&size, &Device::Cpu, &Start::New, 8).unwrap_err().to_string();
    assert!(text.contains("has eval_loss, eval_accuracy, eval_f1, eval_pearson, eval_mse"), "{text}");
}

/// The folder has the form of transformers. A run continues from it with its labels, or starts anew with other labels.
#[test]
fn folders_of_classifiers_are_read_as_they_were_written() {
    let inputs = tempfile::tempdir().unwrap();
    let first = labeled_run(inputs.path(), &inputs.path().join("first"), RecipeName::Fp32);
    train(&first, &Device::Cpu, &Start::New, 8).unwrap();
    let folder = last_checkpoint(&first);
    let file: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    assert_eq!(file["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(file["id2label"], json!({"0": "digits", "1": "letters"}));
    assert_eq!(file["label2id"], json!({"digits": 0, "letters": 1}));
    assert_eq!(file["problem_type"], "single_label_classification");
    assert_eq!(decoder_config(&ConfigFile::read(&folder).unwrap()).unwrap().head.labels, Some(2));
    let mut second = RunConfig { output_dir: inputs.path().join("second"), ..first.clone() };
    (second.model.path, second.model.init) = (folder.clone(), WeightInit::Pretrained);
    second.classification = ClassificationConfig {
        problem_type: Some(ProblemType::SingleLabelClassification),
        ..ClassificationConfig::default()
    };
    train(&second, &Device::Cpu, &Start::New, 8).unwrap();
    assert_eq!(numbers(&second, "eval_loss")[0], *numbers(&first, "eval_loss").last().unwrap());
    let mut other = RunConfig { output_dir: inputs.path().join("other"), ..second.clone() };
    other.classification = ClassificationConfig {
        label_names: ["digits", "letters", "none"].map(String::from).to_vec(),
        ..Default::default()
    };
    train(&other, &Device::Cpu, &Start::New, 8).unwrap();
    let file: Value =
        serde_json::from_slice(&std::fs::read(last_checkpoint(&other).join("config.json")).unwrap()).unwrap();
    assert_eq!(file["id2label"], json!({"0": "digits", "1": "letters", "2": "none"}));
    // The head of the folder has the scores of digits first.
    other.classification.label_names = ["letters", "digits"].map(String::from).to_vec();
    other.output_dir = inputs.path().join("reordered");
    let error = train(&other, &Device::Cpu, &Start::New, 8).unwrap_err().to_string();
    assert!(error.contains("in another order") && error.contains(": digits, letters;"), "{error}");
}

#[test]
fn adapters_of_classifiers_have_the_head() {
    let inputs = tempfile::tempdir().unwrap();
    let mut base = labeled_run(inputs.path(), &inputs.path().join("base"), RecipeName::Fp32);
    (base.classification, base.data.train_files) =
        (ClassificationConfig::default(), vec![inputs.path().join("text.txt")]);
    std::fs::write(inputs.path().join("text.txt"), "abc 123\n".repeat(40)).unwrap();
    train(&base, &Device::Cpu, &Start::New, 8).unwrap();
    let mut whole = labeled_run(inputs.path(), &inputs.path().join("whole"), RecipeName::Fp8Current);
    (whole.model.path, whole.model.init) = (last_checkpoint(&base), WeightInit::Pretrained);
    whole.lora = LoraConfig { r: 3, lora_alpha: 4.0, ..LoraConfig::default() };
    let stopped = RunConfig { output_dir: inputs.path().join("stopped"), ..whole.clone() };
    train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
    train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
    assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
    let file = std::fs::read(last_checkpoint(&whole).join("adapter_config.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    assert_eq!((&file["task_type"], &file["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["score"])));
    let weights = std::fs::read(last_checkpoint(&whole).join("adapter_model.safetensors")).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&weights).unwrap();
    assert_eq!(weights.tensor("base_model.model.score.weight").unwrap().shape(), [2, 32]);
}

#[test]
fn what_a_classifier_cannot_do_is_refused() {
    let inputs = tempfile::tempdir().unwrap();
    let run = labeled_run(inputs.path(), &inputs.path().join("run"), RecipeName::Fp32);
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run.clone();
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, 8).unwrap_err().to_string()
    };
    let text = error(&|config| config.classification.label_names = vec!["digits".into(), "others".into()]);
    assert!(text.contains(": field `label` has \"letters\", which is no label of the 2 labels"), "{text}");
    let text = error(&|config| {
        config.classification =
            ClassificationConfig { problem_type: Some(ProblemType::MultiLabelClassification), ..Default::default() };
    });
    assert!(text.contains("`classification.num_labels` is 0"), "{text}");
    let text = error(&|config| config.classification = ClassificationConfig { num_labels: 1, ..Default::default() });
    assert!(text.contains("the label of a regression is a number"), "{text}");
    std::fs::write(inputs.path().join("plain.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    let text = error(&|config| config.data.train_files = vec![inputs.path().join("plain.jsonl")]);
    assert!(text.contains("field `label` is missing"), "{text}");
    let text = error(&|config| config.data.train_files = vec![inputs.path().join("text.txt")]);
    assert!(text.contains("reads records of \"classification\""), "{text}");
}
