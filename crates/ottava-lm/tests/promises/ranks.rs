//! Several ranks, as threads, train as one does.

use crate::setup::{Seeded, batch, config, recipe, recipes, tiny_llama};
use ottava_lm::data::Batch;
use ottava_lm::level::{Formats, Gradients, Level, Masters, States};
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::{Decoder, DecoderConfig};
use ottava_lm::optim::{AdamWConfig, AdamWOptimizer, Per, optimizer_tensors};
use ottava_lm::parallel::{DataParallel, Partition, Slices, Zero};
use ottava_lm::param::{MemoryPolicy, Param, Purpose};
use ottava_lm::recipe::{Fp8Format, Recipe, RecipeName};
use ottava_lm::recompute::{Recompute, SavedActivations};
use ottava_lm::step::TrainStep;
use ottava_tensor::Device;
use ottava_tensor::comm::{Comm, threads};
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::testing::values;
use serde_json::json;
use std::collections::BTreeMap;
use std::rc::Rc;

const TOKENS: usize = 13;
const STEPS: usize = 3;

/// What a rank is left with after its steps.
struct Seen {
    /// Losses, norms, weights and scales, by name.
    values: Vec<(String, Vec<f64>)>,
    /// Scales of master weights and moments of the parameters that it updates a part of, by name.
    scales: BTreeMap<String, Vec<f64>>,
    /// Bytes that it sent in gathers.
    gathered: u64,
}

/// Steps of `rows` rows, of which this rank has its share, a row in each micro-batch. Rows have different numbers of targets.
fn run(sizes: &DecoderConfig, recipe: &Recipe, memory: MemoryPolicy, zero: Zero, rows: usize, comm: Comm) -> Seen {
    let purpose = Purpose::Train(memory);
    let mut model = Decoder::new(sizes, recipe, &Device::Cpu, purpose, 32, &mut Seeded { std: 0.1 }).unwrap();
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let ranks = Rc::new(DataParallel::new(comm, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, false).unwrap();
    let mut optimizer = AdamWOptimizer::new(config, &model.parameters()).unwrap();
    let passes = rows / ranks.size();
    let mut work = TrainStep::shared(&model, passes, 1, TOKENS, partition).unwrap();
    work.partition().quantize_weights(&mut model).unwrap();
    let mut values_seen = Vec::new();
    for step in 0..STEPS {
        let [inputs, mut targets] =
            batch(&format!("ranks {step}"), rows, TOKENS, sizes.vocabulary).map(|ids| ids.to_vec::<i32>().unwrap());
        targets[..TOKENS - 2].fill(IGNORE_INDEX);
        for pass in 0..passes {
            let row = pass * ranks.size() + ranks.rank();
            let [inputs, targets] = [&inputs, &targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
            work.load(pass, &Batch { inputs, targets, rows: 1, seq_len: TOKENS }).unwrap();
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        values_seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
    }
    let gathered = ranks.traffic().all_gather.bytes;
    let whole = |param: &Param| values(&work.partition().value(param).unwrap());
    values_seen.extend(model.parameters().iter().map(|param| (param.name().to_string(), whole(param))));
    let arrays = model.scaling().arrays().unwrap().into_iter();
    values_seen.extend(arrays.filter(|(name, _)| name.ends_with("scale")).map(|(name, x)| (name, values(&x))));
    let mut scales = BTreeMap::new();
    for (param, moments) in model.parameters().into_iter().zip(optimizer.moments_mut()) {
        let (name, updates) = (param.name().to_string(), !param.slice().is_empty());
        let kept = optimizer_tensors(&mut param.weights, moments).into_iter();
        let kept = kept.filter(|kept| updates && kept.per == Per::Parameter);
        scales.extend(kept.map(|kept| (format!("{} of {name}", kept.kind), values(kept.tensor))));
    }
    Seen { values: values_seen, scales, gathered }
}

/// Runs a group of threads, and expects equal weights on all of them, and equal scales on all that have them.
fn on_threads(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    memory: MemoryPolicy,
    zero: Zero,
    rows: usize,
    ranks: usize,
) -> Seen {
    let group = threads::group(ranks).into_iter().map(|comm| {
        let (sizes, recipe) = (sizes.clone(), recipe.clone());
        std::thread::spawn(move || run(&sizes, &recipe, memory, zero, rows, comm))
    });
    let mut all: Vec<_> = group.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect();
    let mut first = all.swap_remove(0);
    for other in all {
        assert!(first.values == other.values && first.gathered == other.gathered, "ranks have the same bits");
        for (name, scale) in other.scales {
            let known = first.scales.entry(name.clone()).or_insert(scale.clone());
            assert_eq!(*known, scale, "{name}");
        }
    }
    first
}

/// Whether to run all combinations instead of some of each kind: `just nightly-ranks`.
fn all_combinations() -> bool {
    std::env::var("OTTAVA_RANKS").is_ok_and(|value| value == "full")
}

#[test]
fn ranks_that_share_a_step_train_as_one_does() {
    let (sizes, memory) = (tiny_llama(), MemoryPolicy::FULL);
    for (i, (name, recipe)) in recipes().into_iter().enumerate() {
        let alone = run(&sizes, &recipe, memory, Zero::Nothing, 8, Comm::solo()).values;
        let numbers = if all_combinations() { vec![2, 4, 8] } else { vec![[2, 4, 8][i % 3]] };
        for ranks in numbers {
            let shared = on_threads(&sizes, &recipe, memory, Zero::Nothing, 8, ranks).values;
            assert_eq!(shared.len(), alone.len());
            for ((tensor, expected), (_, got)) in alone.iter().zip(&shared) {
                // Gradients are the same terms, summed in another order; AdamW's first steps may turn a difference in a tiny gradient
                // into one of some learning rates.
                let size = expected.iter().map(|x| x.abs()).fold(1e-3, f64::max);
                let worst = expected.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst <= 2e-2 * size, "{name}, {ranks} ranks: {tensor} differs by {worst:e} of {size:e}");
            }
            for (a, b) in alone[0].1.iter().zip(&shared[0].1) {
                assert!((a - b).abs() <= 2e-3 * a, "{name}, {ranks} ranks: {a} alone and {b}");
            }
        }
    }
}

/// Runs all stages of ZeRO and compares their bits.
fn expect_same_in_all_stages(what: &str, sizes: &DecoderConfig, recipe: &Recipe, memory: MemoryPolicy, ranks: usize) {
    let rows = ranks.max(4);
    let seen = Zero::ALL.map(|zero| on_threads(sizes, recipe, memory, zero, rows, ranks));
    // With several micro-batches, stages 2 and 3 add gradients in another order than 0 and 1.
    let pairs = if ranks == rows { &[(0, 1), (0, 2), (0, 3)][..] } else { &[(0, 1), (2, 3)] };
    for &(a, b) in pairs {
        let what = format!("{what}, {ranks} ranks, stages {a} and {b}");
        for ((tensor, expected), (_, got)) in seen[a].values.iter().zip(&seen[b].values) {
            assert!(expected == got, "{what}: {tensor}");
        }
        assert_eq!(seen[a].scales, seen[b].scales, "{what}");
    }
}

/// What ranks divide changes who computes, and no bit. Slices are uneven: the matrices of the model are no multiples of 256 · ranks.
#[test]
fn what_ranks_divide_changes_no_bit() {
    let wide = config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }));
    let of = |level: Level| MemoryPolicy { formats: level.formats(), ..MemoryPolicy::FULL };
    let remainder = Formats { masters: Masters::Remainder, ..Level::O0.formats() };
    let policies = [
        (tiny_llama(), of(Level::O0)),
        (tiny_llama(), of(Level::Bf16)),
        (wide, of(Level::Coat)),
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

/// The scale of a whole matrix follows from slices of which a rank may have none.
#[test]
fn scales_of_whole_matrices_change_no_bit() {
    let of = |level: Level| Formats { gradients: Gradients::Bfloat16, ..level.formats() };
    let stochastic = Formats { states: States::Float8, ..of(Level::Bf16) };
    let cases = [
        (RecipeName::Bf16, of(Level::O1), false, 2),
        (RecipeName::Fp16, of(Level::O1), false, 4),
        (RecipeName::Fp8Current, of(Level::O2), false, 4),
        (RecipeName::Fp8Delayed, of(Level::O3), true, 4),
        (RecipeName::Fp8Current, of(Level::O3), true, 2),
        (RecipeName::Fp8Block, of(Level::O3), true, 4),
        (RecipeName::Fp8Delayed, stochastic, true, 4),
    ];
    for (name, formats, weight_codes, ranks) in cases {
        let memory = MemoryPolicy { formats, weight_codes, ..MemoryPolicy::FULL };
        let what = format!("{name:?}, {formats:?}");
        expect_same_in_all_stages(&what, &tiny_llama(), &recipe(name, Fp8Format::Auto), memory, ranks);
    }
}

/// Where products read codes alone, codes are what ranks gather.
#[test]
fn gathers_of_codes_move_half_the_bytes() {
    let (sizes, ranks) = (tiny_llama(), 4);
    let gathered = |name| {
        let recipe = recipe(name, Fp8Format::Auto);
        [Zero::OptimizerStates, Zero::Weights]
            .map(|zero| on_threads(&sizes, &recipe, MemoryPolicy::FULL, zero, 8, ranks).gathered)
    };
    let bf16 = gathered(RecipeName::Bf16);
    let heads = sizes.heads * sizes.head_dim;
    let qkv = heads + 2 * sizes.kv_heads * sizes.head_dim;
    let block = [
        qkv * sizes.channels,
        sizes.channels * heads,
        2 * sizes.hidden * sizes.channels,
        sizes.channels * sizes.hidden,
    ];
    let bytes_per_gather = Slices::new(block, ranks).padded_len() / ranks * (ranks - 1) * sizes.layers;
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Current] {
        let fp8 = gathered(name);
        assert_eq!(bf16[0] - fp8[0], (bytes_per_gather * STEPS) as u64, "once in a step");
        let passes = 8 / ranks;
        assert_eq!(bf16[1] - fp8[1], (bytes_per_gather * STEPS * passes * 2) as u64, "in each forward and backward");
    }
}
