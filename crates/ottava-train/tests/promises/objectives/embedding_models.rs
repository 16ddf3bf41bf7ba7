//! Embedding models: losses and gradients compared with sentence-transformers, ranks, folders, and runs that stop and resume.

use crate::models::recorded::Recorded;
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance};
use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::{gradients, on_ranks, recipe, tiny_llama};
use ottava_data::{Batch, ExampleRows};
use ottava_models::{BackwardPass, Decoder};
use ottava_parallel::Zero;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, Resident};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{DataConfig, EmbeddingConfig, EmbeddingPooling, RunConfig, TrainingConfig};
use ottava_tensor::comm::{Axis, Group};
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::embedding::{Contrast, ContrastMicroBatch, weights_of};
use ottava_train::step::{Loss, MicroBatch, TrainStep};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::path::Path;

/// The recorded cases of `scripts/make_embedding_referee.py`: the pooling, the texts of an example, and the reciprocal of the temperature.
const CASES: [(&str, EmbeddingPooling, usize, f64); 3] = [
    ("mean", EmbeddingPooling::Mean, 2, 20.0),
    ("last", EmbeddingPooling::Last, 2, 5.0),
    ("negatives", EmbeddingPooling::Mean, 4, 10.0),
];

const EXAMPLES: usize = 4;
const TOKENS: usize = 12;

fn recorded(case: &'static str) -> Recorded {
    Recorded::open("referee_embedding", case)
}

fn contrast(pooling: EmbeddingPooling, texts: usize, scale: f64, seq_len: usize) -> Contrast {
    Contrast { pooling, temperature: 1.0 / scale, texts, gathers: true, seq_len }
}

fn rows_of(texts: &[Vec<u32>], seq_len: usize) -> Batch {
    ExampleRows { seq_len, after: Vec::new(), end: 0, padding: None, of_encoder: false }.batch(texts, texts.len())
}

/// Returns the recorded rows of a step: all anchors, then all positive texts, and so on.
fn recorded_batch(case: &'static str, texts: usize, step: usize) -> Batch {
    let (ids, lengths, rows) = (recorded(case).ids("ids"), recorded(case).ids("lengths"), texts * EXAMPLES);
    let row = |row: usize| ids[row * TOKENS..][..lengths[row] as usize].iter().map(|&id| id as u32).collect::<Vec<_>>();
    rows_of(&(step * rows..(step + 1) * rows).map(row).collect::<Vec<_>>(), TOKENS)
}

fn model_of(case: &'static str) -> Decoder {
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut sizes = recorded(case).sizes();
    sizes.head.pooled = true;
    Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded(case)).unwrap()
}

fn with_contrast(work: TrainStep, how: Contrast) -> TrainStep {
    work.with_losses(|rows, device, dtype| Ok(Box::new(ContrastMicroBatch::new(how, rows, device, dtype)?))).unwrap()
}

fn load(work: &mut TrainStep, micro_batch: usize, batch: &Batch, how: &Contrast) {
    let place = work.partition().ranks().place(Axis::Context);
    let weights = weights_of(batch, how.pooling, place).unwrap();
    work.loss_mut::<ContrastMicroBatch>(micro_batch).set_weights(&weights, place.rank == 0).unwrap();
    work.load(micro_batch, batch).unwrap();
}

fn largest_distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn losses_and_gradients_are_those_of_sentence_transformers() {
    for (case, pooling, texts, scale) in CASES {
        let how = contrast(pooling, texts, scale, TOKENS);
        let mut model = model_of(case);
        let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
        let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
        let mut work = with_contrast(TrainStep::new(&model, 1, texts * EXAMPLES, TOKENS).unwrap(), how);
        let expected = recorded(case).values("losses");
        let step = |step: usize| {
            load(&mut work, 0, &recorded_batch(case, texts, step), &how);
            work.run(&mut model, &mut optimizer, 3e-3, StepPrecision::Recipe).unwrap().loss
        };
        let found: Vec<f64> = (0..expected.len()).map(step).collect();
        let apart = largest_distance(&found, &expected);
        eprintln!("{case}: losses are at most {apart:.1e} apart from sentence-transformers'");
        // Sums in F32 have another order, and the temperature multiplies differences of cosines by up to 20.
        assert!(apart < 2e-5, "{case}: {apart:e}, {found:?} {expected:?}");
        let mut model = model_of(case);
        let batch = recorded_batch(case, texts, 0);
        let mut loss = ContrastMicroBatch::new(how, batch.rows, &Device::Cpu, DType::F32).unwrap();
        loss.set_weights(&weights_of(&batch, pooling, ShardPlace::ALONE).unwrap(), true).unwrap();
        let MicroBatch { inputs, targets, sequences, .. } =
            MicroBatch::new(&batch, &Device::Cpu, ShardPlace::ALONE).unwrap();
        let (normed, saved) = model.forward(0, &inputs, &sequences, StepPrecision::Recipe, &mut Resident).unwrap();
        let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0f32 / EXAMPLES as f32]).unwrap();
        let (_, dy) = loss.losses_and_gradient(&mut model, &normed, &targets, &scale, &mut Resident).unwrap();
        let pass = BackwardPass { sequences: &sequences, precision: StepPrecision::Recipe, layer_loss_scale: &scale };
        model.backward(0, dy, saved, pass, &mut Resident).unwrap();
        let found = gradients(&mut model);
        let shards: Vec<_> = model.parameters().iter().map(|param| param.identity.shards.clone()).collect();
        for ((name, found), shards) in found.iter().zip(shards) {
            let of =
                |shard: &ottava_recipe::param::Shard| values(&recorded(case).of_tensor("gradients", &shard.tensor));
            let expected: Vec<f64> = shards.iter().flat_map(of).collect();
            let apart = largest_distance(found, &expected);
            assert!(apart < 1e-5, "{case}: the gradient of {name} is {apart:e} apart");
        }
    }
}

/// Returns losses and norms of three steps of one rank.
fn train_on(mesh: &Mesh, comm: Group) -> Seen {
    let (ranks, [rows, tokens]) = (mesh.join(comm), mesh.rows);
    let MeshRank { mut model, mut optimizer, work, .. } = mesh.run(&ranks);
    work.partition().quantize_weights(&mut model).unwrap();
    let how = contrast(EmbeddingPooling::Mean, 3, 10.0, tokens);
    let mut work = with_contrast(work, how);
    let (rank, _) = ranks.rows();
    let mut seen = Seen::new();
    for step in 0..3 {
        let (examples, first) = (rows / 3, rank * rows / 3);
        let text = |text: usize, example: usize| -> Vec<u32> {
            let ids = integers(&format!("{step} {text} {example}"), 3 + (5 * text + example) % 12, 96);
            ids.to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect()
        };
        let texts: Vec<_> = (0..3)
            .flat_map(|of| (first..first + examples).map(move |example| (of, example)))
            .map(|(of, example)| text(of, example))
            .collect();
        load(&mut work, 0, &rows_of(&texts, tokens), &how);
        let done = work.run(&mut model, &mut *optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.insert(format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]);
    }
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    ranks.finish().unwrap();
    seen
}

/// The texts of all data ranks are negatives, so ranks have the losses of one rank with all rows.
#[test]
fn ranks_have_the_losses_of_one_rank() {
    let mut sizes = tiny_llama();
    (sizes.head.pooled, sizes.head.tied) = (true, true);
    let one = Mesh::of_one_rank(sizes, recipe(RecipeName::Fp32, Fp8Format::Auto), [12, 16]);
    let expected = train_on(&one, Group::solo());
    for (name, mesh) in [
        ("2 ranks", Mesh { data: 2, rows: [6, 16], ..one.clone() }),
        ("4 ranks that divide weights", Mesh { data: 4, zero: Zero::Weights, rows: [3, 16], ..one.clone() }),
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

/// Writes records of texts that belong together, and returns a run on them.
fn related_run(inputs: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    write_inputs(inputs);
    let record = |i: usize| {
        // Only training can tell which digit belongs to a letter.
        let word = |first: u8, number: usize| char::from(first + (number % 10) as u8).to_string().repeat(3);
        json!({"anchor": word(b'a', i), "positive": word(b'0', i), "negative": [word(b'0', i + 1), "z"]})
    };
    let records: String = (0..40).map(|i| format!("{}\n", record(i))).collect();
    std::fs::write(inputs.join("related.jsonl"), records).unwrap();
    let of_text = config(inputs, output, recipe);
    RunConfig {
        data: DataConfig { train_files: vec![inputs.join("related.jsonl")], ..of_text.data },
        embedding: EmbeddingConfig {
            pooling: Some(EmbeddingPooling::Mean),
            negatives: 1,
            ..EmbeddingConfig::default()
        },
        training: TrainingConfig { max_steps: Some(8), per_device_train_batch_size: 4, ..of_text.training },
        ..of_text
    }
}

#[test]
fn an_embedding_model_learns_and_resuming_changes_nothing() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let inputs = tempfile::tempdir().unwrap();
        let whole = related_run(inputs.path(), &inputs.path().join("whole"), name);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        let numbers = |key: &str| -> Vec<f64> {
            metrics(&whole.output_dir).iter().filter_map(|line| line[key].as_f64()).collect()
        };
        let losses = numbers("eval_loss");
        assert!(losses.last().unwrap() < &(losses[0] * 0.7), "{losses:?}");
        assert!(numbers("eval_mrr").last() > numbers("eval_mrr").first() && !numbers("eval_accuracy").is_empty());
        let stopped = RunConfig { output_dir: inputs.path().join("stopped"), ..whole.clone() };
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
        let folder = whole.output_dir.join("checkpoints/checkpoint-8");
        let file =
            |name: &str| -> Value { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
        assert_eq!(file("modules.json")[1]["path"], "1_Pooling");
        let pooling = file("1_Pooling/config.json");
        assert_eq!(
            (&pooling["pooling_mode_mean_tokens"], &pooling["word_embedding_dimension"]),
            (&json!(true), &json!(32))
        );
        assert_eq!(file("config.json")["tie_word_embeddings"], true);
    }
}

#[test]
fn what_an_embedding_model_cannot_do_is_refused() {
    let inputs = tempfile::tempdir().unwrap();
    let run = related_run(inputs.path(), &inputs.path().join("run"), RecipeName::Fp32);
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run.clone();
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, 8).unwrap_err().to_string()
    };
    let text = error(&|config| config.embedding.negatives = 3);
    assert!(text.contains("it has 2 negative texts, and `embedding.negatives` is 3"), "{text}");
}
