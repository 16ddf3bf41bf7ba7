//! Compares the backward of every layer, and of whole decoders, with central differences of forward in F64 on the CPU.
//!
//! Upstream gradients are random, since gradients of a sum hide faults. Sizes are unequal, since squares hide transposes.

use crate::setup::{
    Alone, Seeded, build, config, double, fp8_recipes_on, gradients, largest_error, linear, load, losses,
    losses_and_gradients, on_one_thread, quantize, sequences, training,
};
use ottava_common::Result;
use ottava_models::layers::{
    Attention, Block, Branch, Embedding, Factor, Head, HeadOutput, HeadsSpec, LLAMA, Mlp, MlpSpec, Names, Norm,
    NormConfig, NormScope, Positions, Rotary, Stream, Sublayer,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{Builder, Loan, MemoryPolicy, Param, Purpose, Split};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::scaling::{OneRank, ScalingState, Slots};
use ottava_tensor::ops::Activation::{self, SwiGlu};
use ottava_tensor::ops::{CrossEntropy, Gelu, IGNORE_INDEX, NormKind, RopePairs, cast, real_type, rope_table};
use ottava_tensor::testing::{integers, normals, values};
use ottava_tensor::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::rc::Rc;

/// The step of central differences. Their error is 2e-11 of the third derivative, plus roundings of about 1e-16 · loss / 1e-5.
const STEP: f64 = 1e-5;
/// The tolerance in units of a gradient's largest element. Errors of up to 2e-8 are seen where rows of small norm have large third derivatives. A
/// wrong or missing term is orders of magnitude larger.
const TOLERANCE: f64 = 1e-7;
/// The tolerance in units of the largest element. Gradients that sum up to ten tokens in F64 in another order differ by some units of 2⁻⁵³, 1.1e-16.
/// A backward that overwrites a gradient instead of adding to it would be off by half of the sum.
const ROUNDING: f64 = 1e-14;

/// Compares `gradient` with the differences of `loss` around `start`.
pub fn expect_gradient(what: &str, gradient: &[f64], start: &Tensor, mut loss: impl FnMut(Tensor) -> f64) {
    let start_values = start.to_vec::<f64>().expect("F64");
    let at = |values: &[f64]| Tensor::from_slice(&Device::Cpu, start.shape(), values).expect("as many");
    let mut moved = start_values.clone();
    let differences: Vec<f64> = (0..moved.len())
        .map(|i| {
            let mut loss_at = |value| {
                moved[i] = value;
                loss(at(&moved))
            };
            let rise = loss_at(start_values[i] + STEP) - loss_at(start_values[i] - STEP);
            moved[i] = start_values[i];
            rise / (2.0 * STEP)
        })
        .collect();
    let error = largest_error(gradient, &differences);
    eprintln!("{what}: {} elements, {error:.1e} apart", gradient.len());
    let apart = |&i: &usize| (gradient[i] - differences[i]).abs();
    let worst = (0..gradient.len()).max_by(|i, j| apart(i).total_cmp(&apart(j))).expect("not empty");
    let (backward, forward) = (gradient[worst], differences[worst]);
    assert!(
        error < TOLERANCE,
        "{what}: element {worst} is {backward:e}, differences make it {forward:e}; {error:.1e} apart"
    );
}

fn gradient(param: &Param) -> Vec<f64> {
    values(&param.gradient.get().expect("a layer built for training").values().unwrap())
}

/// Checks the gradients of `Σ dy · layer(x)` by `x` of this shape and by all parameters. `x` has `batch` sequences.
fn grad_check<L: Alone>(
    what: &str,
    make: impl FnOnce(&mut Builder) -> Result<L> + Send,
    shape: [usize; 2],
    batch: usize,
) {
    on_one_thread(|| {
        expect_gradients(what, build(&double(), &Device::Cpu, make), normals("x", &shape, DType::F64), batch)
    });
}

fn expect_gradients<L: Alone>(what: &str, (mut layer, mut scaling): (L, ScalingState), x: Tensor, batch: usize) {
    let sequences = sequences(&Device::Cpu, batch, x.shape()[0]);
    let mut forward = |layer: &mut L, x: &Tensor, dy: Option<&Tensor>| {
        let mut context = training(&mut scaling, &sequences, StepPrecision::Recipe);
        let (y, saved) = layer.forward(x, &mut context).expect("forward runs");
        let dx = dy.map(|dy| layer.backward(dy.clone(), saved, &mut context).expect("backward runs"));
        (y, dx)
    };
    let (y, _) = forward(&mut layer, &x, None);
    let dy = normals(what, y.shape(), DType::F64);
    let upstream = values(&dy);
    let loss = |y: &Tensor| values(y).iter().zip(&upstream).map(|(y, dy)| y * dy).sum();

    let dx = forward(&mut layer, &x, Some(&dy)).1.expect("backward ran");
    expect_gradient(&format!("{what}: dx"), &values(&dx), &x, |x| loss(&forward(&mut layer, &x, None).0));
    let once: Vec<Vec<f64>> = layer.trained().into_iter().map(|p| gradient(p)).collect();
    for (i, once) in once.iter().enumerate() {
        let param = &mut layer.trained()[i];
        let (name, start) = (format!("{what}: {}", param.identity.name()), param.weights.value().unwrap());
        expect_gradient(&name, once, &start, |value| {
            layer.trained()[i].weights.set_value(value);
            loss(&forward(&mut layer, &x, None).0)
        });
        layer.trained()[i].weights.set_value(start);
    }

    forward(&mut layer, &x, Some(&dy));
    for (param, once) in layer.trained().into_iter().zip(once) {
        let twice: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
        // Only the order of a few additions differs.
        let error = largest_error(&gradient(param), &twice);
        assert!(error < ROUNDING, "{what}: the second backward adds to `{}`, {error:e} apart", param.identity.name());
    }
}

#[test]
fn linear_backward_is_the_gradient() {
    for bias in [false, true] {
        grad_check(&format!("linear, bias {bias}"), |b| linear(b, &[("linear", 5)], 7, bias, 0.5), [3, 7], 1);
    }
}

#[test]
fn linear_backward_is_the_gradient_of_stacked_parts() {
    grad_check("stacked linear", |b| linear(b, &[("q", 4), ("k", 2), ("v", 3)], 5, true, 0.5), [7, 5], 1);
}

#[test]
fn norm_backward_is_the_gradient() {
    // If an epsilon as large as the mean square is left out, the test notices it.
    for eps in [1e-6, 0.5] {
        grad_check(&format!("norm, eps {eps}"), |b| Norm::new(b, "norm", 7, NormConfig::rms(eps)), [5, 7], 1);
    }
}

#[test]
fn layernorm_backward_is_the_gradient() {
    for (bias, eps) in [(true, 1e-6), (false, 0.5)] {
        let config = NormConfig { kind: NormKind::Layer, bias, eps };
        grad_check(&format!("layernorm, bias {bias}, eps {eps}"), |b| Norm::new(b, "norm", 7, config), [5, 7], 1);
    }
}

#[test]
fn mlp_with_gelu_backward_is_the_gradient() {
    static UNGATED: Names = Names { gate_up: &["up_proj"], transposed: true, ..LLAMA };
    for (activation, names) in [
        (Activation::Gelu(Gelu::Exact), &UNGATED),
        (Activation::Gelu(Gelu::Tanh), &UNGATED),
        (Activation::Tanh, &UNGATED),
        (Activation::GeGlu(Gelu::Exact), &LLAMA),
        (Activation::GeGlu(Gelu::Tanh), &LLAMA),
    ] {
        let (mlp, stream) = (MlpSpec { bias: true, ..MlpSpec::new(11, activation) }, Stream { names, ..stream(7) });
        let make = |b: &mut Builder| {
            let norm = Norm::new(b, "norm", 7, NormConfig::rms(1e-5))?;
            Ok(Branch::new(norm, vec![Box::new(Mlp::new(b, "mlp", mlp, &stream, None)?)]))
        };
        grad_check(&format!("mlp, {activation:?}"), make, [5, 7], 1);
    }
}

#[test]
fn mlp_backward_is_the_gradient() {
    let mlp = MlpSpec { bias: true, ..MlpSpec::new(11, SwiGlu) };
    let make = |b: &mut Builder| {
        let norm = Norm::new(b, "norm", 7, NormConfig::rms(1e-5))?;
        Ok(Branch::new(norm, vec![Box::new(Mlp::new(b, "mlp", mlp, &stream(7), None)?)]))
    };
    grad_check("mlp", make, [5, 7], 1);
}

const ATTENTION: HeadsSpec = HeadsSpec { qkv_bias: true, output_bias: true, ..HeadsSpec::new(4, 2, 6) };
const MLP: MlpSpec = MlpSpec::new(13, SwiGlu);

fn stream(channels: usize) -> Stream {
    Stream { channels, residual_scale: 1.0, norm: NormConfig::rms(1e-2), names: &LLAMA, std: 0.5 }
}

fn angles(device: &Device, positions: usize, dtype: DType) -> Positions {
    let table = rope_table(device, &[1.0, 0.3, 0.1], positions, dtype).expect("a table");
    Positions { rotary: Some(Rotary { table, pairs: RopePairs::Halves }), growth: None }
}

#[test]
fn attention_backward_is_the_gradient() {
    for sinks in [false, true] {
        let what = if sinks { "attention with sinks" } else { "attention" };
        let make = |b: &mut Builder| {
            let norm = Norm::new(b, "norm", 10, NormConfig::rms(1e-5))?;
            let (heads, angles) = (HeadsSpec { sinks, ..ATTENTION }, angles(&Device::Cpu, 7, DType::F64));
            let attention = Attention::new(b, "attention", heads, &stream(10), angles, None)?;
            Ok(Branch::new(norm, vec![Box::new(attention)]))
        };
        grad_check(what, make, [2 * 7, 10], 2);
    }
}

#[test]
fn attention_with_normalised_heads_backward_is_the_gradient() {
    use NormScope::{Head, HeadUnweighted, Projection};
    let kinds = [(NormKind::Rms, Head), (NormKind::RmsPlusOne, Head), (NormKind::Layer, Head)];
    let others = [(NormKind::Rms, Projection), (NormKind::RmsPlusOne, Projection), (NormKind::Rms, HeadUnweighted)];
    for (kind, scope) in kinds.into_iter().chain(others) {
        let heads = HeadsSpec { qk_norm: Some(scope), ..ATTENTION };
        let stream = Stream { norm: NormConfig { kind, ..NormConfig::rms(1e-2) }, ..stream(10) };
        let what = format!("attention with normalised heads, {kind:?} of a {scope:?}");
        let make = |b: &mut Builder| {
            let norm = Norm::new(b, "norm", 10, NormConfig::rms(1e-5))?;
            let angles = angles(&Device::Cpu, 7, DType::F64);
            Ok(Branch::new(norm, vec![Box::new(Attention::new(b, "attention", heads, &stream, angles, None)?)]))
        };
        grad_check(&what, make, [2 * 7, 10], 2);
    }
}

#[test]
fn block_backward_is_the_gradient() {
    let make = |b: &mut Builder, parallel| {
        let norm = Norm::new(b, "attention_norm", 10, NormConfig::rms(1e-5))?;
        let angles = angles(&Device::Cpu, 5, DType::F64);
        let attention = Attention::new(b, "attention", ATTENTION, &stream(10), angles, None)?;
        let attention = Branch::new(norm, vec![Box::new(attention)]);
        let norm = Norm::new(b, "mlp_norm", 10, NormConfig::rms(1e-5))?;
        let mlp = Branch::new(norm, vec![Box::new(Mlp::new(b, "mlp", MLP, &stream(10), None)?)]);
        Ok(Block::new("block".into(), vec![attention, mlp], parallel))
    };
    grad_check("block", |b| make(b, false), [3 * 5, 10], 3);
    grad_check("block of parallel branches", |b| make(b, true), [3 * 5, 10], 3);
}

/// Builds attention and MLP in parallel, as in Command-R: one norm, one operand, two sublayers.
fn parallel(b: &mut Builder) -> Result<Branch> {
    let norm = Norm::new(b, "norm", 10, NormConfig::rms(1e-5))?;
    let angles = angles(b.device, 5, real_type(b.recipe.compute));
    let attention = Attention::new(b, "attention", ATTENTION, &stream(10), angles, None)?;
    let mlp = Mlp::new(b, "mlp", MLP, &stream(10), Some(Sublayer::input(&attention)))?;
    Ok(Branch::new(norm, vec![Box::new(attention), Box::new(mlp)]))
}

/// Builds a branch of attention, of an MLP, or of both in parallel, with or without norms before and after its sublayers.
fn branch_with_norms(b: &mut Builder, [before, after]: [bool; 2], sublayers: [bool; 2]) -> Result<Branch> {
    let mut norm = |name: &str| Norm::new(b, name, 10, NormConfig::rms(1e-2));
    let (before, after) = (before.then(|| norm("before")).transpose()?, after.then(|| norm("after")).transpose()?);
    let angles = angles(b.device, 5, real_type(b.recipe.compute));
    let attention = Attention::new(b, "attention", ATTENTION, &stream(10), angles, None)?;
    let mlp = Mlp::new(b, "mlp", MLP, &stream(10), sublayers[0].then(|| Sublayer::input(&attention)))?;
    let mut all: Vec<Box<dyn Sublayer>> = Vec::new();
    if sublayers[0] {
        all.push(Box::new(attention));
    }
    if sublayers[1] {
        all.push(Box::new(mlp));
    }
    Ok(Branch::new(before, all).normalised(after))
}

const ON_AND_OFF: [[bool; 2]; 4] = [[true, false], [true, true], [false, true], [false, false]];

#[test]
fn branch_backward_is_the_gradient_with_and_without_norms() {
    for norms in ON_AND_OFF {
        for sublayers in &ON_AND_OFF[..3] {
            let what = format!("branch with norms before and after {norms:?}, attention and MLP {sublayers:?}");
            grad_check(&what, |b| branch_with_norms(b, norms, *sublayers), [3 * 5, 10], 3);
        }
    }
}

/// Recomputed activations have the bits of saved activations, in every recipe and with norms at any place.
#[test]
fn recomputed_branches_have_the_same_gradients_with_and_without_norms() {
    let (x, dy) = (normals("x", &[3 * 5, 10], DType::F32), normals("dy", &[3 * 5, 10], DType::F32));
    for (name, recipe) in fp8_recipes_on(&Device::Cpu) {
        for norms in ON_AND_OFF {
            let gradients = |recompute: Recompute| {
                let mut build = Builder::new(&Device::Cpu, &recipe, Purpose::Train(MemoryPolicy::FULL));
                let branch = branch_with_norms(&mut build, norms, [false, true]).unwrap();
                let mut scaling = ScalingState::new(&Device::Cpu, build.slots, Rc::new(Undivided)).unwrap();
                let mut block = Block::new("block".into(), vec![branch], false);
                load(Alone::trained(&mut block));
                quantize(Alone::trained(&mut block), &mut scaling);
                let sequences = sequences(&Device::Cpu, 3, 5);
                let mut context = training(&mut scaling, &sequences, StepPrecision::Recipe);
                context.recompute = recompute;
                let [x, dy] = [&x, &dy].map(|x| cast(x, recipe.compute).unwrap());
                let (y, saved) = Block::forward(&block, &x, &mut context).unwrap();
                let dx = Alone::backward(&mut block, dy, saved, &mut context).unwrap();
                let grads = Alone::trained(&mut block).into_iter().filter_map(|param| param.gradient.take());
                let grads: Vec<_> = grads.map(|grad| values(&grad.values().unwrap())).collect();
                (values(&y), values(&dx), grads)
            };
            let saved = gradients(Recompute::None);
            for recompute in [Recompute::NormSwiglu, Recompute::Attention, Recompute::Full] {
                assert_eq!(gradients(recompute), saved, "{name}, norms {norms:?}, {recompute:?}");
            }
        }
    }
}

#[test]
fn parallel_branch_backward_is_the_gradient() {
    grad_check("parallel branch", parallel, [3 * 5, 10], 3);
}

/// Two sublayers read codes of one cast. It has one slot, and its elements are counted once.
#[test]
fn a_parallel_branch_casts_its_operand_once() {
    for (name, recipe) in fp8_recipes_on(&Device::Cpu) {
        let mut build = Builder::new(&Device::Cpu, &recipe, Purpose::Train(MemoryPolicy::FULL));
        // Exceptions may name only one of the two linears.
        let Ok(mut branch) = parallel(&mut build) else { continue };
        let inputs = build.description.linears.iter().filter(|(site, _)| site.inputs == 10).count();
        let mut scaling = ScalingState::new(&Device::Cpu, build.slots, Rc::new(Undivided)).unwrap();
        load(branch.trained());
        quantize(branch.trained(), &mut scaling);
        let x = cast(&normals("x", &[10, 10], DType::F32), recipe.compute).unwrap();
        let sequences = sequences(&Device::Cpu, 2, 10);
        let mut context = training(&mut scaling, &sequences, StepPrecision::Recipe);
        let (y, saved) = branch.forward(&x, &x, &mut context).unwrap();
        Alone::backward(&mut branch, y, saved, &mut context).unwrap();
        scaling.update().unwrap();
        let measured = scaling.measured(&OneRank).unwrap();
        let of_operand: Vec<_> =
            measured.iter().filter(|c| c.name.ends_with("_proj.input") && c.counts.elements == 100).collect();
        assert_eq!((inputs, of_operand.len()), (2, usize::from(!measured.is_empty())), "{name}: {of_operand:?}");
    }
}

/// Returns an embedding in F64 with seeded weights.
fn embedding(vocabulary: usize, channels: usize, factor: f32) -> Embedding {
    let recipe = double();
    let mut build = Builder::new(&Device::Cpu, &recipe, Purpose::Train(MemoryPolicy::FULL));
    let factor = Factor::new(&Device::Cpu, channels, factor).expect("it is built");
    let mut embedding =
        Embedding::new(&mut build, "embedding", [vocabulary, channels], 0.5, factor, Split::None).expect("it is built");
    load(vec![&mut embedding.table]);
    embedding
}

#[test]
fn embedding_backward_is_the_gradient() {
    for factor in [1.0, 3.5] {
        embedding_grad_check(embedding(11, 5, factor));
    }
}

fn embedding_grad_check(mut embedding: Embedding) {
    // Token 3 occurs twice, so its row gets two gradients. Most tokens do not occur, and their rows get no gradient.
    let ids = Tensor::from_slice(&Device::Cpu, &[4], &[3i32, 10, 3, 0]).unwrap();
    let dy = normals("dy", &[4, 5], DType::F64);
    let mut scaling = ScalingState::new(&Device::Cpu, Slots::default(), Rc::new(Undivided)).unwrap();
    let sequences = sequences(&Device::Cpu, 1, 4);
    let context = training(&mut scaling, &sequences, StepPrecision::Recipe);
    embedding.backward(&dy, &ids, &context).unwrap();
    let (once, start) = (gradient(&embedding.table), embedding.table.weights.value().unwrap());
    expect_gradient("embedding", &once, &start, |value| {
        embedding.table.weights.set_value(value);
        values(&embedding.forward(&ids, Loan::none(), &context).unwrap())
            .iter()
            .zip(values(&dy))
            .map(|(y, dy)| y * dy)
            .sum()
    });
    embedding.backward(&dy, &ids, &context).unwrap();
    let twice: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
    assert!(largest_error(&gradient(&embedding.table), &twice) < ROUNDING, "the second backward adds");
}

#[test]
fn head_gradient_is_the_gradient_of_the_scaled_sum_of_losses() {
    // Logits of 11 tokens have padding, and logits of 16 tokens have none.
    for (soft_cap, label_smoothing, vocabulary) in
        [(None, 0.0, 11), (Some(0.7), 0.0, 11), (None, 0.0, 16), (None, 0.1, 11), (Some(0.7), 0.3, 16)]
    {
        let loss = CrossEntropy { soft_cap, label_smoothing };
        head_grad_check(embedding(vocabulary, 5, 1.0).table, HeadOutput::Logits(loss));
    }
    head_grad_check(embedding(1, 5, 1.0).table, HeadOutput::Scores);
}

fn head_grad_check(mut weight: Param, output: HeadOutput) {
    let x = normals("x", &[4, 5], DType::F64);
    let targets = Tensor::from_slice(&Device::Cpu, &[4], &[3i32, IGNORE_INDEX, 10, 0]).unwrap();
    let scale = 0.37;
    let (losses, dx) =
        Head::losses_and_gradient(&x, &mut weight, Loan::none(), &targets, &on_device(scale), output, &Undivided)
            .unwrap();
    assert_eq!(
        values(&losses),
        values(&Head::losses(&x, &weight, Loan::none(), &targets, output, &Undivided).unwrap()),
        "with and without gradient"
    );
    assert_eq!(values(&losses)[1], 0.0, "an ignored target has no loss");
    let loss = |x: &Tensor, weight: &Param| {
        scale
            * values(&Head::losses(x, weight, Loan::none(), &targets, output, &Undivided).unwrap()).iter().sum::<f64>()
    };
    expect_gradient("head: dx", &values(&dx), &x, |x| loss(&x, &weight));
    let (once, start) = (gradient(&weight), weight.weights.value().unwrap());
    expect_gradient("head: weight", &once, &start, |value| {
        weight.weights.set_value(value);
        loss(&x, &weight)
    });
    weight.weights.set_value(start);
    Head::losses_and_gradient(&x, &mut weight, Loan::none(), &targets, &on_device(scale), output, &Undivided).unwrap();
    let twice: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
    assert!(largest_error(&gradient(&weight), &twice) < ROUNDING, "the second backward adds");
}

/// The head works on chunks of 2048 tokens. 2051 rows must give the same result as the same rows in two calls.
#[test]
fn head_gradient_does_not_depend_on_chunks() {
    const LOGITS: HeadOutput = HeadOutput::Logits(CrossEntropy { soft_cap: None, label_smoothing: 0.0 });
    let make = || embedding(5, 3, 1.0).table;
    let (mut whole, mut halves) = (make(), make());
    let x = normals("x", &[2051, 3], DType::F64);
    let targets = integers("targets", 2051, 5);
    let (losses, dx) =
        Head::losses_and_gradient(&x, &mut whole, Loan::none(), &targets, &on_device(1.0), LOGITS, &Undivided).unwrap();
    for (start, end) in [(0, 1000), (1000, 2051)] {
        let (x, targets) = (x.rows(start, end).unwrap(), targets.rows(start, end).unwrap());
        let (part, dpart) =
            Head::losses_and_gradient(&x, &mut halves, Loan::none(), &targets, &on_device(1.0), LOGITS, &Undivided)
                .unwrap();
        assert_eq!(values(&part), values(&losses.rows(start, end).unwrap()));
        assert_eq!(values(&dpart), values(&dx.rows(start, end).unwrap()));
    }
    // These are sums of 2,051 rows. As many roundings of 2⁻⁵³ in both directions add up to about 5e-15 of the largest sum.
    assert!(largest_error(&gradient(&whole), &gradient(&halves)) < 1e-13, "only the order of additions differs");
}

fn on_device(scale: f64) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[1], &[scale]).unwrap()
}

/// Returns two small blocks of a family.
pub fn family(architecture: &str, tied: bool) -> Value {
    json!({
        "architectures": [architecture], "vocab_size": 11, "hidden_size": 10, "intermediate_size": 13, "head_dim": 6,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied,
        "attention_bias": false, "rope_theta": 100.0, "rms_norm_eps": 1e-5, "sliding_window": 8, "use_sliding_window": false,
    })
}

pub fn decoder(keys: Value) -> Decoder {
    Decoder::new(
        &config(keys),
        &double(),
        &Device::Cpu,
        Purpose::Train(MemoryPolicy::FULL),
        5,
        &mut Seeded { std: 0.5 },
    )
    .expect("it is built")
}

/// Checks the gradients of losses by all parameters of a model with 11 tokens.
pub fn decoder_grad_check(what: &str, make: impl FnOnce() -> Decoder + Send) {
    on_one_thread(|| expect_gradients_of_decoder(what, make()));
}

fn expect_gradients_of_decoder(what: &str, mut decoder: Decoder) {
    let (rows, scale) = (2, 0.37);
    let (inputs, targets) = (integers("inputs", rows * 5, 11), integers("targets", rows * 5, 11));
    let seen = losses_and_gradients(&mut decoder, &inputs, &targets, rows, scale).unwrap();
    let without = losses(&mut decoder, &inputs, &targets, rows).unwrap();
    assert_eq!(values(&seen), values(&without), "with and without gradient");
    let once = gradients(&mut decoder);
    // Training leaves the numbers of blocks alone.
    for (i, (name, gradient)) in once.iter().enumerate().filter(|(_, (name, _))| !name.ends_with("layer_scalar")) {
        let start = decoder.parameters()[i].weights.value().unwrap();
        expect_gradient(&format!("{what}: {name}"), gradient, &start, |value| {
            decoder.parameters()[i].weights.set_value(value);
            scale * values(&losses(&mut decoder, &inputs, &targets, rows).unwrap()).iter().sum::<f64>()
        });
        decoder.parameters()[i].weights.set_value(start);
    }
    losses_and_gradients(&mut decoder, &inputs, &targets, rows, scale).unwrap();
    for ((name, twice), (_, once)) in gradients(&mut decoder).iter().zip(&once) {
        let expected: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
        // The tolerance is as for `ROUNDING`, in a whole decoder: up to 2e-16 is seen.
        assert!(largest_error(twice, &expected) < 1e-13, "{what}: the second backward adds to `{name}`");
    }
}

#[test]
fn llama_backward_is_the_gradient() {
    decoder_grad_check("llama", || decoder(family("LlamaForCausalLM", false)));
}

#[test]
fn mistral_backward_is_the_gradient() {
    decoder_grad_check("mistral", || decoder(family("MistralForCausalLM", false)));
}

#[test]
fn qwen2_backward_is_the_gradient() {
    decoder_grad_check("qwen2", || {
        let mut decoder = decoder(family("Qwen2ForCausalLM", true));
        assert!(decoder.parameters().iter().any(|p| p.identity.name().ends_with("q_proj.bias")), "Qwen2 has biases");
        assert!(decoder.parameters().iter().all(|p| p.identity.name() != "lm_head.weight"), "the head is tied");
        decoder
    });
}

#[test]
fn qwen3_backward_is_the_gradient() {
    decoder_grad_check("qwen3", || {
        let mut decoder = decoder(family("Qwen3ForCausalLM", true));
        assert!(
            decoder.parameters().iter().any(|p| p.identity.name().ends_with("q_norm.weight")),
            "Qwen3 normalises heads"
        );
        decoder
    });
}

#[test]
fn gpt2_backward_is_the_gradient() {
    let keys = json!({
        "model_type": "gpt2", "vocab_size": 11, "n_embd": 12, "n_inner": 13, "n_layer": 2, "n_head": 4, "n_positions": 6,
    });
    decoder_grad_check("gpt2", || {
        let mut decoder = decoder(keys);
        assert!(
            decoder.parameters().iter().any(|p| p.identity.name() == "transformer.wpe.weight"),
            "positions are learned"
        );
        decoder
    });
}

#[test]
fn cohere_backward_is_the_gradient() {
    let mut keys = family("CohereForCausalLM", true);
    keys["logit_scale"] = json!(0.3);
    decoder_grad_check("cohere", || {
        let mut decoder = decoder(keys);
        assert!(
            decoder.parameters().iter().all(|p| !p.identity.name().contains("post_attention")),
            "a block has one norm"
        );
        decoder
    });
}

/// Fused projections have adapters for each part, for some parts, or for no part. The model also has a weight that folders transpose, and blocks of
/// both kinds.
#[test]
fn backward_of_adapters_is_the_gradient() {
    let gpt2 = json!({
        "model_type": "gpt2", "vocab_size": 11, "n_embd": 12, "n_inner": 13, "n_layer": 1, "n_head": 4, "n_positions": 6,
    });
    let some = || Targets::Names(["q_proj", "v_proj", "down_proj"].map(String::from).to_vec());
    for (mut keys, targets, use_rslora) in [
        (family("Qwen2ForCausalLM", true), Targets::AllLinear, false),
        (family("LlamaForCausalLM", false), some(), true),
        (gpt2, Targets::AllLinear, false),
        (family("CohereForCausalLM", true), some(), false),
        (
            family("Phi3ForCausalLM", false),
            Targets::Names(["qkv_proj", "gate_up_proj"].map(String::from).to_vec()),
            false,
        ),
    ] {
        keys["num_hidden_layers"] = json!(1);
        let what = format!("{} with adapters for {targets:?}", keys["architectures"]);
        let lora = Some(Lora { r: 2, alpha: 3.0, use_rslora, use_dora: false, targets, ..Lora::default() });
        let sizes = DecoderConfig { lora, ..config(keys) };
        decoder_grad_check(&what, || {
            let (purpose, mut weights) = (Purpose::Train(MemoryPolicy::FULL), Seeded { std: 0.5 });
            let mut decoder = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, 5, &mut weights).unwrap();
            assert!(
                decoder.parameters().iter().all(|param| param.identity.name().contains(".lora_")),
                "{what}: the rest is frozen"
            );
            decoder
        });
    }
}

#[test]
fn a_tied_table_gets_the_gradients_of_embedding_and_head() {
    let (mut tied, mut untied) =
        (decoder(family("LlamaForCausalLM", true)), decoder(family("LlamaForCausalLM", false)));
    let table = tied.parameters()[0].weights.value().unwrap();
    untied.parameters().pop().expect("the head").weights.set_value(table);
    let (inputs, targets) = (integers("inputs", 10, 11), integers("targets", 10, 11));
    for decoder in [&mut tied, &mut untied] {
        losses_and_gradients(decoder, &inputs, &targets, 2, 1.0).unwrap();
    }
    let (tied, untied) = (gradients(&mut tied), gradients(&mut untied));
    let ((_, embedding), (name, head)) = (&untied[0], untied.last().unwrap());
    assert_eq!(name, "lm_head.weight");
    let sum: Vec<f64> = embedding.iter().zip(head).map(|(a, b)| a + b).collect();
    let error = largest_error(&tied[0].1, &sum);
    assert!(error < ROUNDING, "the tied gradient is {error:e} apart from the sum of the two");
    assert!(largest_error(embedding, &sum) > 0.1 && largest_error(head, &sum) > 0.1, "both take part");
}
