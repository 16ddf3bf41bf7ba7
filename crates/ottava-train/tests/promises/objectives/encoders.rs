//! Encoders: losses, gradients and scores compared with transformers, ranks, recipes, folders, runs that stop and resume, and inference.

use crate::models::recorded::Recorded;
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance};
use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::{devices, eight_bit_names_on, gradients, on_ranks, recipe};
use ottava_data::{Batch, ExampleRows};
use ottava_engine::{Engine, EngineOptions, Event, Pooling, Request};
use ottava_models::{BackwardPass, ConfigFile, Decoder, DecoderConfig, decoder_config, language_model_config};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Zero};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, Resident};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{
    ClassificationConfig, DataConfig, EmbeddingConfig, EmbeddingPooling, OptimizerConfig, RunConfig, TrainingConfig,
};
use ottava_tensor::comm::Group;
use ottava_tensor::ops::LabelLoss;
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::classification::{LabelMicroBatch, scores_of};
use ottava_train::objective::embedding::{Contrast, ContrastMicroBatch, weights_of};
use ottava_train::step::{Loss, MicroBatch, TrainStep};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::path::Path;

/// The recorded classifiers of `scripts/make_encoder_referee.py`.
const CLASSIFIERS: [&str; 4] = ["bert", "roberta", "modernbert", "modernbert_mean"];
/// The recorded embedding models, and their poolings.
const EMBEDDERS: [(&str, EmbeddingPooling); 2] =
    [("bert_cls", EmbeddingPooling::Cls), ("modernbert_embedding", EmbeddingPooling::Mean)];

const ROWS: usize = 4;
const TOKENS: usize = 16;
const LABELS: usize = 3;
const PAD: u32 = 1;
/// The steps of whole runs.
const STEPS: u64 = 24;

fn recorded(case: &'static str) -> Recorded {
    Recorded::open("referee_encoder", case)
}

fn rows_of_encoder() -> ExampleRows {
    ExampleRows { seq_len: TOKENS, after: Vec::new(), end: PAD, padding: Some(PAD.into()), of_encoder: true }
}

/// Returns the recorded texts of a step, without their padding.
fn texts(case: &'static str, step: usize) -> Vec<Vec<u32>> {
    let ids = recorded(case).ids("ids");
    let row = |row: &[i32]| row.iter().map(|&id| id as u32).take_while(|&id| id != PAD).collect();
    ids[step * ROWS * TOKENS..(step + 1) * ROWS * TOKENS].chunks_exact(TOKENS).map(row).collect()
}

fn batch(case: &'static str, step: usize) -> Batch {
    rows_of_encoder().batch(&texts(case, step), ROWS)
}

fn labels(case: &'static str, step: usize) -> Vec<f64> {
    recorded(case).values("labels")[step * ROWS * LABELS..(step + 1) * ROWS * LABELS].to_vec()
}

fn model_on(device: &Device, case: &'static str, name: RecipeName, memory: MemoryPolicy) -> Decoder {
    let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(memory));
    let sizes = recorded(case).sizes();
    let mut model = Decoder::new(&sizes, &recipe, device, purpose, TOKENS, &mut recorded(case)).unwrap();
    model.quantize_weights().unwrap();
    model
}

fn model_of(case: &'static str, name: RecipeName, memory: MemoryPolicy) -> Decoder {
    model_on(&Device::Cpu, case, name, memory)
}

fn loss_of_labels(case: &'static str, step: usize) -> LabelMicroBatch {
    let mut loss = LabelMicroBatch::new(LabelLoss::SingleLabel, [ROWS, LABELS], &Device::Cpu, DType::F32).unwrap();
    loss.set_labels(&labels(case, step)).unwrap();
    loss
}

fn contrast(pooling: EmbeddingPooling) -> Contrast {
    Contrast { pooling, temperature: 0.1, texts: 2, gathers: true, seq_len: TOKENS }
}

fn loss_of_texts(pooling: EmbeddingPooling, batch: &Batch) -> ContrastMicroBatch {
    let mut loss = ContrastMicroBatch::new(contrast(pooling), ROWS, &Device::Cpu, DType::F32).unwrap();
    loss.set_weights(&weights_of(batch, pooling, ShardPlace::ALONE).unwrap(), true).unwrap();
    loss
}

fn largest_distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Returns the names, gradients and recorded gradients of all parameters. A parameter without a recorded gradient is not read.
fn compared_gradients(case: &'static str, loss: &dyn Loss, memory: MemoryPolicy) -> Vec<(String, Vec<f64>, Vec<f64>)> {
    let mut model = model_of(case, RecipeName::Fp32, memory);
    let MicroBatch { inputs, targets, sequences, .. } =
        MicroBatch::new(&batch(case, 0), &Device::Cpu, ShardPlace::ALONE).unwrap();
    let (normed, saved) = model.forward(0, &inputs, &sequences, StepPrecision::Recipe, &mut Resident).unwrap();
    let units = loss.units(TOKENS * ROWS) as f32;
    let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0 / units]).unwrap();
    let (_, dy) = loss.losses_and_gradient(&mut model, &normed, &targets, &scale, &mut Resident).unwrap();
    let pass = BackwardPass { sequences: &sequences, precision: StepPrecision::Recipe, layer_loss_scale: &scale };
    model.backward(0, dy, saved, pass, &mut Resident).unwrap();
    let shards: Vec<_> = model.parameters().iter().map(|param| param.identity.shards.clone()).collect();
    let expected =
        |shard: &ottava_recipe::param::Shard| match recorded(case).find(&format!("gradients/{}", shard.tensor.name)) {
            Some(gradient) => values(&gradient),
            None => vec![0.0; shard.elements()],
        };
    let of = |((name, found), shards): ((String, Vec<f64>), Vec<_>)| {
        (name, found, shards.iter().flat_map(expected).collect())
    };
    gradients(&mut model).into_iter().zip(shards).map(of).collect()
}

#[test]
fn gradients_are_those_of_transformers() {
    let recomputed = MemoryPolicy { recompute: ottava_recipe::recompute::Recompute::Full, ..MemoryPolicy::FULL };
    for memory in [MemoryPolicy::FULL, recomputed] {
        let of_labels = CLASSIFIERS.map(|case| (case, Box::new(loss_of_labels(case, 0)) as Box<dyn Loss>));
        let of_texts =
            EMBEDDERS.map(|(case, pooling)| (case, Box::new(loss_of_texts(pooling, &batch(case, 0))) as Box<dyn Loss>));
        for (case, loss) in of_labels.into_iter().chain(of_texts) {
            let (mut largest, mut elements): (f64, usize) = (0.0, 0);
            for (name, found, expected) in compared_gradients(case, &*loss, memory) {
                let apart = largest_distance(&found, &expected);
                assert!(apart < 1e-5, "{case}: the gradient of {name} is {apart:e} apart");
                (largest, elements) = (largest.max(apart), elements + found.len());
            }
            eprintln!("{case}: {elements} gradients are at most {largest:.1e} apart from transformers'");
        }
    }
}

/// Returns the losses of the recorded steps, and the model after them.
fn losses_of(
    device: &Device,
    case: &'static str,
    pooling: Option<EmbeddingPooling>,
    name: RecipeName,
) -> (Vec<f64>, Decoder) {
    let mut model = model_on(device, case, name, MemoryPolicy::FULL);
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let work = TrainStep::new(&model, 1, ROWS, TOKENS).unwrap().with_documents(2).unwrap();
    let mut work = work
        .with_losses(|rows, device, dtype| match pooling {
            Some(pooling) => Ok(Box::new(ContrastMicroBatch::new(contrast(pooling), rows, device, dtype)?)),
            None => Ok(Box::new(LabelMicroBatch::new(LabelLoss::SingleLabel, [rows, LABELS], device, dtype)?)),
        })
        .unwrap();
    let steps = recorded(case).values("losses").len();
    let step = |step: usize| {
        let batch = batch(case, step);
        match pooling {
            Some(pooling) => {
                let weights = weights_of(&batch, pooling, ShardPlace::ALONE).unwrap();
                work.loss_mut::<ContrastMicroBatch>(0).set_weights(&weights, true).unwrap();
            }
            None => work.loss_mut::<LabelMicroBatch>(0).set_labels(&labels(case, step)).unwrap(),
        }
        work.load(0, &batch).unwrap();
        work.run(&mut model, &mut optimizer, 3e-3, StepPrecision::Recipe).unwrap().loss
    };
    ((0..steps).map(step).collect(), model)
}

#[test]
fn losses_are_those_of_transformers() {
    let cases = CLASSIFIERS.map(|case| (case, None)).into_iter();
    let cases: Vec<_> = cases.chain(EMBEDDERS.map(|(case, pooling)| (case, Some(pooling)))).collect();
    for (device, (case, pooling)) in devices().iter().flat_map(|device| cases.iter().map(move |case| (device, *case))) {
        let expected = recorded(case).values("losses");
        let (found, mut model) = losses_of(device, case, pooling, RecipeName::Fp32);
        let apart = largest_distance(&found, &expected);
        eprintln!("{case} on {device}: losses are at most {apart:.1e} apart from transformers'");
        let allowed = if matches!(device, Device::Cpu) { 1e-5 } else { 1e-4 };
        assert!(apart < allowed, "{case} on {device}: {apart:e}, {found:?} {expected:?}");
        // Nothing reads the pooler of an encoder without a head, so updates do not change it.
        if let Some(param) =
            model.parameters().into_iter().find(|param| param.identity.name() == "bert.pooler.dense.weight")
            && pooling.is_some()
        {
            let weight = values(&param.weights.value().unwrap());
            assert_eq!(weight, recorded(case).values("weights/bert.pooler.dense.weight"));
        }
    }
}

#[test]
fn scores_are_those_of_transformers_and_of_inference() {
    for case in CLASSIFIERS {
        let mut model = model_of(case, RecipeName::Fp32, MemoryPolicy::FULL);
        let texts = texts(case, 0);
        let references: Vec<&Vec<u32>> = texts.iter().collect();
        // Batches of three rows. The last is not full.
        let (partition, rows) = (Partition::solo(), rows_of_encoder());
        let found = scores_of(&mut model, &partition, &references, &rows, 3, StepPrecision::Recipe).unwrap();
        let apart = largest_distance(&found.concat(), &recorded(case).values("scores"));
        assert!(apart < 1e-5, "{case}: {apart:e}");
        let served = pooled(case, &texts, Pooling::Scores);
        let apart = largest_distance(&served.concat(), &found.concat());
        assert!(apart < 1e-5, "{case}: scores of inference are {apart:e} apart");
    }
}

/// Returns the results of an engine for `texts`, in one batch with further texts, and with steps that are too short for the texts.
fn pooled(case: &'static str, texts: &[Vec<u32>], pooling: Pooling) -> Vec<Vec<f64>> {
    let (recipe, sizes) = (recipe(RecipeName::Fp32, Fp8Format::Auto), recorded(case).sizes());
    let model = Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, TOKENS + 1, &mut recorded(case)).unwrap();
    let options =
        EngineOptions { max_model_len: TOKENS + 1, max_batch: 50, prefill_chunk: 3, ..crate::inference::engine::ROOMY };
    let mut engine = Engine::new(model, &options).unwrap();
    let written = Request { prompt: vec![3], max_new_tokens: 1, ..Request::default() };
    let refused = engine.add(written).unwrap_err().to_string();
    assert!(refused.contains("the model is an encoder, which writes no text"), "{refused}");
    // More texts than a pass packs.
    let request = |text: &Vec<u32>| Request { prompt: text.clone(), pooling: Some(pooling), ..Request::default() };
    let ids: Vec<_> = texts.iter().cycle().take(40).map(|text| engine.add(request(text)).unwrap()).collect();
    let mut found = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            if let Event::Embedding { id, values } = event {
                let at = ids.iter().position(|known| *known == id).unwrap();
                found[at] = values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
            }
        }
    }
    for (at, values) in found.iter().enumerate() {
        assert_eq!(*values, found[at % texts.len()], "text {at} depends on its batch");
    }
    found.truncate(texts.len());
    found
}

/// An engine pools the activations that an evaluation pools.
#[test]
fn embeddings_of_inference_are_those_of_training() {
    for ((case, pooling), served) in EMBEDDERS.into_iter().zip([Pooling::Cls, Pooling::Mean]) {
        let mut model = model_of(case, RecipeName::Fp32, MemoryPolicy::FULL);
        let batch = batch(case, 0);
        let MicroBatch { inputs, targets, sequences, .. } =
            MicroBatch::new(&batch, &Device::Cpu, ShardPlace::ALONE).unwrap();
        let (normed, _) = model.forward(0, &inputs, &sequences, StepPrecision::Recipe, &mut Resident).unwrap();
        let rows = loss_of_texts(pooling, &batch).evaluated(&mut model, &normed, &targets, &mut Resident).unwrap();
        let rows = values(&rows);
        let unit = |row: &[f64]| {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.iter().map(|x| x / norm).collect::<Vec<_>>()
        };
        let expected: Vec<_> = rows.chunks_exact(rows.len() / ROWS).flat_map(unit).collect();
        let found = pooled(case, &texts(case, 0), served).concat();
        assert!(largest_distance(&found, &expected) < 1e-5, "{case}: {found:?} {expected:?}");
    }
}

#[test]
fn losses_in_fp8_are_near_those_in_f32() {
    let exact = losses_of(&Device::Cpu, "bert", None, RecipeName::Fp32).0;
    let recipes = |device: Device| {
        let names = [RecipeName::Bf16].into_iter().chain(eight_bit_names_on(&device));
        names.map(|name| (device.clone(), name)).collect::<Vec<_>>()
    };
    for (device, name) in devices().into_iter().flat_map(recipes) {
        let (found, mut model) = losses_of(&device, "bert", None, name);
        let apart = largest_distance(&found, &exact);
        eprintln!("{} on {device}: losses are at most {apart:.1e} apart from those in F32", name.as_str());
        let allowed = if name == RecipeName::Bf16 { 3e-2 } else { 3e-1 };
        assert!(apart < allowed, "{}: {apart:e}", name.as_str());
        let casts = model.description().linears.iter().filter(|(_, decision)| decision.fp8.is_some()).count();
        // Four linears of each of two blocks. The pooler belongs to the head.
        assert_eq!(casts, if name == RecipeName::Bf16 { 0 } else { 8 }, "{}", name.as_str());
        assert!(!model.parameters().is_empty());
    }
}

/// Returns losses and norms of three steps of one rank, and the scores of held-out texts after them.
fn train_on(mesh: &Mesh, comm: Group) -> Seen {
    let (ranks, [rows, tokens]) = (mesh.join(comm), mesh.rows);
    let MeshRank { mut model, mut optimizer, work, .. } = mesh.run(&ranks);
    work.partition().quantize_weights(&mut model).unwrap();
    let work = work.with_documents(2).unwrap();
    let mut work = work
        .with_losses(|rows, device, dtype| {
            Ok(Box::new(LabelMicroBatch::new(LabelLoss::MultiLabel, [rows, LABELS], device, dtype)?))
        })
        .unwrap();
    let (rank, _) = ranks.rows();
    let text = |name: String, length: usize| -> Vec<u32> {
        let ids = integers(&name, length, 20).to_vec::<i32>().unwrap();
        ids.into_iter().map(|id| id as u32 + 2).collect()
    };
    let of_encoder = ExampleRows { seq_len: tokens, ..rows_of_encoder() };
    let mut seen = Seen::new();
    for step in 0..3 {
        let first = rank * rows;
        let texts: Vec<_> = (first..first + rows).map(|i| text(format!("text {step} {i}"), 5 + 3 * i % 11)).collect();
        let labels: Vec<f64> = (first * LABELS..(first + rows) * LABELS).map(|at| (at * 7 % 5) as f64 / 4.0).collect();
        work.loss_mut::<LabelMicroBatch>(0).set_labels(&labels).unwrap();
        work.load(0, &of_encoder.batch(&texts, rows)).unwrap();
        let done = work.run(&mut model, &mut *optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.insert(format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]);
    }
    let texts: Vec<_> = (0..7).map(|i| text(format!("held out {i}"), 4 + i)).collect();
    let texts: Vec<&Vec<u32>> = texts.iter().collect();
    let scores = scores_of(&mut model, work.partition(), &texts, &of_encoder, rows, StepPrecision::Recipe).unwrap();
    seen.insert("scores".into(), scores.concat());
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    ranks.finish().unwrap();
    seen
}

#[test]
fn ranks_change_only_the_order_of_sums() {
    for case in ["roberta", "modernbert"] {
        // Meshes build models for 64 positions.
        let sizes = DecoderConfig { max_positions: 64, ..recorded(case).sizes() };
        let one = Mesh::of_one_rank(sizes, recipe(RecipeName::Fp32, Fp8Format::Auto), [8, TOKENS]);
        let expected = train_on(&one, Group::solo());
        for (name, mesh) in [
            ("2 ranks that divide weights", Mesh { data: 2, zero: Zero::Weights, rows: [4, TOKENS], ..one.clone() }),
            ("2 ranks that divide tensors", Mesh { tensor: 2, ..one.clone() }),
            ("2 ranks that divide sequences", Mesh { context: 2, ..one.clone() }),
        ] {
            let run = mesh.clone();
            for (rank, got) in on_ranks(mesh.ranks(), move |comm| train_on(&run, comm)).into_iter().enumerate() {
                let (apart, what) = distance(&expected, &got);
                assert!(apart < 1e-4, "{case}, {name}, rank {rank}: {what} is {apart:e} apart");
            }
        }
    }
}

/// Writes the folder of a model of `config` without weights, with a tokenizer of words and their parts.
fn write_encoder(folder: &Path, config: Value) {
    write_inputs(folder);
    let letters = ('a'..='z').chain('0'..='9');
    let parts = letters.flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
    let vocabulary: serde_json::Map<String, Value> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        .map(String::from)
        .into_iter()
        .chain(parts)
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect();
    let special = |id: usize, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let token = |id: usize, content: &str| json!({"id": content, "ids": [id], "tokens": [content]});
    let one = |content: &str| json!({"SpecialToken": {"id": content, "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [special(0, "[PAD]"), special(1, "[UNK]"), special(2, "[CLS]"), special(3, "[SEP]"), special(4, "[MASK]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [one("[CLS]"), text("A"), one("[SEP]")],
            "pair": [one("[CLS]"), text("A"), one("[SEP]"), text("B"), one("[SEP]")],
            "special_tokens": {"[CLS]": token(2, "[CLS]"), "[SEP]": token(3, "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocabulary},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn bert() -> Value {
    json!({
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 80, "max_position_embeddings": 40, "hidden_dropout_prob": 0.1, "initializer_range": 0.1,
    })
}

/// Returns the keys of [`bert`] with another type.
fn with_type(model_type: &str) -> serde_json::Map<String, Value> {
    let mut config = bert();
    config["model_type"] = json!(model_type);
    config.as_object_mut().unwrap().shift_remove("architectures");
    config.as_object().unwrap().clone()
}

/// Returns a run of a classifier on texts of digits and of letters.
fn labeled_run(inputs: &Path, output: &Path, model: Value, recipe: RecipeName) -> RunConfig {
    write_encoder(inputs, model);
    let record = |i: usize| {
        let is_digit = i.is_multiple_of(2);
        let first = if is_digit { b'0' } else { b'A' };
        let text: String = (0..3 + i % 5).map(|at| char::from(first + ((i * 7 + at * 3) % 10) as u8)).collect();
        json!({"text": text, "label": if is_digit { "digits" } else { "letters" }})
    };
    let records: String = (0..40).map(|i| format!("{}\n", record(i))).collect();
    std::fs::write(inputs.join("labeled.jsonl"), records).unwrap();
    let of_text = config(inputs, output, recipe);
    RunConfig {
        data: DataConfig { train_files: vec![inputs.join("labeled.jsonl")], max_length: 16, ..of_text.data },
        classification: ClassificationConfig {
            label_names: vec!["digits".into(), "letters".into()],
            ..ClassificationConfig::default()
        },
        training: TrainingConfig { max_steps: Some(STEPS), per_device_train_batch_size: 4, ..of_text.training },
        optimizer: OptimizerConfig { learning_rate: 5e-3, ..of_text.optimizer },
        ..of_text
    }
}

fn names_in(folder: &Path) -> Vec<String> {
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let mut names: Vec<_> =
        safetensors::SafeTensors::deserialize(&file).unwrap().names().into_iter().map(str::to_string).collect();
    names.sort();
    names
}

#[test]
fn an_encoder_learns_and_resuming_changes_nothing() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let inputs = tempfile::tempdir().unwrap();
        let whole = labeled_run(inputs.path(), &inputs.path().join("whole"), bert(), name);
        train(&whole, &Device::Cpu, &Start::New, STEPS).unwrap();
        let accuracies: Vec<f64> =
            metrics(&whole.output_dir).iter().filter_map(|line| line["eval_accuracy"].as_f64()).collect();
        assert_eq!(accuracies.last(), Some(&1.0), "{accuracies:?}");
        let stopped = RunConfig { output_dir: inputs.path().join("stopped"), ..whole.clone() };
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, STEPS).unwrap();
        assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
        let folder = whole.output_dir.join("checkpoints/checkpoint-24");
        let file: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        assert_eq!(file["architectures"], json!(["BertForSequenceClassification"]));
        assert!(decoder_config(&ConfigFile::read(&folder).unwrap()).unwrap().is_encoder());
        let names = names_in(&folder);
        // transformers has 16 tensors in a block, 5 before the blocks, and a pooler and scores with biases.
        assert_eq!(names.len(), 2 * 16 + 5 + 4, "{names:?}");
        for name in [
            "bert.embeddings.LayerNorm.bias",
            "bert.embeddings.token_type_embeddings.weight",
            "bert.encoder.layer.1.attention.output.LayerNorm.weight",
            "bert.encoder.layer.0.attention.self.query.bias",
            "bert.pooler.dense.bias",
            "classifier.bias",
        ] {
            assert!(names.iter().any(|found| found == name), "{name} is not among {names:?}");
        }
    }
}

/// Writes `folder` as `to` without the prefix of the names of tensors, as transformers writes an encoder without a head.
fn without_prefix(folder: &Path, to: &Path, architecture: &str) {
    std::fs::create_dir(to).unwrap();
    for name in ["tokenizer.json", "config.json"] {
        std::fs::copy(folder.join(name), to.join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(to.join("config.json")).unwrap()).unwrap();
    config["architectures"] = json!([architecture]);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let own = tensors.tensors().into_iter().filter(|(name, _)| name.starts_with("bert."));
    let own: Vec<_> = own.map(|(name, view)| (name["bert.".len()..].to_string(), view)).collect();
    safetensors::serialize_to_file(own, None, &to.join("model.safetensors")).unwrap();
}

/// A folder of an encoder without a head starts embedding models and classifiers. A folder of an embedding model keeps its pooler.
#[test]
fn folders_with_and_without_a_head_are_read() {
    let inputs = tempfile::tempdir().unwrap();
    let first = labeled_run(inputs.path(), &inputs.path().join("first"), bert(), RecipeName::Fp32);
    train(&first, &Device::Cpu, &Start::New, STEPS).unwrap();
    let base = inputs.path().join("base");
    without_prefix(&first.output_dir.join("checkpoints/checkpoint-24"), &base, "BertModel");
    let sizes = decoder_config(&ConfigFile::read(&base).unwrap()).unwrap();
    assert!(sizes.head.pooled && sizes.is_encoder());
    let error = language_model_config(&ConfigFile::read(&base).unwrap()).unwrap_err().to_string();
    assert!(error.contains("this is an encoder, which writes no text"), "{error}");
    let mut second = RunConfig { output_dir: inputs.path().join("second"), ..first.clone() };
    (second.model.path, second.model.init) = (base.clone(), ottava_settings::WeightInit::Pretrained);
    train(&second, &Device::Cpu, &Start::New, STEPS).unwrap();
    let losses = |run: &RunConfig| -> Vec<f64> {
        metrics(&run.output_dir).iter().filter_map(|line| line["eval_loss"].as_f64()).collect()
    };
    // Only the scores are new.
    assert!(losses(&second).last() < losses(&first).first(), "{:?} {:?}", losses(&second), losses(&first));
    let records: String =
        (0..20).map(|i| format!("{}\n", json!({"anchor": format!("a{i}"), "positive": format!("b {i}")}))).collect();
    std::fs::write(inputs.path().join("pairs.jsonl"), records).unwrap();
    let mut embedding = RunConfig { output_dir: inputs.path().join("embedding"), ..second.clone() };
    embedding.data.train_files = vec![inputs.path().join("pairs.jsonl")];
    embedding.classification = ClassificationConfig::default();
    embedding.embedding = EmbeddingConfig { pooling: Some(EmbeddingPooling::Cls), ..EmbeddingConfig::default() };
    train(&embedding, &Device::Cpu, &Start::New, STEPS).unwrap();
    let folder = embedding.output_dir.join("checkpoints/checkpoint-24");
    let file = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
    assert_eq!(file("config.json")["architectures"], json!(["BertModel"]));
    assert_eq!(file("1_Pooling/config.json")["pooling_mode_cls_token"], true);
    let tensor = |folder: &Path, name: &str| {
        let file = std::fs::read(folder.join("model.safetensors")).unwrap();
        safetensors::SafeTensors::deserialize(&file).unwrap().tensor(name).unwrap().data().to_vec()
    };
    assert!(tensor(&folder, "bert.pooler.dense.weight") == tensor(&base, "pooler.dense.weight"));
    assert_eq!(names_in(&folder).len(), 2 * 16 + 5 + 2);
}

#[test]
fn what_encoders_cannot_do_is_refused() {
    let inputs = tempfile::tempdir().unwrap();
    let run = labeled_run(inputs.path(), &inputs.path().join("run"), bert(), RecipeName::Fp32);
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run.clone();
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, STEPS).unwrap_err().to_string()
    };
    let text = error(&|config| config.lora.r = 2);
    assert!(text.contains("adapters of encoders are not implemented"), "{text}");
    let text = error(&|config| {
        config.classification = ClassificationConfig::default();
        config.data.train_files = vec![inputs.path().join("text.txt")];
    });
    assert!(text.contains("so it does not predict the next token"), "{text}");
    let refused = |key: &str, value: Value, words: &str| {
        let mut config = bert();
        config[key] = value;
        let file = ConfigFile::from_values("config.json", config.as_object().unwrap().clone());
        let error = decoder_config(&file).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused("is_decoder", json!(true), "`is_decoder` is true");
    refused("position_embedding_type", json!("relative_key"), "only \"absolute\" is implemented");
    // A tokenizer does not decide the first position of RoBERTa.
    let file = ConfigFile::from_values("config.json", with_type("roberta"));
    let of_labels = ottava_models::classifier(&file, Some(70), &ottava_models::Labels::numbered(2)).unwrap();
    assert_eq!(decoder_config(&of_labels).unwrap().max_positions, 38);
    refused("hidden_act", json!("relu"), "only kinds of \"gelu\" are implemented");
}
