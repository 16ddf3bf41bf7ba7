//! Code that the tests of ranks that divide layers share: runs, faults in the exchange of activations, and the final state of all ranks.

use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance, rows};
use crate::setup::{Seeded, config, on_ranks, recipe};
use ottava_common::Result;
use ottava_data::Batch;
use ottava_parallel::optim::optimizer_tensors;
use ottava_parallel::{LayerAxes, Ranks, Schedule, SentActivations, Zero};
use ottava_recipe::layer_ranks::{AmaxRanks, Arriving, LayerRanks, ShardPlace};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Param, WeightSource};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::comm::{Axis, Group};
use ottava_tensor::ops::add;
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use ottava_train::evaluate::evaluate;
use serde_json::{Value, json};
use std::ops::Range;
use std::rc::Rc;

pub const ROWS: usize = 2;
pub const TOKENS: usize = 32;
const STEPS: usize = 2;
const MICRO_BATCHES: usize = 2;

/// The lengths of the documents of a row.
const DOCUMENTS: [usize; 4] = [5, 14, 1, 12];
/// A run on ranks. The first rank may have a fault.
#[derive(Clone)]
pub struct Setup {
    pub mesh: Mesh,
    pub fault: Option<Fault>,
    /// Whether attention is masked at the edges of documents.
    pub documents: bool,
    /// Whether all logits of routers are equal, so that all tokens choose the first experts.
    pub equal_logits: bool,
}

/// A fault in the exchange of activations of the first rank.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The rank adds the residual connection twice.
    DoubleAddend,
    /// The rank reads its own rows in place of other ranks' rows.
    MissingGather,
    /// The rank reads the rows of the ranks in another order.
    SwappedRows,
    /// The rank computes scales from its own amaxes.
    OwnScale,
    /// The rank attends to its own tokens in place of other ranks' tokens.
    MissingExchange,
    /// The rank takes the tokens of each rank for another rank's tokens.
    SwappedTokens,
    /// The rank leaves out the sums of other ranks for its rows.
    MissingSum,
    /// The rank's sums are 1 % too large.
    LargeSum,
    /// The rank's experts read its own tokens in place of other ranks' tokens.
    ForeignTokens,
    /// The rank leaves out the results of other ranks' experts for its tokens.
    MissingExperts,
    /// The rank's norms of the rows of weights, for magnitudes, leave out the columns of other ranks.
    OwnNorms,
}

/// The ranks of a tensor axis with a fault.
struct Faulty {
    ranks: LayerAxes,
    fault: Fault,
}

impl LayerRanks for Faulty {
    fn place(&self, axis: Axis) -> ShardPlace {
        self.ranks.place(axis)
    }

    fn exchange(&self, axis: Axis, name: &str, parts: &Tensor) -> Result<Tensor> {
        let received = self.ranks.exchange(axis, name, parts)?;
        match self.fault {
            Fault::MissingExchange => Ok(parts.clone()),
            Fault::SwappedTokens => {
                let mut wrong = received.duplicate()?;
                wrong.copy_from(0, &received.rows(1, 2)?)?;
                wrong.copy_from(1, &received.rows(0, 1)?)?;
                Ok(wrong)
            }
            _ => Ok(received),
        }
    }

    fn start_gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Arriving> {
        let is_faulty = match self.fault {
            Fault::MissingGather | Fault::SwappedRows => true,
            Fault::ForeignTokens => axis == Axis::Expert,
            _ => false,
        };
        if !is_faulty {
            return self.ranks.start_gather(axis, name, rows);
        }
        let all = self.ranks.gather(axis, name, rows)?;
        if all.shape() == rows.shape() {
            return Ok(Arriving::Here(all));
        }
        let first = match self.fault {
            Fault::MissingGather | Fault::ForeignTokens => [rows, rows],
            _ => [&all.rows(rows.shape()[0], all.shape()[0])?, rows],
        };
        let mut wrong = all.duplicate()?;
        wrong.copy_from(0, first[0])?;
        wrong.copy_from(rows.shape()[0], first[1])?;
        Ok(Arriving::Here(wrong))
    }

    fn sum_computed_rows(
        &self,
        axis: Axis,
        name: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (place, mut own) = (self.place(axis).range(rows), None);
        let mut keep_own = |range: Range<usize>| {
            let part = partial(range.clone())?;
            own = (range == place).then(|| part.clone()).or(own.take());
            Ok(part)
        };
        let sum = self.ranks.sum_computed_rows(axis, name, rows, &mut keep_own, addend)?;
        match (self.fault, addend) {
            (Fault::DoubleAddend, Some(addend)) => Ok(add(&sum, addend)?),
            (Fault::MissingExperts, _) if axis != Axis::Expert => Ok(sum),
            (Fault::MissingSum | Fault::MissingExperts, _) => {
                let own = own.expect("its own rows are computed");
                addend.map_or(Ok(own.clone()), |addend| Ok(add(&own, addend)?))
            }
            (Fault::LargeSum, _) => {
                let large: Vec<_> = values(&sum).iter().map(|value| (value * 1.01) as f32).collect();
                Ok(Tensor::from_slice(&Device::Cpu, sum.shape(), &large)?)
            }
            _ => Ok(sum),
        }
    }

    fn sum(&self, axis: Axis, name: &str, x: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let sum = self.ranks.sum(axis, name, x, addend)?;
        Ok(if matches!(self.fault, Fault::OwnNorms) && name.ends_with("proj.weight") { x.clone() } else { sum })
    }
}

impl AmaxRanks for Faulty {
    fn largest(&self, axis: Axis, name: &str, amax: Tensor) -> Result<Tensor> {
        let own = amax.duplicate()?;
        let largest = self.ranks.largest(axis, name, amax)?;
        Ok(if matches!(self.fault, Fault::OwnScale) { own } else { largest })
    }
}

impl Setup {
    pub fn new(keys: Value, name: RecipeName) -> Setup {
        let (sizes, recipe, memory) = (config(keys), recipe(name, Fp8Format::Auto), MemoryPolicy::FULL);
        let (schedule, zero) = (Schedule::of_one_rank(MICRO_BATCHES), Zero::Nothing);
        let mesh = Mesh {
            sizes,
            recipe,
            memory,
            schedule,
            context: 1,
            expert: 1,
            tensor: 1,
            data: 1,
            zero,
            shard: 0,
            gathers_values: false,
            sent: SentActivations::Auto,
            rows: [ROWS, TOKENS],
            muon: false,
        };
        Setup { mesh, fault: None, documents: false, equal_logits: false }
    }

    /// Returns the same run on `data` x `pipeline` x `context` x `tensor` ranks.
    pub fn on(&self, [data, pipeline, context, tensor]: [usize; 4]) -> Setup {
        let schedule = Schedule { ranks: pipeline, micro_batches: MICRO_BATCHES / data, ..self.mesh.schedule };
        Setup { mesh: Mesh { schedule, context, tensor, data, ..self.mesh.clone() }, fault: None, ..self.clone() }
    }
}

pub fn llama(more: Value) -> Value {
    let mut keys = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "tie_word_embeddings": false,
    });
    let object = keys.as_object_mut().expect("an object");
    object.extend(more.as_object().expect("an object").clone());
    keys
}

/// Returns families that differ in the tensors that ranks divide: biases, fused and transposed tensors, norms of heads, norms after sublayers,
/// parallel sublayers, learned positions, a tied head.
pub fn families() -> Vec<(&'static str, Value)> {
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
        ("olmo2", llama(json!({"architectures": ["Olmo2ForCausalLM"], "rms_norm_eps": 1e-4}))),
        ("apertus", llama(json!({"architectures": ["ApertusForCausalLM"]}))),
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

/// Returns a micro-batch of a step, with some ignored targets.
fn micro_batch(setup: &Setup, name: &str, number: usize) -> Batch {
    let batch = rows(&format!("tensor {name} {number}"), setup.mesh.rows, 3..9, &setup.mesh.sizes);
    Batch { documents: setup.documents.then(|| [DOCUMENTS; ROWS].concat()), ..batch }
}

/// The elements that a rank holds of a tensor of the folder, with their values.
type Parts = Vec<(String, usize, Vec<usize>, Vec<f64>)>;

/// Returns the parts of the folder's tensors that `param` holds, with `values` of its elements.
fn parts(param: &Param, what: &str, values: &[f64]) -> Parts {
    let (mut start, mut parts) = (0, Vec::new());
    for shard in &param.identity.shards {
        let end = start + shard.elements();
        let elements = shard.folder_ranges(0..shard.elements()).into_iter().flatten().collect();
        let name = format!("{what} of {}", shard.tensor.name);
        parts.push((name, shard.tensor.elements(), elements, values[start..end].to_vec()));
        start = end;
    }
    parts
}

/// Returns the exchange of activations of one of `ranks`, with the fault on the first rank.
pub fn exchange_of(ranks: &Rc<Ranks>, fault: Option<Fault>) -> Rc<dyn LayerRanks> {
    let axis = LayerAxes::new(ranks.clone());
    match fault.filter(|_| ranks.leads()) {
        Some(fault) => Rc::new(Faulty { ranks: axis, fault }),
        None => Rc::new(axis),
    }
}

/// Seeded weights. The weights of routers may be zeros.
struct Weights {
    equal_logits: bool,
}

impl WeightSource for Weights {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor> {
        let is_zero = self.equal_logits && tensor.name.ends_with(".gate.weight");
        Seeded { std: if is_zero { 0.0 } else { 0.1 } }.read(tensor, elements, init)
    }
}

/// Runs the steps and an evaluation of one rank.
fn run(setup: &Setup, comm: Group) -> (Vec<f64>, Parts) {
    let Setup { mesh, fault, documents, equal_logits } = setup;
    let ranks = mesh.join(comm);
    let axis = exchange_of(&ranks, *fault);
    let mut own =
        mesh.build(&ranks, &mesh.spans(ranks.pipeline().rank()), axis, &mut Weights { equal_logits: *equal_logits });
    if *documents {
        own.work = own.work.with_documents(DOCUMENTS.len()).unwrap();
    }
    own.work.partition().quantize_weights(&mut own.model).unwrap();
    let (mut numbers, mut all) = (Vec::new(), Parts::new());
    for step in 0..STEPS {
        own.load(|number| micro_batch(setup, &format!("step {step}"), number));
        let MeshRank { model, optimizer, work, .. } = &mut own;
        let done = work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        numbers.extend([done.loss, done.grad_norm]);
        if step == 0 {
            // First moments are linear in the gradients.
            for (param, states) in
                model.parameters().into_iter().zip(optimizer.states()).filter(|(p, _)| !p.is_sliced())
            {
                let kept = optimizer_tensors(&mut param.weights, states);
                let moment = kept.into_iter().find(|kept| ["m", "momentum"].contains(&kept.kind));
                let moment = moment.map(|kept| values(kept.tensor));
                all.extend(parts(param, "gradient", &moment.expect("optimizers have moments")));
            }
        }
    }
    let MeshRank { mut model, mut optimizer, work, .. } = own;
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    let batches = (0..3).map(|number| Ok(micro_batch(setup, "evaluation", number)));
    let precision = StepPrecision::Recipe;
    let evaluation = evaluate(&mut model, batches, 100, precision, work.partition(), &mut |_| {}).unwrap();
    numbers.extend([evaluation.loss, evaluation.tokens as f64]);
    for param in model.parameters() {
        all.extend(parts(param, "weight", &values(&work.partition().value(param).unwrap())));
    }
    ranks.finish().unwrap();
    (numbers, all)
}

/// Returns the largest distance between the final states of `alone` and of the same run on ranks of `mesh`, and the name of the tensor that has it.
/// Ranks with slices have no whole moments.
pub fn apart(alone: &Setup, mesh: [usize; 4]) -> (f64, String) {
    let (mut expected, got) = (train(alone), train(&alone.on(mesh)));
    expected.retain(|name, _| got.contains_key(name));
    distance(&expected, &got)
}

/// Returns adapters of all linears, with or without magnitudes.
pub fn adapters(use_dora: bool) -> Option<Lora> {
    Some(Lora { r: 4, alpha: 4.0, use_rslora: false, use_dora, targets: Targets::AllLinear, ..Lora::default() })
}

/// Checks every recomputation, without adapters and with adapters of both kinds: ranks of `mesh` must train as one rank does.
pub fn recomputation_and_adapters_train_alike(mesh: [usize; 4]) {
    for recompute in Recompute::ALL {
        for lora in [None, adapters(false), adapters(true)] {
            let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
            (alone.mesh.memory.recompute, alone.mesh.sizes.lora) = (recompute, lora);
            let (apart, name) = apart(&alone, mesh);
            let what = format!("{}, {:?}", recompute.as_str(), alone.mesh.sizes.lora);
            assert!(apart < F32, "{what}: {name} is {apart:.1e} apart");
        }
    }
}

/// Returns the final state of all ranks. Unless a fault is planted, checks that ranks with the same tensors have equal values.
pub fn train(setup: &Setup) -> Seen {
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
pub const F32: f64 = 2e-5;

/// In addition, some values are cast to a neighbouring code.
pub const CODES: f64 = 5e-3;
