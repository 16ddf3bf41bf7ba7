//! A model is a list of parts: in stages, and with several micro-batches in flight, it has the bits of the whole.

use crate::setup::{Seeded, batch, gradients, on_device, recipes, sequences, tiny_llama};
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::{Decoder, Span};
use ottava_lm::param::{MemoryPolicy, Purpose, Resident};
use ottava_lm::recipe::Recipe;
use ottava_lm::recompute::Recompute;
use ottava_lm::scaling::OneRank;
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};

const ROWS: usize = 2;
const TOKENS: usize = 13;
const STEPS: usize = 2;

/// Losses, gradients and scales of two steps of two micro-batches through `spans`, in the order of a pipeline: with `in_flight`, both
/// micro-batches go forward before either goes backward.
fn run(recipe: &Recipe, kept: MemoryPolicy, spans: &[Span], in_flight: bool) -> Vec<(String, Vec<f64>)> {
    let (sizes, device) = (tiny_llama(), Device::Cpu);
    let part = |span: &Span| {
        let purpose = Purpose::Train(kept);
        let mut part = Decoder::part(&sizes, recipe, &device, purpose, 32, &mut Seeded { std: 0.1 }, span).unwrap();
        part.quantize_weights().unwrap();
        part
    };
    let mut stages: Vec<Decoder> = spans.iter().map(part).collect();
    let rows = sequences(&device, ROWS, ROWS * TOKENS);
    let scale = on_device(recipe, &device, 0.01);
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let data = [0, 1].map(|pass| batch(&format!("stages {step} {pass}"), ROWS, TOKENS, sizes.vocabulary));
        let forward = |stages: &mut [Decoder], ids: &Tensor| {
            let (mut x, mut saved) = (ids.clone(), Vec::new());
            for stage in stages {
                let kept;
                (x, kept) = stage.forward(&x, &rows, StepPrecision::Recipe, &mut Resident).unwrap();
                saved.push(kept);
            }
            (x, saved)
        };
        let mut backward = |stages: &mut [Decoder], (x, saved): (Tensor, Vec<_>), targets: &Tensor| {
            let head = stages.last_mut().unwrap();
            let (losses, mut dy) = head.losses_and_gradient(&x, targets, &scale, &mut Resident).unwrap();
            seen.push((format!("losses of step {step}"), values(&losses)));
            for (stage, saved) in stages.iter_mut().zip(saved).rev() {
                match stage.backward(dy.clone(), saved, &rows, StepPrecision::Recipe, &mut Resident).unwrap() {
                    Some(dx) => dy = dx,
                    None => break,
                }
            }
        };
        if in_flight {
            let passes = data.each_ref().map(|[inputs, _]| forward(&mut stages, inputs));
            passes.into_iter().zip(&data).for_each(|(pass, [_, targets])| backward(&mut stages, pass, targets));
        } else {
            for [inputs, targets] in &data {
                let pass = forward(&mut stages, inputs);
                backward(&mut stages, pass, targets);
            }
        }
        for stage in &mut stages {
            seen.extend(gradients(stage).into_iter().map(|(name, g)| (format!("gradient of {name}, step {step}"), g)));
            stage.parameters().into_iter().for_each(|param| param.clear_grad());
            stage.scaling().update().unwrap();
            stage.quantize_weights().unwrap();
            let measured = stage.scaling().measured(&OneRank).unwrap();
            seen.extend(
                measured.into_iter().map(|cast| (cast.name, vec![f64::from(cast.amax), cast.counts.elements as f64])),
            );
        }
    }
    // Stages come one after the other; by name they are one model.
    seen.sort_by(|a, b| a.0.cmp(&b.0));
    seen
}

#[test]
fn stages_and_micro_batches_in_flight_change_no_bit() {
    let layers = tiny_llama().layers;
    let halves =
        [Span { blocks: 0..1, embedding: true, head: false }, Span { blocks: 1..layers, embedding: false, head: true }];
    for (name, recipe) in recipes() {
        for recompute in [Recompute::None, Recompute::Full] {
            let kept = MemoryPolicy { recompute, ..MemoryPolicy::FULL };
            let whole = run(&recipe, kept, &[Span::whole(layers)], false);
            for (what, spans, in_flight) in [
                ("two stages", &halves[..], false),
                ("two micro-batches in flight", &[Span::whole(layers)], true),
                ("both", &halves, true),
            ] {
                let seen = run(&recipe, kept, spans, in_flight);
                assert_eq!(seen.len(), whole.len());
                for ((name_of, expected), (same_name, got)) in whole.iter().zip(&seen) {
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
