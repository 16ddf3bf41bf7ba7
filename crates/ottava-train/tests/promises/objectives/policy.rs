//! The loss of policies: gradients of its terms through a model in F64, beside central differences of the loss that a step reports.

use crate::objectives::preference_losses::Moved;
use crate::setup::{double, gradients, loss_scale, tiny_llama};
use ottava_data::RowShare;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::{Partition, Schedule};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, WeightSource};
use ottava_settings::Aggregation;
use ottava_tensor::ops::{KlEstimator, PolicyBound, PolicyLoss, ValueLoss};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::rollout::{End, Estimates, Policy, PolicyMicroBatch, Sample, SampleRows, Scored};
use ottava_train::step::{MicroBatch, Program, ProgramInputs};
use std::rc::Rc;

const ROWS: usize = 2;
const TOKENS: usize = 12;
const SCALE: f64 = 1.7;

/// Two completions of unequal lengths.
fn samples() -> Vec<Scored> {
    let sample = |prompt: &[u32], tokens: &[u32], advantage: f64| Scored {
        sample: Sample::of_turn(prompt.to_vec(), tokens.to_vec(), vec![-4.0; tokens.len()], End::Text),
        old: None,
        advantages: (0..tokens.len()).map(|t| advantage + 0.3 * t as f64).collect(),
        estimates: Some(Estimates {
            values: (0..tokens.len()).map(|t| 0.5 - 0.2 * t as f64).collect(),
            returns: vec![advantage; tokens.len()],
        }),
        counts: true,
    };
    vec![sample(&[3, 90, 17], &[5, 61, 9, 33], 0.7), sample(&[8, 2], &[41, 77], -1.3)]
}

/// `SCALE` times the loss that a step reports for the samples, and its gradients.
fn loss_and_gradients(
    sizes: &DecoderConfig,
    how: Policy,
    weights: &mut dyn WeightSource,
) -> (f64, Vec<(String, Vec<f64>)>) {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(sizes, &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let samples = samples();
    let all: Vec<&Sample> = samples.iter().map(|scored| &scored.sample).collect();
    // Both samples are in one row, and the other row is padding.
    let packing = SampleRows { rows: ROWS, max_length: TOKENS, end: 0 };
    let packed = packing.pack(&all, RowShare::ALL).remove(0);
    assert_eq!(packed.places.iter().map(|place| place.start).collect::<Vec<_>>(), [0, 7]);
    let mut loss = PolicyMicroBatch::new(how, Rc::default(), ROWS, TOKENS, &Device::Cpu, DType::F64).unwrap();
    loss.load(&samples, &packed).unwrap();
    let micro_batch = MicroBatch::new(&packed.batch, &Device::Cpu, ShardPlace::ALONE).unwrap();
    let micro_batches = &[MicroBatch { loss: Box::new(loss), ..micro_batch }];
    let scale = loss_scale(Tensor::from_slice(&Device::Cpu, &[1], &[SCALE]).unwrap());
    let (loss_scale, partition) = (Some(&scale), &Partition::solo());
    let inputs = ProgramInputs { micro_batches, loss_scale, precision: StepPrecision::Recipe, partition };
    let all = Program::gradients_of(&Schedule::of_one_rank(1), 0).run(&mut model, &inputs, None).unwrap().remove(0);
    let sums = micro_batches[0].loss.add(Vec::new(), &values(&all)).unwrap();
    (SCALE * sums[0], gradients(&mut model))
}

/// The loss `-A · lp` with this factor of the entropy.
fn reinforce(entropy_coef: f64) -> Policy {
    Policy {
        loss: PolicyLoss {
            bound: PolicyBound::None,
            of_sequence: false,
            beta: 0.0,
            kl: KlEstimator::K3,
            correction: None,
        },
        entropy_coef,
        value: None,
        correction_by_pass: None,
        aggregation: Aggregation::Constant(3.0),
    }
}

/// The sizes of a model whose loss reads logits in the type of sums.
fn wide() -> DecoderConfig {
    let mut sizes = tiny_llama();
    sizes.head.wide_logits = true;
    sizes
}

/// Compares the gradients of `how` with central differences of fourth order, at an element of each of `tensors`.
fn expect_gradients(sizes: &DecoderConfig, how: Policy, tensors: &[&str]) {
    let plain = &mut Moved { tensor: String::new(), element: 0, by: 0.0 };
    let (_, all) = loss_and_gradients(sizes, how, plain);
    for tensor in tensors {
        let (_, gradient) = all.iter().find(|(name, _)| name == tensor).unwrap_or_else(|| panic!("{tensor}"));
        let element = gradient.len() / 2;
        let at = |by| loss_and_gradients(sizes, how, &mut Moved { tensor: tensor.to_string(), element, by }).0;
        let step = 1.0 / 1024.0;
        let apart = |steps: f64| at(steps * step) - at(-steps * step);
        let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
        let found = gradient[element];
        // The fifth derivative and roundings of F64.
        assert!(
            (difference - found).abs() < 1e-7 * difference.abs().max(1.0) && difference != 0.0,
            "{how:?}, {tensor}: {difference} and {found}"
        );
    }
}

const TENSORS: [&str; 3] = ["model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"];

#[test]
fn backward_is_the_gradient_of_the_loss_with_entropy() {
    expect_gradients(&wide(), reinforce(0.8), &TENSORS);
    let plain = || Moved { tensor: String::new(), element: 0, by: 0.0 };
    let at = |coefficient| loss_and_gradients(&wide(), reinforce(coefficient), &mut plain()).0;
    let [none, one, two] = [0.0, 1.0, 2.0].map(at);
    // Six tokens have a weight of a third each, and 96 tokens have an entropy of at most ln 96.
    let entropy = (none - one) / SCALE / 2.0;
    assert!(entropy > 0.1 && entropy < 96f64.ln(), "{entropy}");
    // The loss is linear in the coefficient, up to roundings of sums of about 10.
    assert!((none - one - (one - two)).abs() < 1e-12);
}

/// The value head reads the activations that logits are computed from, so the loss of values trains the decoder too. Random weights have values on both
/// sides of the bound.
#[test]
fn backward_is_the_gradient_of_the_loss_with_values() {
    let mut sizes = wide();
    (sizes.head.value, sizes.head.scale) = (true, 0.8);
    for range in [0.4, f64::INFINITY] {
        let how = Policy { value: Some(ValueLoss { coefficient: 0.3, range }), ..reinforce(0.8) };
        expect_gradients(&sizes, how, &["value_head.weight", TENSORS[0], TENSORS[1], TENSORS[2]]);
    }
}
