//! Ranks that divide the layers train as one rank does, bit for bit.

use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance, rows};
use crate::setup::{Seeded, config, on_ranks, recipe, recipes};
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{Optimizer, optimizer_tensors};
use ottava_parallel::{Schedule, ScheduleKind, SentActivations, Zero};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Param};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::comm::Group;
use ottava_tensor::testing::values;
use ottava_train::evaluate::evaluate;
use serde_json::json;
use std::rc::Rc;

const TOKENS: usize = 13;
const STEPS: usize = 2;
const MICRO_BATCHES: usize = 4;
/// A run of a pipeline.
#[derive(Clone)]
struct Setup {
    mesh: Mesh,
    /// The order of the stages. An order that differs from the order of the model is a fault.
    order: Option<Vec<usize>>,
}

impl Setup {
    fn new(recipe: &Recipe, kind: ScheduleKind, ranks: usize, stages: usize) -> Setup {
        let schedule = Schedule { kind, ranks, stages, micro_batches: MICRO_BATCHES };
        let (sizes, recipe, memory) = (llama(4, false), recipe.clone(), MemoryPolicy::FULL);
        let (zero, rows) = (Zero::Nothing, [1, TOKENS]);
        Setup {
            mesh: Mesh {
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
                rows,
                muon: false,
            },
            order: None,
        }
    }

    /// Returns the same run without a pipeline.
    fn whole(&self) -> Setup {
        let schedule = Schedule::of_one_rank(self.mesh.schedule.micro_batches);
        Setup { mesh: Mesh { schedule, ..self.mesh.clone() }, order: None }
    }
}

fn llama(layers: usize, tied: bool) -> DecoderConfig {
    config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }))
}

/// Returns a row of a step. The first row has another number of targets.
fn row(name: &str, row: usize, sizes: &DecoderConfig) -> Batch {
    rows(&format!("pipeline {name} {row}"), [1, TOKENS], if row == 0 { 0..TOKENS - 2 } else { 0..0 }, sizes)
}

/// Runs the steps and an evaluation of one rank.
fn run(Setup { mesh, order }: &Setup, comm: Group) -> Seen {
    let ranks = mesh.join(comm);
    let rank = ranks.pipeline().rank();
    let mut spans = mesh.spans(rank);
    if let Some(order) = order {
        spans[0].blocks = mesh.spans(order[rank])[0].blocks.clone();
    }
    let mut own = mesh.build(&ranks, &spans, Rc::new(Undivided), &mut Seeded { std: 0.1 });
    own.work.partition().quantize_weights(&mut own.model).unwrap();
    let mut seen = Seen::new();
    for step in 0..STEPS {
        own.load(|number| row(&format!("step {step}"), number, &mesh.sizes));
        let MeshRank { model, optimizer, work, .. } = &mut own;
        let done = work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        seen.insert(format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]);
        if step == 0 {
            // First moments are linear in the gradients.
            seen.extend(moments(model, &mut **optimizer, "after the first step"));
        }
    }
    let MeshRank { mut model, mut optimizer, work, .. } = own;
    work.partition().compare_replicas(&mut model, &mut *optimizer, "at the end").unwrap();
    let batches = (0..5).map(|number| Ok(row("evaluation", number, &mesh.sizes)));
    let precision = StepPrecision::Recipe;
    let evaluation = evaluate(&mut model, batches, 100, precision, work.partition(), &mut |_| {}).unwrap();
    seen.insert("evaluation".into(), vec![evaluation.loss, evaluation.tokens as f64]);
    let whole = |param: &Param| values(&work.partition().value(param).unwrap());
    seen.extend(model.parameters().iter().map(|param| (param.identity.name().to_string(), whole(param))));
    seen.extend(moments(&mut model, &mut *optimizer, "at the end"));
    for cast in work.partition().casts(&mut model).unwrap() {
        let counts = cast.counts;
        let numbers = [f64::from(cast.amax), f64::from(cast.scale.unwrap_or(0.0)), counts.elements as f64];
        seen.insert(format!("cast {}", cast.name), numbers.to_vec());
    }
    ranks.finish().unwrap();
    seen
}

/// Returns the states of the parameters that this rank has whole.
fn moments(model: &mut Decoder, optimizer: &mut dyn Optimizer, when: &str) -> Vec<(String, Vec<f64>)> {
    let mut seen = Vec::new();
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let (name, is_sliced) = (param.identity.name().to_string(), param.is_sliced());
        for kept in optimizer_tensors(&mut param.weights, states).into_iter().filter(|_| !is_sliced) {
            seen.push((format!("{} of {name} {when}", kept.kind), values(kept.tensor)));
        }
    }
    seen
}

/// Returns the final state of all ranks, and checks that ranks with the same tensors have equal values.
fn train(setup: &Setup) -> Seen {
    let mut seen = Seen::new();
    let own = setup.clone();
    for of_rank in on_ranks(setup.mesh.ranks(), move |comm| run(&own, comm)) {
        for (name, values) in of_rank {
            let known = seen.entry(name.clone()).or_insert(values.clone());
            assert!(*known == values, "{name} differs between ranks");
        }
    }
    seen
}

/// Returns the first value that differs.
fn difference(expected: &Seen, got: &Seen) -> Option<String> {
    let names = |seen: &Seen| seen.keys().cloned().collect::<Vec<_>>();
    if names(expected) != names(got) {
        return Some(format!("other values: {:?}, {:?}", names(expected), names(got)));
    }
    expected.iter().find(|(name, values)| got[*name] != **values).map(|(name, _)| name.clone())
}

#[test]
fn every_schedule_and_recipe_has_the_bits_of_one_rank() {
    let schedules = [
        (ScheduleKind::GPipe, 2, 1),
        (ScheduleKind::OneForwardOneBackward, 2, 1),
        (ScheduleKind::Interleaved, 2, 2),
        (ScheduleKind::ZeroBubble, 2, 1),
        (ScheduleKind::OneForwardOneBackward, 4, 1),
        (ScheduleKind::ZeroBubble, 4, 1),
    ];
    for (name, recipe) in recipes() {
        let alone = train(&Setup::new(&recipe, ScheduleKind::default(), 1, 1));
        for (kind, ranks, stages) in schedules {
            let shared = train(&Setup::new(&recipe, kind, ranks, stages));
            assert_eq!(difference(&alone, &shared), None, "{name}, {} on {ranks} ranks", kind.as_str());
        }
    }
}

#[test]
fn recomputation_and_adapters_have_the_bits_of_one_rank() {
    let lora = Some(Lora {
        r: 3,
        alpha: 4.0,
        use_rslora: false,
        use_dora: false,
        targets: Targets::AllLinear,
        ..Lora::default()
    });
    for recompute in Recompute::ALL {
        for kind in [ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble] {
            for lora in [None, lora.clone()] {
                let mut setup = Setup::new(&recipe(RecipeName::Fp8Delayed, Fp8Format::Auto), kind, 2, 1);
                (setup.mesh.memory.recompute, setup.mesh.sizes.lora) = (recompute, lora);
                let found = difference(&train(&setup.whole()), &train(&setup));
                assert_eq!(found, None, "{}, {}, {:?}", recompute.as_str(), kind.as_str(), setup.mesh.sizes.lora);
            }
        }
    }
}

#[test]
fn eight_stages_on_four_ranks_have_the_bits_of_one_rank() {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    let mut setup = Setup::new(&recipe, ScheduleKind::Interleaved, 4, 2);
    setup.mesh.sizes = llama(8, false);
    assert_eq!(difference(&train(&setup.whole()), &train(&setup)), None);
}

#[test]
fn pipelines_that_share_a_step_have_the_bits_of_data_parallel_ranks() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Block] {
        for (kind, stages) in [(ScheduleKind::ZeroBubble, 1), (ScheduleKind::Interleaved, 2)] {
            for zero in [Zero::Nothing, Zero::OptimizerStates] {
                let recipe = recipe(name, Fp8Format::Auto);
                let mut setup = Setup::new(&recipe, kind, 2, stages);
                (setup.mesh.data, setup.mesh.zero) = (2, zero);
                let found = difference(&train(&setup.whole()), &train(&setup));
                assert_eq!(found, None, "{}, {}, {zero:?}", name.as_str(), kind.as_str());
            }
        }
    }
}

/// The tolerance relative to the norm of each tensor. One rank adds the gradients of embedding and head by micro-batch, and two ranks add their sums.
/// In F32, the largest distance is 4e-7.
const TIED: f64 = 1e-5;

fn largest_distance(mut expected: Seen, mut got: Seen) -> f64 {
    [&mut expected, &mut got].into_iter().for_each(|seen| seen.retain(|name, _| !name.starts_with("cast")));
    distance(&expected, &got).0
}

#[test]
fn a_tied_head_is_trained_on_the_first_and_the_last_rank() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    for (data, zero) in [(1, Zero::Nothing), (2, Zero::Nothing), (2, Zero::OptimizerStates)] {
        for ranks in [2, 4] {
            let kind = ScheduleKind::OneForwardOneBackward;
            let mut setup = Setup::new(&recipe, kind, ranks, 1);
            (setup.mesh.sizes, setup.mesh.data, setup.mesh.zero) = (llama(4, true), data, zero);
            // `train` checks that two ranks that hold the table have equal tables.
            let distance = largest_distance(train(&setup.whole()), train(&setup));
            assert!(distance < TIED, "{ranks} x {data} ranks: {distance:e}");
        }
    }
    // The next run has an error of 1 % in the gradient of the table.
    let mut setup = Setup::new(&recipe, ScheduleKind::default(), 1, 1);
    setup.mesh.sizes = llama(4, true);
    let expected = train(&setup);
    let mut wrong = expected.clone();
    let table = "m of model.embed_tokens.weight after the first step";
    wrong.get_mut(table).expect("it is seen").iter_mut().for_each(|m| *m *= 1.01);
    assert!(largest_distance(expected, wrong) > TIED);
}

#[test]
fn swapped_stages_are_noticed() {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    let setup = Setup::new(&recipe, ScheduleKind::OneForwardOneBackward, 4, 1);
    let swapped = Setup { order: Some(vec![0, 2, 1, 3]), ..setup.clone() };
    let found = difference(&train(&setup.whole()), &train(&swapped));
    assert!(found.is_some(), "blocks 1 and 2 are exchanged");
}
