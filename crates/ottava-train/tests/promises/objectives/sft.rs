//! Fine-tuning: rows of several documents, with ignored targets.

use crate::setup::{Seeded, batch, config, gradients, losses_and_gradients_of, on_ranks, recipe, tiny_llama};
use ottava_data::{Batch, EvalLoader, Packing, RowLayout, SourceOptions, Split, Tokenizer, Windows, loader, prepare};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Schedule, Zero};
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::testing::values;
use ottava_train::evaluate::evaluate;
use ottava_train::step::TrainStep;
use serde_json::json;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const ROWS: usize = 8;
const TOKENS: usize = 12;

fn model(sizes: &DecoderConfig) -> Decoder {
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    Decoder::new(sizes, &recipe, &Device::Cpu, purpose, 64, &mut Seeded { std: 0.1 }).unwrap()
}

/// Returns row `row` of a step: documents of 5 and 4 tokens, and padding. Rows have from 1 to 8 targets.
fn row(step: usize, row: usize) -> Batch {
    let [inputs, targets] = batch(&format!("sft {step}"), ROWS, TOKENS, 96).map(|ids| ids.to_vec::<i32>().unwrap());
    let [inputs, mut targets] = [inputs, targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
    targets[row + 1..].fill(IGNORE_INDEX);
    Batch { inputs, targets, rows: 1, seq_len: TOKENS, documents: Some(vec![5, 4, 3]), padding: vec![3] }
}

/// Returns `count` rows from `first` on, every `stride`th, as one micro-batch.
fn rows(step: usize, first: usize, stride: usize, count: usize) -> Batch {
    let mut all = Batch {
        inputs: vec![],
        targets: vec![],
        rows: count,
        seq_len: TOKENS,
        documents: Some(vec![]),
        padding: vec![],
    };
    for one in (0..count).map(|i| row(step, first + i * stride)) {
        all.inputs.extend(one.inputs);
        all.targets.extend(one.targets);
        all.documents.as_mut().unwrap().extend(one.documents.unwrap());
        all.padding.extend(one.padding);
    }
    all
}

/// Returns losses and norms of two steps with `micro_batches` micro-batches on each rank, and the weights after them.
fn train(micro_batches: usize, comm: Group) -> Vec<(String, Vec<f64>)> {
    let mut model = model(&tiny_llama());
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), Zero::Nothing, ReduceFormat::Stored, false).unwrap();
    let how = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-4, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(how, &model.parameters()).unwrap();
    let count = ROWS / ranks.size() / micro_batches;
    let mut work = TrainStep::shared(&model, Schedule::of_one_rank(micro_batches), count, TOKENS, partition)
        .unwrap()
        .with_documents(3)
        .unwrap();
    let mut seen = Vec::new();
    for step in 0..2 {
        for micro_batch in 0..micro_batches {
            let first = micro_batch * count * ranks.size() + ranks.rank();
            work.load(micro_batch, &rows(step, first, ranks.size(), count)).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        assert_eq!(done.tokens as usize, ROWS * (TOKENS - 3), "padding is not counted");
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
    }
    seen.extend(
        model
            .parameters()
            .iter()
            .map(|param| (param.identity.name().to_string(), values(&param.weights.value().unwrap()))),
    );
    seen
}

/// The loss is divided by the target tokens of all micro-batches and ranks together, so dividing rows among them changes only the order of sums.
#[test]
fn micro_batches_and_ranks_do_not_weigh_rows() {
    let whole = train(1, Group::solo());
    let two_ranks = on_ranks(2, |comm| train(2, comm)).remove(0);
    for (how, seen) in [("2x4", train(2, Group::solo())), ("8x1", train(8, Group::solo())), ("2 ranks", two_ranks)] {
        for ((name, expected), (_, got)) in whole.iter().zip(&seen) {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 2e-5 * a.abs().max(0.1);
            assert!(expected.iter().zip(got).all(near), "{name} as {how}: {expected:?} and {got:?}");
        }
    }
}

/// Only the second document of a row has targets. The embedding rows of the other documents have no gradient unless attention leaks.
#[test]
fn masked_documents_have_no_gradient() {
    let embedding = |lengths: &[usize]| {
        let mut model = model(&tiny_llama());
        let ids: Vec<i32> = (1..=TOKENS as i32).collect();
        let mut targets = vec![IGNORE_INDEX; TOKENS];
        targets[5..8].copy_from_slice(&[50, 51, 52]);
        let [inputs, targets] =
            [ids, targets].map(|ids| ottava_tensor::Tensor::from_slice(&Device::Cpu, &[TOKENS], &ids).unwrap());
        let mut sequences = Sequences::packed(&Device::Cpu, 1, TOKENS, 3).unwrap();
        sequences.set_documents(lengths).unwrap();
        losses_and_gradients_of(&mut model, &inputs, &targets, sequences, 1.0).unwrap();
        let all = gradients(&mut model);
        let (_, gradient) = all.into_iter().find(|(name, _)| name.contains("embed_tokens")).unwrap();
        let width = gradient.len() / 96;
        move |token: usize| gradient[token * width..(token + 1) * width].iter().any(|&g| g != 0.0)
    };
    let has_gradient = embedding(&[5, 4, 3]);
    let touched: Vec<usize> = (0..96).filter(|&token| has_gradient(token)).collect();
    // The last token of the document has no target, and no other token reads it.
    assert_eq!(touched, [6, 7, 8]);
    let leaks = embedding(&[12]);
    assert!((1..=5).all(leaks), "a leak between documents is noticed");
}

#[test]
fn packed_documents_have_the_losses_of_single_ones() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("pairs.jsonl");
    let pair =
        |i: usize| json!({"prompt": format!("word {i} "), "completion": "and more words ".repeat(1 + i * i % 5)});
    std::fs::write(&source, (0..24).map(|i| pair(i).to_string() + "\n").collect::<String>()).unwrap();
    let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap();
    let data = Arc::new(prepare(&[source], &SourceOptions::default(), &tokenizer, folder.path()).unwrap());
    let mut model = model(&config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    })));
    let split = Split::all_validation(data.len());
    let mut loss = |packing, document_mask| {
        let layout = RowLayout { seq_len: 48, packing, document_mask, max_documents: None };
        let batches = loader::whole_validation(data.clone(), split, layout, 4).unwrap();
        let found = evaluate(&mut model, batches, 1, StepPrecision::Recipe, &Partition::solo(), &mut |_| {}).unwrap();
        (found.loss, found.tokens)
    };
    let (alone, tokens) = loss(Packing::None, true);
    let (packed, packed_tokens) = loss(Packing::Bfd, true);
    let (leaking, _) = loss(Packing::Bfd, false);
    assert_eq!((tokens, packed_tokens), (data.meta().target_tokens, data.meta().target_tokens));
    assert!((alone - packed).abs() <= 1e-5 * alone, "{alone} and {packed}");
    // Rows of a stream also attend across documents. They leave out the same targets.
    let stream = EvalLoader::new(data.clone(), split, Windows::blocks(48), 4).unwrap();
    let stream = evaluate(&mut model, stream, 1, StepPrecision::Recipe, &Partition::solo(), &mut |_| {}).unwrap();
    assert_eq!(stream.tokens, tokens);
    assert!((alone - leaking).abs() > 1e-4 * alone, "a leak between documents is noticed: {alone} and {leaking}");
}
