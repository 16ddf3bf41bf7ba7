//! Ranks that divide each layer train as one rank does, to rounding.

use crate::mesh::{Mesh, MeshRank, Seen, distance, rows};
use crate::setup::{Seeded, config, on_ranks, recipe};
use ottava_lm::Result;
use ottava_lm::data::Batch;
use ottava_lm::evaluate::evaluate;
use ottava_lm::lora::{Lora, Targets};
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::DecoderConfig;
use ottava_lm::optim::{Optimizer, optimizer_tensors};
use ottava_lm::parallel::{Schedule, TensorAxis, Zero};
use ottava_lm::param::{MemoryPolicy, Param};
use ottava_lm::recipe::{Fp8Format, RecipeName};
use ottava_lm::recompute::Recompute;
use ottava_lm::tensor_ranks::{ShardPlace, TensorRanks};
use ottava_tensor::comm::Group;
use ottava_tensor::ops::add;
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Tensor};
use serde_json::{Value, json};
use std::rc::Rc;

const ROWS: usize = 2;
const TOKENS: usize = 32;
const STEPS: usize = 2;
const MICRO_BATCHES: usize = 2;
/// A run on ranks, of which the first may have a fault.
#[derive(Clone)]
struct Setup {
    mesh: Mesh,
    fault: Option<Fault>,
}

/// What the exchange of the first rank may do wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It adds the residual connection twice.
    DoubleAddend,
    /// It reads its own rows in place of those of others.
    MissingGather,
    /// It reads the rows of the ranks in another order.
    SwappedRows,
    /// It computes scales from its own amaxes.
    OwnScale,
}

/// The ranks of a tensor axis with a fault.
struct Faulty {
    ranks: TensorAxis,
    fault: Fault,
}

impl TensorRanks for Faulty {
    fn place(&self) -> ShardPlace {
        self.ranks.place()
    }

    fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        let all = self.ranks.gather(name, rows)?;
        let first = match self.fault {
            Fault::MissingGather => [rows, rows],
            Fault::SwappedRows => [&all.rows(rows.shape()[0], all.shape()[0])?, rows],
            Fault::DoubleAddend | Fault::OwnScale => return Ok(all),
        };
        let mut wrong = all.duplicate()?;
        wrong.copy_from(0, first[0])?;
        wrong.copy_from(rows.shape()[0], first[1])?;
        Ok(wrong)
    }

    fn sum_own_rows(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let sum = self.ranks.sum_own_rows(name, partial, addend)?;
        match (self.fault, addend) {
            (Fault::DoubleAddend, Some(addend)) => Ok(add(&sum, addend)?),
            _ => Ok(sum),
        }
    }

    fn sum(&self, name: &str, x: Tensor) -> Result<Tensor> {
        self.ranks.sum(name, x)
    }

    fn largest(&self, name: &str, x: Tensor) -> Result<Tensor> {
        let own = x.duplicate()?;
        let largest = self.ranks.largest(name, x)?;
        Ok(if matches!(self.fault, Fault::OwnScale) { own } else { largest })
    }
}

impl Setup {
    fn new(keys: Value, name: RecipeName) -> Setup {
        let (sizes, recipe, memory) = (config(keys), recipe(name, Fp8Format::Auto), MemoryPolicy::FULL);
        let (schedule, zero) = (Schedule::of_one_rank(MICRO_BATCHES), Zero::Nothing);
        let mesh = Mesh { sizes, recipe, memory, schedule, tensor: 1, data: 1, zero, rows: [ROWS, TOKENS] };
        Setup { mesh, fault: None }
    }

    /// The same run on `data` x `pipeline` x `tensor` ranks.
    fn on(&self, data: usize, pipeline: usize, tensor: usize) -> Setup {
        let micro_batches = MICRO_BATCHES / data;
        let schedule = Schedule { ranks: pipeline, micro_batches, ..self.mesh.schedule };
        Setup { mesh: Mesh { schedule, tensor, data, ..self.mesh.clone() }, fault: None }
    }
}

fn llama(more: Value) -> Value {
    let mut keys = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "tie_word_embeddings": false,
    });
    let object = keys.as_object_mut().expect("an object");
    object.extend(more.as_object().expect("an object").clone());
    keys
}

/// Families that differ in what ranks divide: biases, fused and transposed tensors, norms of heads, norms after sublayers, parallel
/// sublayers, learned positions, a tied head.
fn families() -> Vec<(&'static str, Value)> {
    vec![
        ("llama", llama(json!({}))),
        ("qwen2", llama(json!({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": true}))),
        ("qwen3", llama(json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": 24}))),
        ("phi3", llama(json!({"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 4}))),
        (
            "gemma2",
            llama(json!({
                "architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "tie_word_embeddings": true, "sliding_window": 9,
                "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
                "hidden_activation": "gelu_pytorch_tanh",
            })),
        ),
        (
            "cohere",
            llama(json!({
                "architectures": ["CohereForCausalLM"], "use_qk_norm": true, "logit_scale": 0.25, "tie_word_embeddings": true,
                "layer_norm_eps": 1e-5,
            })),
        ),
        (
            "gpt2",
            json!({
                "architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4,
                "n_positions": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            }),
        ),
    ]
}

/// One micro-batch of a step, with ignored targets in it.
fn micro_batch(name: &str, number: usize, sizes: &DecoderConfig) -> Batch {
    rows(&format!("tensor {name} {number}"), [ROWS, TOKENS], 3..9, sizes)
}

/// What a rank has of a tensor of the folder: its elements, and their values.
type Parts = Vec<(String, usize, Vec<usize>, Vec<f64>)>;

/// The parts of the folder's tensors that `param` holds, with `values` of its elements.
fn parts(param: &Param, what: &str, values: &[f64]) -> Parts {
    let (mut start, mut parts) = (0, Vec::new());
    for shard in &param.shards {
        let end = start + shard.elements();
        let elements = shard.folder_ranges(0..shard.elements()).into_iter().flatten().collect();
        let name = format!("{what} of {}", shard.tensor.name);
        parts.push((name, shard.tensor.elements(), elements, values[start..end].to_vec()));
        start = end;
    }
    parts
}

/// The steps and an evaluation of one rank.
fn run(Setup { mesh, fault }: &Setup, comm: Group) -> (Vec<f64>, Parts) {
    let ranks = mesh.join(comm);
    let axis = TensorAxis::new(ranks.clone());
    let axis: Rc<dyn TensorRanks> = match fault.filter(|_| ranks.leads()) {
        Some(fault) => Rc::new(Faulty { ranks: axis, fault }),
        None => Rc::new(axis),
    };
    let mut own = mesh.build(&ranks, &mesh.spans(ranks.pipeline().rank()), axis, &mut Seeded { std: 0.1 });
    own.work.partition().quantize_weights(&mut own.model).unwrap();
    let (mut numbers, mut all) = (Vec::new(), Parts::new());
    for step in 0..STEPS {
        own.load(|number| micro_batch(&format!("step {step}"), number, &mesh.sizes));
        let MeshRank { model, optimizer, work, .. } = &mut own;
        let done = work.run(model, optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        numbers.extend([done.loss, done.grad_norm]);
        if step == 0 {
            // Linear in the gradients.
            for (param, states) in
                model.parameters().into_iter().zip(optimizer.states()).filter(|(p, _)| !p.is_sliced())
            {
                let kept = optimizer_tensors(&mut param.weights, states);
                let moment = kept.into_iter().find(|kept| kept.kind == "m").map(|kept| values(kept.tensor));
                all.extend(parts(param, "gradient", &moment.expect("AdamW has moments")));
            }
        }
    }
    let MeshRank { mut model, mut optimizer, work, .. } = own;
    work.partition().compare_replicas(&mut model, &mut optimizer, "at the end").unwrap();
    let batches = (0..3).map(|number| Ok(micro_batch("evaluation", number, &mesh.sizes)));
    let precision = StepPrecision::Recipe;
    let evaluation = evaluate(&mut model, batches, 100, precision, work.partition(), &mut |_| {}).unwrap();
    numbers.extend([evaluation.loss, evaluation.tokens as f64]);
    for param in model.parameters() {
        all.extend(parts(param, "weight", &values(&work.partition().value(param).unwrap())));
    }
    ranks.finish().unwrap();
    (numbers, all)
}

/// What all ranks are left with. What several have is equal, unless a fault is planted.
fn train(setup: &Setup) -> Seen {
    let mut seen = Seen::new();
    let (own, is_sound) = (setup.clone(), setup.fault.is_none());
    for (numbers, parts) in on_ranks(setup.mesh.ranks(), move |comm| run(&own, comm)) {
        let known = seen.entry("losses and norms".into()).or_insert(numbers.clone());
        assert!(*known == numbers || !is_sound, "losses and norms differ between ranks");
        for (name, whole, elements, values) in parts {
            let known = seen.entry(name.clone()).or_insert(vec![f64::NAN; whole]);
            for (element, value) in elements.into_iter().zip(values) {
                let known = &mut known[element];
                assert!(
                    known.is_nan() || *known == value || !is_sound,
                    "{name}, element {element}, differs between ranks"
                );
                *known = value;
            }
        }
    }
    assert!(seen.values().flatten().all(|value| !value.is_nan()), "a part is on no rank");
    seen
}

/// Sums of partial products are in another order.
const F32: f64 = 2e-5;

/// Besides, some values are cast to a neighbouring code.
const CODES: f64 = 5e-3;

#[test]
fn every_family_trains_as_on_one_rank() {
    for (name, keys) in families() {
        let alone = Setup::new(keys, RecipeName::Fp32);
        let mut expected = train(&alone);
        for tensor in [2, 4] {
            let mut got = train(&alone.on(1, 1, tensor));
            // The gradient of a bias of keys is rounding alone, by whose size AdamW divides it.
            let is_noise = |name: &str| name.starts_with("weight") && name.ends_with("c_attn.bias");
            expected.retain(|name, _| !is_noise(name));
            got.retain(|name, _| !is_noise(name));
            let (apart, tensor_name) = distance(&expected, &got);
            assert!(apart < F32, "{name} on {tensor} ranks: {tensor_name} is {apart:.1e} apart");
        }
    }
}

/// An error of 1 % in one tensor is found.
#[test]
fn an_error_of_one_percent_is_found() {
    let expected = train(&Setup::new(llama(json!({})), RecipeName::Fp32));
    for name in expected.keys() {
        let mut wrong = expected.clone();
        wrong.get_mut(name).expect("a name").iter_mut().for_each(|value| *value *= 1.01);
        assert!(distance(&expected, &wrong).0 > F32, "{name}");
    }
}

#[test]
fn faults_of_the_exchange_are_found() {
    let mut alone = Setup::new(llama(json!({})), RecipeName::Fp8Current);
    alone.mesh.recipe.compute = DType::F32;
    let expected = train(&alone);
    for fault in [Fault::DoubleAddend, Fault::MissingGather, Fault::SwappedRows, Fault::OwnScale] {
        let (apart, _) = distance(&expected, &train(&Setup { fault: Some(fault), ..alone.on(1, 1, 2) }));
        assert!(apart > CODES, "{fault:?}: {apart:.1e}");
    }
}

#[test]
fn recomputation_and_adapters_train_as_on_one_rank() {
    let lora = Some(Lora { r: 4, alpha: 4.0, use_rslora: false, targets: Targets::AllLinear });
    for recompute in Recompute::ALL {
        for lora in [None, lora.clone()] {
            let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
            (alone.mesh.memory.recompute, alone.mesh.sizes.lora) = (recompute, lora);
            let (apart, name) = distance(&train(&alone), &train(&alone.on(1, 1, 2)));
            let what = format!("{}, adapters {}", recompute.as_str(), alone.mesh.sizes.lora.is_some());
            assert!(apart < F32, "{what}: {name} is {apart:.1e} apart");
        }
    }
}

#[test]
fn ranks_of_both_axes_train_as_on_one_rank() {
    for zero in Zero::ALL {
        let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
        alone.mesh.zero = zero;
        let mut expected = train(&alone);
        let got = train(&alone.on(2, 1, 2));
        // Ranks with slices have no whole moments.
        expected.retain(|name, _| got.contains_key(name));
        let (apart, name) = distance(&expected, &got);
        assert!(apart < F32, "{zero:?}: {name} is {apart:.1e} apart");
    }
}

#[test]
fn ranks_of_three_axes_train_as_on_one_rank() {
    for zero in [Zero::Nothing, Zero::OptimizerStates] {
        for name in [RecipeName::Fp32, RecipeName::Fp8Delayed, RecipeName::Fp8Current] {
            let mut alone = Setup::new(llama(json!({})), name);
            (alone.mesh.zero, alone.mesh.recipe.compute) = (zero, DType::F32);
            let mut expected = train(&alone);
            let got = train(&alone.on(2, 2, 2));
            expected.retain(|name, _| got.contains_key(name));
            let (apart, tensor_name) = distance(&expected, &got);
            // Data ranks scale gradients by their own amaxes.
            let bound = if name == RecipeName::Fp8Current { 0.3 } else { CODES };
            assert!(apart < bound, "{}, {zero:?}: {tensor_name} is {apart:.1e} apart", name.as_str());
        }
    }
}

/// Activations in F32, so that few values are cast to another code because sums are in another order. Blocks of 128 are those of one rank. Rows
/// whose columns ranks divide have finer scales: the distance is at most what FP8 changes.
#[test]
fn every_recipe_trains_as_on_one_rank() {
    let wide = json!({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1});
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let keys = || llama(if name == RecipeName::Fp8Block { wide.clone() } else { json!({}) });
        let mut alone = Setup::new(keys(), name);
        alone.mesh.recipe.compute = DType::F32;
        let expected = train(&alone);
        let bound = match name {
            RecipeName::Fp8Row => distance(&train(&Setup::new(keys(), RecipeName::Fp32)), &expected).0,
            // More values than with one scale per tensor, since their scales move with the values of a block.
            RecipeName::Fp8Block => 6.0 * CODES,
            _ => CODES,
        };
        for tensor in if name == RecipeName::Fp8Block { vec![2] } else { vec![2, 4] } {
            let (apart, tensor_name) = distance(&expected, &train(&alone.on(1, 1, tensor)));
            let what = format!("{} on {tensor} ranks: {tensor_name} is {apart:.1e} apart", name.as_str());
            assert!(apart < bound, "{what}, not below {bound:.1e}");
            eprintln!("{what}");
        }
    }
}

/// In BF16, partial sums are rounded, and values are cast to other codes: the losses stay near.
#[test]
fn every_recipe_has_the_losses_of_one_rank() {
    for name in RecipeName::ALL.into_iter().filter(|name| *name != RecipeName::Fp16) {
        let alone = Setup::new(llama(json!({})), name);
        let losses = |tensor| train(&alone.on(1, 1, tensor))["losses and norms"].clone();
        let (expected, got) = (losses(1), losses(2));
        let apart = expected.iter().zip(got).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart < 0.015, "{}: {apart:.1e}", name.as_str());
    }
}
