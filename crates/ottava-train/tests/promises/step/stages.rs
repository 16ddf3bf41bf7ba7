//! A step is a list of actions, and a model is a list of stages. The order of micro-batches and the number of stages change no bit.

use crate::setup::{Seeded, batch, gradients, loss_scale, on_device, recipe, recipes, sequences, tiny_llama};
use ottava_models::{Decoder, Span};
use ottava_parallel::{Part, Partition};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::scaling::{CastRecord, OneRank};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use ottava_train::step::{Action, MicroBatch, NextTokenLoss, Program, ProgramInputs};
use std::rc::Rc;

const ROWS: usize = 2;
const TOKENS: usize = 13;
const STEPS: usize = 2;

/// Returns the small Llama in stages of these `spans`.
fn stages(recipe: &Recipe, kept: MemoryPolicy, spans: &[Span]) -> Decoder {
    let (sizes, purpose) = (tiny_llama(), Purpose::Train(kept));
    let mut model = Decoder::staged(&sizes, recipe, &Device::Cpu, purpose, 32, spans, Rc::new(Undivided)).unwrap();
    model.load(&mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Returns the two micro-batches of a step.
fn micro_batches(step: usize) -> [MicroBatch; 2] {
    [0, 1].map(|number| {
        let [inputs, targets] = batch(&format!("stages {step} {number}"), ROWS, TOKENS, tiny_llama().vocabulary);
        MicroBatch {
            inputs,
            targets,
            sequences: sequences(&Device::Cpu, ROWS, ROWS * TOKENS),
            loss: Box::new(NextTokenLoss),
        }
    })
}

/// Runs `program` on two micro-batches, and returns the losses of each micro-batch.
fn run(program: &Program, model: &mut Decoder, micro_batches: &[MicroBatch], recipe: &Recipe) -> Vec<Tensor> {
    let (loss_scale, partition) = (&loss_scale(on_device(recipe, &Device::Cpu, 0.01)), &Partition::solo());
    let (precision, loss_scale) = (StepPrecision::Recipe, Some(loss_scale));
    program.run(model, &ProgramInputs { micro_batches, loss_scale, precision, partition }, None).unwrap()
}

fn forward(stages: usize, micro_batch: usize) -> Vec<Action> {
    (0..stages).map(|stage| Action::Forward { stage, micro_batch }).collect()
}

fn backward(stages: usize, micro_batch: usize) -> Vec<Action> {
    (0..stages).rev().map(|stage| Action::Backward { stage, micro_batch, part: Part::Both, reduces: false }).collect()
}

fn loss(micro_batch: usize) -> Vec<Action> {
    vec![Action::Loss { micro_batch }]
}

/// Returns forward and backward of two micro-batches, one after the other.
fn one_by_one(stages: usize) -> Program {
    let of = |micro_batch| [forward(stages, micro_batch), loss(micro_batch), backward(stages, micro_batch)].concat();
    Program { pass: Pass::Training, actions: [of(0), of(1)].concat() }
}

/// Returns the same actions with the wgrads of both micro-batches at the end.
fn deferred(stages: usize) -> Program {
    let dgrads = one_by_one(stages).actions.into_iter().map(|action| match action {
        Action::Backward { stage, micro_batch, reduces, .. } => {
            Action::Backward { stage, micro_batch, part: Part::Dgrad, reduces }
        }
        other => other,
    });
    let wgrads = (0..2).flat_map(|micro_batch| {
        let wgrad = move |stage| Action::Backward { stage, micro_batch, part: Part::Wgrad, reduces: false };
        (0..stages).rev().map(wgrad)
    });
    Program { pass: Pass::Training, actions: dgrads.chain(wgrads).collect() }
}

/// Returns actions in which forward of both micro-batches runs before backward.
fn in_flight(stages: usize) -> Program {
    let forwards = [forward(stages, 0), forward(stages, 1), loss(0), loss(1)];
    let backwards = [backward(stages, 0), backward(stages, 1)];
    Program { pass: Pass::Training, actions: [forwards.concat(), backwards.concat()].concat() }
}

/// Returns losses, gradients and scales of two steps of two micro-batches through `spans`.
fn train(recipe: &Recipe, kept: MemoryPolicy, spans: &[Span], program: &Program) -> Vec<(String, Vec<f64>)> {
    let (mut model, mut seen) = (stages(recipe, kept, spans), Vec::new());
    for step in 0..STEPS {
        let losses = run(program, &mut model, &micro_batches(step), recipe);
        seen.extend(
            losses.iter().enumerate().map(|(number, losses)| (format!("losses {step} {number}"), values(losses))),
        );
        seen.extend(gradients(&mut model).into_iter().map(|(name, g)| (format!("gradient of {name}, step {step}"), g)));
        model.parameters().into_iter().for_each(|param| param.gradient.clear());
        model.scaling().update().unwrap();
        model.quantize_weights().unwrap();
        let measured = model.scaling().measured(&OneRank).unwrap();
        let seen_of = |cast: CastRecord| (cast.name, vec![f64::from(cast.amax), cast.counts.elements as f64]);
        seen.extend(measured.into_iter().map(seen_of));
    }
    seen
}

#[test]
fn stages_and_micro_batches_in_flight_change_no_bit() {
    let layers = tiny_llama().layers.len();
    let whole = [Span::whole(layers)];
    let halves =
        [Span { blocks: 0..1, embedding: true, head: false }, Span { blocks: 1..layers, embedding: false, head: true }];
    for (name, recipe) in recipes() {
        for recompute in [Recompute::None, Recompute::Full] {
            let kept = MemoryPolicy { recompute, ..MemoryPolicy::FULL };
            assert_eq!(Program::gradients(2), one_by_one(1));
            let expected = train(&recipe, kept, &whole, &Program::gradients(2));
            for (what, spans, program) in [
                ("two stages", &halves[..], one_by_one(2)),
                ("two micro-batches in flight", &whole, in_flight(1)),
                ("both", &halves, in_flight(2)),
                ("wgrads at the end", &whole, deferred(1)),
                ("two stages, wgrads at the end", &halves, deferred(2)),
            ] {
                let seen = train(&recipe, kept, spans, &program);
                assert_eq!(seen.len(), expected.len());
                for ((name_of, expected), (same_name, got)) in expected.iter().zip(&seen) {
                    assert!(
                        name_of == same_name && expected == got,
                        "{name}, {}, {what}: {name_of}",
                        recompute.as_str()
                    );
                }
            }
        }
    }
}

#[test]
fn a_program_without_an_update_keeps_weights_and_leaves_gradients() {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    let mut model = stages(&recipe, MemoryPolicy::FULL, &[Span::whole(tiny_llama().layers.len())]);
    let weights = |model: &mut Decoder| -> Vec<_> {
        model.parameters().into_iter().map(|param| values(&param.weights.value().unwrap())).collect()
    };
    let before = weights(&mut model);
    let losses = run(&Program::gradients(2), &mut model, &micro_batches(0), &recipe);
    assert_eq!(losses.len(), 2, "no action stores them");
    assert!(weights(&mut model) == before, "weights have changed");
    assert!(gradients(&mut model).iter().all(|(_, gradient)| gradient.iter().any(|&g| g != 0.0)));
}

/// No action has run before a program is rejected.
#[test]
fn a_program_that_cannot_run_is_refused_before_it_runs() {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let mut model = stages(&recipe, MemoryPolicy::FULL, &[Span::whole(tiny_llama().layers.len())]);
    let (micro_batches, partition) = (&micro_batches(0), &Partition::solo());
    let scale = loss_scale(on_device(&recipe, &Device::Cpu, 0.01));
    let mut refused = |program: &Program, loss_scale| {
        let precision = StepPrecision::Recipe;
        let inputs = ProgramInputs { micro_batches, loss_scale, precision, partition };
        let error = program.run(&mut model, &inputs, None).unwrap_err();
        assert!(model.parameters().iter().all(|param| !param.gradient.has_memory()));
        error.to_string()
    };
    let mut incomplete = one_by_one(1);
    incomplete.actions.pop();
    let text = refused(&incomplete, Some(&scale));
    assert_eq!(text, "the program ends too early: micro-batch 1 is still in flight");
    for (program, scale, action) in [
        (Program::step(2, ottava_train::step::Reductions::Never), Some(&scale), "store the losses of micro-batch 0"),
        (Program::gradients(2), None, "loss of micro-batch 0"),
    ] {
        let text = refused(&program, scale);
        assert!(text.contains(action) && text.contains("not given"), "{text}");
    }
}
