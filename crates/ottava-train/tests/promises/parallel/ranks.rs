//! Several ranks, as threads, train as one rank does.

use crate::models::families::all_families;
use crate::setup::{
    Seeded, all_combinations, batch, config, losses, on_ranks, recipe, recipes, tiny_llama, tiny_llama_with,
};
use ottava_data::Batch;
use ottava_models::layers::HeadsSpec;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, Optimizer, Per, optimizer_tensors};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Schedule, Slices, Zero};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Param, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::{Formats, Gradients, Masters, States, Storage};
use ottava_recipe::{Fp8Format, Precision, Recipe, RecipeName};
use ottava_tensor::comm::{Group, MeshShape, Traffic};
use ottava_tensor::ops::{IGNORE_INDEX, gradient_code_bytes};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device};
use ottava_train::step::TrainStep;
use serde_json::json;
use std::collections::BTreeMap;
use std::rc::Rc;

const TOKENS: usize = 13;
pub const STEPS: usize = 3;
const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };

/// The final state of a rank after its steps.
pub struct Seen {
    /// Losses, norms, weights and scales, by name.
    pub values: Vec<(String, Vec<f64>)>,
    /// The scales of master weights and moments of the parameters that it updates partly, by name.
    pub scales: BTreeMap<String, Vec<f64>>,
    /// The first moments of parameters that it holds whole, by name. First moments are linear in gradients.
    moments: Vec<(String, Vec<f64>)>,
    /// The calls and bytes that it sent.
    pub traffic: Traffic,
    /// The errors of the gradients that it sent, by step.
    reduce_errors: Vec<f64>,
}

/// The stage of ZeRO, and the format in which ranks send gradients.
pub type Division = (Zero, ReduceFormat);

/// Runs steps of `rows` rows. This rank has its share of the rows, one row in each micro-batch. Rows have different numbers of targets.
fn run(
    steps: usize,
    sizes: &DecoderConfig,
    recipe: &Recipe,
    memory: MemoryPolicy,
    (zero, reduction): Division,
    rows: usize,
    comm: Group,
) -> Seen {
    let purpose = Purpose::Train(memory);
    let mut model = Decoder::unloaded(sizes, recipe, &Device::Cpu, purpose, 32).unwrap();
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, reduction, false).unwrap();
    partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
    let mut optimizer = AdamWOptimizer::new(ADAMW, &model.parameters()).unwrap();
    let micro_batches = rows / ranks.size();
    let mut work = TrainStep::shared(&model, Schedule::of_one_rank(micro_batches), 1, TOKENS, partition).unwrap();
    work.partition().quantize_weights(&mut model).unwrap();
    let (mut values_seen, mut reduce_errors) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let [inputs, mut targets] =
            batch(&format!("ranks {step}"), rows, TOKENS, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
        targets[..TOKENS - 2].fill(IGNORE_INDEX);
        for micro_batch in 0..micro_batches {
            let row = micro_batch * ranks.size() + ranks.rank();
            let [inputs, targets] = [&inputs, &targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
            work.load(micro_batch, &Batch::whole(inputs, targets, 1)).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        values_seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
        reduce_errors.extend(done.reduce_error);
    }
    let traffic = ranks.traffic();
    let whole = |param: &Param| values(&work.partition().value(param).unwrap());
    values_seen.extend(model.parameters().iter().map(|param| (param.identity.name().to_string(), whole(param))));
    let arrays = model.scaling().arrays().unwrap().into_iter();
    values_seen.extend(arrays.filter(|(name, _)| name.ends_with("scale")).map(|(name, x)| (name, values(&x))));
    let (mut scales, mut first_moments) = (BTreeMap::new(), Vec::new());
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let (name, updates) = (param.identity.name().to_string(), !param.slice().is_empty());
        let is_whole = !param.is_sliced();
        for kept in optimizer_tensors(&mut param.weights, states) {
            if updates && kept.per == Per::Parameter {
                scales.insert(format!("{} of {name}", kept.kind), values(kept.tensor));
            }
            if is_whole && kept.kind == "m" && kept.tensor.dtype() == DType::F32 {
                first_moments.push((format!("gradient of {name}"), values(kept.tensor)));
            }
        }
    }
    if sizes.lora.is_some() {
        work.partition().gather(&mut model).unwrap();
        let [inputs, targets] = batch("after training", 1, TOKENS, sizes.vocabulary);
        values_seen.push(("losses after training".into(), values(&losses(&mut model, &inputs, &targets, 1).unwrap())));
    }
    Seen { values: values_seen, scales, moments: first_moments, traffic, reduce_errors }
}

/// Runs a group of threads, and checks that all of them have equal weights, and that equal scales are on all ranks that hold them. Returns the state
/// of the first rank.
pub fn on_threads(
    steps: usize,
    sizes: &DecoderConfig,
    recipe: &Recipe,
    memory: MemoryPolicy,
    division: Division,
    rows: usize,
    ranks: usize,
) -> Seen {
    let (sizes, recipe) = (sizes.clone(), recipe.clone());
    let mut all = on_ranks(ranks, move |comm| run(steps, &sizes, &recipe, memory, division, rows, comm));
    let mut first = all.swap_remove(0);
    for other in all {
        assert!(first.values == other.values, "ranks have the same bits");
        for (name, scale) in other.scales {
            let known = first.scales.entry(name.clone()).or_insert(scale.clone());
            assert_eq!(*known, scale, "{name}");
        }
    }
    first
}

/// Returns a division whose gradients are sent in the type in which backward adds them.
pub fn plain(zero: Zero) -> Division {
    (zero, ReduceFormat::Stored)
}

/// Returns the distance of `got` from `expected`, relative to its norm, and the distance of the factor between them from 1. Sums in another order
/// have errors in both directions, so they hardly change the factor. A wrong number of ranks, rows or tokens changes it.
fn distance(expected: &[f64], got: &[f64]) -> (f64, f64) {
    let sum = |f: &dyn Fn(f64, f64) -> f64| expected.iter().zip(got).map(|(&a, &b)| f(a, b)).sum::<f64>();
    let norm = sum(&|a, _| a * a).max(1e-30);
    ((sum(&|a, b| (a - b) * (a - b)) / norm).sqrt(), (sum(&|a, b| a * b) / norm - 1.0).abs())
}

/// Returns in words where losses, norms, weights or gradients differ from one rank's by more than rounding.
fn difference(alone: &Seen, shared: &Seen) -> Option<String> {
    let names = |seen: &[(String, Vec<f64>)]| seen.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    if (names(&alone.values), names(&alone.moments)) != (names(&shared.values), names(&shared.moments)) {
        return Some("other tensors".into());
    }
    let of = |a: &[(String, Vec<f64>)], b: &[(String, Vec<f64>)], most: f64| {
        a.iter().zip(b).find_map(|((name, a), (_, b))| {
            let (distance, slope) = distance(a, b);
            (distance > most || slope > SLOPE).then(|| format!("{name} is {distance:e} away, its slope {slope:e}"))
        })
    };
    of(&alone.values, &shared.values, VALUES).or_else(|| of(&alone.moments, &shared.moments, GRADIENTS))
}

/// The tolerances relative to norms: for loss, norm and weights, for gradients, and for slopes. They are above the effect of one step's rounding in
/// another order. An error of 1 % in any of them exceeds the last tolerance.
const VALUES: f64 = 4e-3;
const GRADIENTS: f64 = 1e-2;
const SLOPE: f64 = 2e-3;

#[test]
fn an_error_of_one_percent_is_too_much() {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    let one_step = || run(1, &tiny_llama(), &recipe, MemoryPolicy::FULL, plain(Zero::Nothing), 2, Group::solo());
    let alone = one_step();
    assert_eq!(difference(&alone, &one_step()), None);
    let mut changed = one_step();
    let grow = |values: &mut Vec<f64>, factor: f64| values.iter_mut().for_each(|x| *x *= factor);
    for i in 0..alone.moments.len() {
        grow(&mut changed.moments[i].1, 1.01);
        assert!(difference(&alone, &changed).is_some_and(|said| said.starts_with(&alone.moments[i].0)));
        changed.moments[i].1.clone_from(&alone.moments[i].1);
    }
    for i in 0..alone.values.len() {
        grow(&mut changed.values[i].1, 1.01);
        assert!(difference(&alone, &changed).is_some_and(|said| said.starts_with(&alone.values[i].0)));
        changed.values[i].1.clone_from(&alone.values[i].1);
    }
}

#[test]
fn ranks_that_share_a_step_train_as_one_does() {
    let (sizes, memory) = (tiny_llama(), MemoryPolicy::FULL);
    for (i, (name, recipe)) in recipes().into_iter().enumerate() {
        let alone = |steps| run(steps, &sizes, &recipe, memory, plain(Zero::Nothing), 8, Group::solo());
        let (first, later) = (alone(1), alone(STEPS));
        let numbers = if all_combinations() { vec![2, 4, 8] } else { vec![[2, 4, 8][i % 3]] };
        for ranks in numbers {
            let shared = |steps| on_threads(steps, &sizes, &recipe, memory, plain(Zero::Nothing), 8, ranks);
            assert_eq!(difference(&first, &shared(1)), None, "{name}, {ranks} ranks");
            // From then on, codes that rounding has changed change other codes, and factors of smoothing.
            for ((tensor, expected), (_, got)) in later.values.iter().zip(&shared(STEPS).values) {
                let (distance, _) = distance(expected, got);
                assert!(distance <= 2e-2, "{name}, {ranks} ranks: {tensor} is {distance:e} away after {STEPS} steps");
            }
        }
    }
}

#[test]
fn ranks_train_adapters_as_one_does() {
    for use_dora in [false, true] {
        let lora = Some(Lora {
            r: 3,
            alpha: 4.0,
            use_rslora: false,
            use_dora,
            targets: Targets::AllLinear,
            ..Lora::default()
        });
        let sizes = DecoderConfig { lora, ..tiny_llama() };
        for (name, storage) in [
            (RecipeName::Fp32, Storage::Float32),
            (RecipeName::Fp8Current, Storage::Float32),
            (RecipeName::Fp8Delayed, Storage::MsampO2),
            (RecipeName::Fp8Block, Storage::Bfloat16),
        ] {
            let recipe = recipe(name, Fp8Format::Auto);
            // Frozen weights have no values, as in a run without steps in high precision.
            let memory = MemoryPolicy { formats: storage.formats(), frozen_values: false, ..MemoryPolicy::FULL };
            let alone = run(1, &sizes, &recipe, memory, plain(Zero::Nothing), 4, Group::solo());
            let shared = |zero| on_threads(1, &sizes, &recipe, memory, plain(zero), 4, 2);
            let what = format!("{}, {}, magnitudes {use_dora}", name.as_str(), storage.as_str());
            let undivided = shared(Zero::Nothing);
            assert_eq!(difference(&alone, &undivided), None, "{what}");
            assert!(shared(Zero::OptimizerStates).values == undivided.values, "{what}: stage 1 has other bits");
            // Stages 2 and 3 add the gradients of micro-batches in another order.
            let [second, third] = [Zero::Gradients, Zero::Weights].map(shared);
            assert!(second.values == third.values, "{what}: stages 2 and 3 have different bits");
            for ((tensor, expected), (_, got)) in undivided.values.iter().zip(&second.values) {
                let (distance, _) = distance(expected, got);
                assert!(distance <= VALUES, "{what}: {tensor} is {distance:e} away at stage 2");
            }
        }
    }
}

/// Returns the amaxes of each cast after one step of these rows, on one process or on ranks in the order of the rows.
fn amaxes(smooth_swiglu: bool, zero: Zero, rows: &'static [usize], comm: Group) -> Vec<(String, f64)> {
    let recipe = Recipe { smooth_swiglu, ..recipe(RecipeName::Fp8Delayed, Fp8Format::Auto) };
    let sizes = tiny_llama();
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::unloaded(&sizes, &recipe, &Device::Cpu, purpose, 32).unwrap();
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
    partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
    let mut optimizer = AdamWOptimizer::new(ADAMW, &model.parameters()).unwrap();
    let mine: Vec<_> = rows.iter().skip(ranks.rank()).step_by(ranks.size()).collect();
    let mut work = TrainStep::shared(&model, Schedule::of_one_rank(mine.len()), 1, TOKENS, partition).unwrap();
    work.partition().quantize_weights(&mut model).unwrap();
    let [inputs, targets] = batch("amaxes", 8, TOKENS, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
    for (micro_batch, &row) in mine.into_iter().enumerate() {
        let [inputs, targets] = [&inputs, &targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
        work.load(micro_batch, &Batch::whole(inputs, targets, 1)).unwrap();
    }
    work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
    let measured = model.scaling().measured(work.partition()).unwrap();
    measured.into_iter().map(|cast| (cast.name, f64::from(cast.amax))).collect()
}

/// A maximum is exact, so the scales of ranks follow from the rows of all ranks, as on one process. Other rows, such as the rows of one rank, have
/// other amaxes.
#[test]
fn amaxes_are_those_of_the_rows_of_all_ranks() {
    const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];
    for smooth in [false, true] {
        let alone = amaxes(smooth, Zero::Nothing, ALL, Group::solo());
        for (ranks, zero) in [(2, Zero::Nothing), (4, Zero::OptimizerStates), (4, Zero::Weights)] {
            for (rank, seen) in on_ranks(ranks, move |comm| amaxes(smooth, zero, ALL, comm)).into_iter().enumerate() {
                assert_eq!(seen, alone, "rank {rank} of {ranks}, stage {zero:?}, smooth: {smooth}");
            }
        }
    }
    let alone = amaxes(false, Zero::Nothing, ALL, Group::solo());
    // The group has the rows of a rank that does not merge amaxes, or that merges with half of the other ranks. The loss of fewer rows is divided by
    // fewer tokens, so gradients are compared with twice and four times as much.
    for (group, factor) in [(&[0usize, 2, 4, 6][..], 0.5), (&[1, 5], 0.25)] {
        let wrong = amaxes(false, Zero::Nothing, group, Group::solo());
        let differs = |end: &str, factor: f64| {
            let casts = alone.iter().zip(&wrong).filter(|((name, _), _)| name.ends_with(end));
            casts.filter(|((_, right), (_, wrong))| wrong * factor != *right).count()
        };
        assert!(differs(".input", 1.0) > 0 && differs(".grad_output", factor) > 0, "{group:?}: {wrong:?}");
    }
}

/// Runs all stages of ZeRO and compares their bits.
fn expect_same_in_all_stages(what: &str, sizes: &DecoderConfig, recipe: &Recipe, memory: MemoryPolicy, ranks: usize) {
    let rows = ranks.max(4);
    let seen = Zero::ALL.map(|zero| on_threads(STEPS, sizes, recipe, memory, plain(zero), rows, ranks));
    // With several micro-batches, stages 2 and 3 add gradients in another order than stages 0 and 1.
    let pairs = if ranks == rows { &[(0, 1), (0, 2), (0, 3)][..] } else { &[(0, 1), (2, 3)] };
    for &(a, b) in pairs {
        let what = format!("{what}, {ranks} ranks, stages {a} and {b}");
        for ((tensor, expected), (_, got)) in seen[a].values.iter().zip(&seen[b].values) {
            assert!(expected == got, "{what}: {tensor}");
        }
        assert_eq!(seen[a].scales, seen[b].scales, "{what}");
    }
}

/// ZeRO changes which rank computes an update, but no bit. Slices are uneven: the sizes of the model's matrices are not multiples of 256 · ranks.
#[test]
fn what_ranks_divide_changes_no_bit() {
    let wide = config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }));
    let of = |storage: Storage| MemoryPolicy { formats: storage.formats(), ..MemoryPolicy::FULL };
    let remainder = Formats { masters: Masters::Remainder, ..Storage::Float32.formats() };
    let policies = [
        (tiny_llama(), of(Storage::Float32)),
        (tiny_llama(), of(Storage::Bfloat16)),
        (wide, of(Storage::Coat)),
        (tiny_llama(), MemoryPolicy { formats: remainder, recompute: Recompute::Full, ..MemoryPolicy::FULL }),
        (
            tiny_llama(),
            MemoryPolicy { weight_codes: false, saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL },
        ),
    ];
    let mut tried = 0;
    for (i, (name, recipe)) in recipes().into_iter().enumerate() {
        for (k, (sizes, memory)) in policies.iter().enumerate() {
            if memory.formats.problem(recipe.compute).is_some()
                || !(all_combinations() || [i % 5, (i + 2) % 5].contains(&k))
            {
                continue;
            }
            let numbers = if all_combinations() { vec![2, 4, 8] } else { vec![[4, 2, 4, 2, 8][(i + k) % 5]] };
            for ranks in numbers {
                expect_same_in_all_stages(&format!("{name}, policy {k}"), sizes, &recipe, *memory, ranks);
                tried += 1;
            }
        }
    }
    assert!(tried >= 15, "{tried}");
}

/// Learned positions are a unit apart from a tied embedding, and two sublayers share a norm.
#[test]
fn what_ranks_divide_changes_no_bit_of_families_that_are_no_llamas() {
    for (family, sizes) in all_families() {
        let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
        expect_same_in_all_stages(family, &sizes, &recipe, MemoryPolicy::FULL, 2);
    }
}

/// Returns the slices of the matrices of a block.
fn slices_of_block(sizes: &DecoderConfig, ranks: usize) -> Slices {
    let HeadsSpec { heads, kv_heads, head_dim, .. } = *sizes.heads().unwrap();
    let (outputs, qkv) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
    let (channels, hidden) = (sizes.stream.channels, sizes.mlp().unwrap().hidden);
    Slices::new([qkv * channels, channels * outputs, 2 * hidden * channels, channels * hidden], ranks)
}

/// The scale of a whole matrix is computed from slices, and a rank may have no slice.
#[test]
fn scales_of_whole_matrices_change_no_bit() {
    let of = |storage: Storage| Formats { gradients: Gradients::Bfloat16, ..storage.formats() };
    let stochastic = Formats { states: States::Float8, ..of(Storage::Bfloat16) };
    let cases = [
        (RecipeName::Bf16, of(Storage::MsampO1), false, 2),
        (RecipeName::Fp16, of(Storage::MsampO1), false, 4),
        (RecipeName::Fp8Current, of(Storage::MsampO2), false, 4),
        (RecipeName::Fp8Delayed, of(Storage::MsampO3), true, 4),
        (RecipeName::Fp8Current, of(Storage::MsampO3), true, 2),
        (RecipeName::Fp8Block, of(Storage::MsampO3), true, 4),
        (RecipeName::Fp8Delayed, stochastic, true, 4),
    ];
    for (name, formats, weight_codes, ranks) in cases {
        let memory = MemoryPolicy { formats, weight_codes, ..MemoryPolicy::FULL };
        let what = format!("{name:?}, {formats:?}");
        expect_same_in_all_stages(&what, &tiny_llama(), &recipe(name, Fp8Format::Auto), memory, ranks);
    }
}

/// Returns a model whose matrices have sizes that are multiples of 128.
fn llama_of_blocks() -> DecoderConfig {
    tiny_llama_with(json!({"hidden_size": 128, "intermediate_size": 256}))
}

/// Slices cut blocks that share a scale, and some ranks have no part of a matrix.
#[test]
fn block_scales_of_whole_matrices_change_no_bit() {
    let rounded = Precision { recipe: RecipeName::Fp8Block, power_of_two_scales: true, ..Precision::default() };
    let plain = recipe(RecipeName::Fp8Block, Fp8Format::Auto);
    let remainder = Formats { masters: Masters::Remainder, ..Storage::Float32.formats() };
    for (recipe, formats, ranks) in [
        (&plain, Storage::Float32.formats(), 5),
        (&plain, Storage::Bfloat16.formats(), 3),
        (&plain, Storage::MsampO2.formats(), 3),
        (&plain, remainder, 3),
        (&rounded.recipe(), Storage::Float32.formats(), 2),
    ] {
        let memory = MemoryPolicy { formats, ..MemoryPolicy::FULL };
        expect_same_in_all_stages(&format!("{formats:?}"), &llama_of_blocks(), recipe, memory, ranks);
    }
}

/// If products read only codes, ranks gather codes.
#[test]
fn gathers_of_codes_move_half_the_bytes() {
    let ranks = 4;
    let gathered = |sizes: &DecoderConfig, name| {
        let recipe = recipe(name, Fp8Format::Auto);
        [Zero::OptimizerStates, Zero::Weights].map(|zero| {
            on_threads(STEPS, sizes, &recipe, MemoryPolicy::FULL, plain(zero), 8, ranks).traffic.all_gather.bytes
        })
    };
    for (name, sizes) in [
        (RecipeName::Fp8Delayed, tiny_llama()),
        (RecipeName::Fp8Current, tiny_llama()),
        (RecipeName::Fp8Block, llama_of_blocks()),
    ] {
        let bytes_per_gather = slices_of_block(&sizes, ranks).slice_len() * (ranks - 1) * sizes.layers.len();
        let (bf16, fp8) = (gathered(&sizes, RecipeName::Bf16), gathered(&sizes, name));
        // The update also gathers the first block for the next step, whether there is a next step or not.
        let once_more = bytes_per_gather / sizes.layers.len();
        assert_eq!(bf16[0] - fp8[0], (bytes_per_gather * STEPS + once_more) as u64, "once in a step");
        let micro_batches = 8 / ranks;
        assert_eq!(
            bf16[1] - fp8[1],
            (bytes_per_gather * STEPS * micro_batches * 2) as u64,
            "in each forward and backward"
        );
    }
}

/// Gradients are sent as FP8 codes. The stages that divide the model compute the same sums, every rank has the same weights (checked in
/// [`on_threads`]), and training stays near training with gradients in the type in which backward adds them.
#[test]
fn gradients_sent_in_fp8_train_as_others_do() {
    let (sizes, ranks) = (tiny_llama(), 4);
    for (i, name) in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Current].into_iter().enumerate() {
        let recipe = recipe(name, Fp8Format::Auto);
        let memory = MemoryPolicy {
            formats: [Storage::Bfloat16, Storage::Float32, Storage::Float32][i].formats(),
            ..MemoryPolicy::FULL
        };
        let on = |zero, reduction| on_threads(STEPS, &sizes, &recipe, memory, (zero, reduction), ranks, ranks);
        let expected = on(Zero::OptimizerStates, ReduceFormat::Stored);
        assert!(expected.reduce_errors.is_empty());
        let feedback = name == RecipeName::Fp8Delayed;
        let coded = Zero::ALL.map(|zero| on(zero, ReduceFormat::Float8 { feedback }));
        if feedback {
            let without = on(Zero::OptimizerStates, ReduceFormat::Float8 { feedback: false });
            assert!(without.values != coded[1].values, "what is lost comes back");
        }
        for zero in [Zero::Gradients, Zero::Weights] {
            assert!(coded[1].values == coded[zero as usize].values, "{name:?}: stage {zero:?}");
        }
        for seen in &coded {
            assert_eq!(seen.reduce_errors.len(), STEPS);
            // Codes have four significant bits: the error is at most half a step of 1/8, and less on average.
            assert!(seen.reduce_errors.iter().all(|error| (0.01..0.04).contains(error)), "{:?}", seen.reduce_errors);
            for (step, ((_, a), (_, b))) in expected.values.iter().zip(&seen.values).take(STEPS).enumerate() {
                // AdamW's first steps turn a difference in a tiny gradient into a difference of a learning rate.
                let [loss, norm] = if step == 0 { [0.0, 2e-3] } else { [1e-2, 5e-2] };
                assert!((a[0] - b[0]).abs() <= loss * a[0], "{name:?}: loss of step {step}: {a:?} and {b:?}");
                assert!((a[1] - b[1]).abs() <= norm * a[1], "{name:?}: norm of step {step}: {a:?} and {b:?}");
            }
            assert!(seen.values[STEPS..] != expected.values[STEPS..], "gradients were not sent as they are");
        }
    }
}

/// Matrices end within a group of values with one scale, and the buffer after their end holds no gradient. `OTTAVA_POISON` fills it with NaN.
#[test]
fn padding_behind_matrices_does_not_reach_gradients_sent_in_fp8() {
    let odd = config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }));
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let alone = run(STEPS, &odd, &recipe, MemoryPolicy::FULL, plain(Zero::Nothing), 2, Group::solo());
    for zero in Zero::ALL {
        let coded = (zero, ReduceFormat::Float8 { feedback: zero == Zero::Gradients });
        let seen = on_threads(STEPS, &odd, &recipe, MemoryPolicy::FULL, coded, 2, 2);
        assert!(seen.reduce_errors.iter().all(|error| (0.01..0.04).contains(error)), "{:?}", seen.reduce_errors);
        for ((name, expected), (_, got)) in alone.values.iter().zip(&seen.values) {
            let (distance, _) = distance(expected, got);
            // Gradients are 1 % to 4 % off, as asserted above, and three updates by AdamW carry a part of this into weights. NaN from the padding
            // would fail any bound.
            assert!(distance < 0.1, "stage {zero:?}: {name} is {distance:e} away");
        }
    }
}

/// Codes and their scales are sent, and their bytes are counted.
#[test]
fn gradients_sent_in_fp8_move_half_the_bytes() {
    let (sizes, ranks, memory) =
        (tiny_llama(), 4, MemoryPolicy { formats: Storage::Bfloat16.formats(), ..MemoryPolicy::FULL });
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let sent = |zero, reduction| on_threads(STEPS, &sizes, &recipe, memory, (zero, reduction), ranks, ranks).traffic;
    let float8 = ReduceFormat::Float8 { feedback: false };
    let stored = sent(Zero::OptimizerStates, ReduceFormat::Stored);
    let [whole, coded] = [Zero::Nothing, Zero::OptimizerStates].map(|zero| sent(zero, float8));
    let block = slices_of_block(&sizes, ranks).slice_len();
    let embedding = Slices::new([sizes.vocabulary * sizes.stream.channels], ranks).slice_len();
    let of_step = |bytes: &dyn Fn(usize) -> usize| -> u64 {
        let embeddings = if sizes.head.tied { 1 } else { 2 };
        ((sizes.layers.len() * bytes(block) + embeddings * bytes(embedding)) * (ranks - 1) * STEPS) as u64
    };
    // Blocks send BF16, and embedding and head send F32.
    assert_eq!(stored.reduce_scatter.bytes, of_step(&|elements| if elements == block { 2 } else { 4 } * elements));
    assert_eq!(coded.all_to_all.bytes, of_step(&gradient_code_bytes));
    assert_eq!((coded.reduce_scatter.bytes, stored.all_to_all.bytes), (0, 0));
    assert_eq!([whole.all_to_all.bytes, whole.all_gather.bytes], [of_step(&gradient_code_bytes); 2]);
}

/// With storages that have FP8 gradients, ranks send FP8 gradients.
#[test]
fn levels_with_fp8_gradients_send_them_so() {
    let mut config = ottava_settings::RunConfig::default();
    config.optimizer.storage = Storage::MsampO1;
    let reduction = config.parallel.communication.reduction(config.optimizer.formats().gradients);
    assert_eq!(reduction, ReduceFormat::Float8 { feedback: false });
}

/// A bit that flips on one rank is found, and its tensor is named.
#[test]
fn replicas_that_differ_in_a_bit_are_named_on_all_ranks() {
    let sizes = tiny_llama();
    for (zero, flipped) in [(Zero::Nothing, "mlp.down_proj"), (Zero::Weights, "post_attention_layernorm")] {
        let sizes = sizes.clone();
        let messages = on_ranks(3, move |comm| {
            let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
            let purpose = Purpose::Train(MemoryPolicy::FULL);
            let mut model = Decoder::unloaded(&sizes, &recipe, &Device::Cpu, purpose, TOKENS).unwrap();
            let shape = MeshShape::of_data(comm.size());
            let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
            let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
            partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
            let mut optimizer = AdamWOptimizer::new(ADAMW, &model.parameters()).unwrap();
            partition.compare_replicas(&mut model, &mut optimizer, "at the start").unwrap();
            if ranks.rank() == 2 {
                let mut params = model.parameters();
                let at = params.iter().rposition(|param| param.identity.name().contains(flipped)).unwrap();
                let states = optimizer.states().swap_remove(at);
                let master = optimizer_tensors(&mut params[at].weights, states).swap_remove(0).tensor;
                let mut bytes = master.read_bytes().unwrap();
                bytes[11] ^= 1;
                master.write_bytes(&bytes).unwrap();
            }
            partition.compare_replicas(&mut model, &mut optimizer, "after step 7").unwrap_err().to_string()
        });
        for message in messages {
            assert!(
                message.starts_with("ranks have diverged: `model.layers.") && message.contains(flipped),
                "{message}"
            );
            assert!(message.contains("of rank 2 differs from that of rank 0 after step 7"), "{message}");
        }
    }
}

/// Gradients of storage O1 are E4M3 on one process, and ranks send them as E4M3. Both round in both directions, so slopes change by less than 0.4 %.
/// An error of 1 % in a gradient exceeds the bound.
#[test]
fn fp8_gradients_of_levels_are_those_of_one_process() {
    let formats = Storage::MsampO1.formats();
    assert_eq!(formats.gradients, Gradients::Float8);
    let coded = (Zero::Nothing, ReduceFormat::Float8 { feedback: false });
    let step = move |division: Division, comm: Group| {
        let memory = MemoryPolicy { formats, ..MemoryPolicy::FULL };
        run(1, &tiny_llama(), &recipe(RecipeName::Fp8Delayed, Fp8Format::Auto), memory, division, 4, comm).moments
    };
    let alone = step(plain(Zero::Nothing), Group::solo());
    for ranks in [2, 4] {
        for seen in on_ranks(ranks, move |comm| step(coded, comm)) {
            for ((name, expected), (_, got)) in alone.iter().zip(&seen) {
                let (distance, slope) = distance(expected, got);
                let what = format!("{ranks} ranks: {name} is {distance:e} away, its slope {slope:e}");
                // A cast to E4M3 changes a tensor by 2.7 % of its norm. One process casts once, and two ranks cast twice: parts, and their sum.
                // Together this is 4.6 %. Up to 5.7 % is seen.
                assert!(distance <= 0.08 && slope <= 5e-3, "{what}");
            }
        }
    }
}
