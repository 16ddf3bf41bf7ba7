use super::changes::{Change, proposals};
use super::*;
use crate::bench::model;
use crate::run::Run;
use ottava_checkpoint::RandomWeights;
use ottava_common::Error;
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_parallel::{Ranks, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::Description;
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::{Gradients, Storage};
use ottava_recipe::{Precision, Recipe, RecipeName, WgradBlocks};
use ottava_settings::{LoraConfig, ResolvedConfig, RunConfig};
use ottava_tensor::comm::{Group, Traffic, threads};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::{DType, Tensor};
use serde_json::{Value, json};
use std::rc::Rc;
use std::thread;

const GIB: f64 = (1u64 << 30) as f64;

fn llama() -> DecoderConfig {
    model("llama-2-7b").unwrap()
}

/// Returns the model with these keys of `config.json`.
fn sizes(keys: Value) -> DecoderConfig {
    let Value::Object(keys) = keys else { panic!("config.json is an object") };
    decoder_config(&ConfigFile::from_values("config.json", keys)).unwrap()
}

fn described(recipe: &Recipe) -> Description {
    Decoder::describe(&llama(), recipe).unwrap()
}

/// Returns the number of weights of the linears in one block.
fn block_weights() -> usize {
    let model = described(&Precision::default().recipe());
    model.block_linears().map(|site| site.outputs * site.inputs).sum()
}

/// Returns the run of Llama-2-7B in the tables of benchmarks/2026-11-21-training-one-gpu.md: two sequences of 4,096 tokens, all states in BF16.
fn run(recipe: RecipeName, recompute: Option<Recompute>, weight_codes: bool) -> RunConfig {
    let mut config = RunConfig::default();
    config.data.max_length = 4096;
    config.data.val_set_size = 0.0;
    config.training.per_device_train_batch_size = 2;
    config.precision.recipe = recipe;
    config.optimizer.storage = Storage::Bfloat16;
    config.memory.recompute = recompute;
    config.memory.weight_codes = Some(weight_codes);
    config
}

fn gpu(gib: f64) -> Device {
    Device::dry_gpu(GpuModel { memory: (gib * GIB) as usize, ..GpuModel::h200() })
}

/// Compares plans with measurements on an H200: the peak, and the memory that the pool took from the driver, in GiB. The plan runs the same code, so
/// it has the same first digit after the point.
#[test]
fn plans_are_what_was_measured() {
    for (recipe, recompute, weight_codes, peak, reserved) in [
        (RecipeName::Bf16, Recompute::None, true, 70.93, 72.8),
        (RecipeName::Fp8Delayed, Recompute::None, true, 76.80, 80.6),
        (RecipeName::Fp8Current, Recompute::None, true, 76.80, 80.6),
        (RecipeName::Fp8Row, Recompute::None, true, 76.80, 80.6),
        (RecipeName::Fp8Block, Recompute::None, true, 76.90, 80.6),
        (RecipeName::Fp8Delayed, Recompute::NormSwiglu, true, 73.83, 77.5),
        (RecipeName::Fp8Delayed, Recompute::NormSwiglu, false, 61.70, 64.2),
        (RecipeName::Fp8Delayed, Recompute::Attention, true, 67.83, 72.0),
        (RecipeName::Fp8Delayed, Recompute::Full, true, 63.47, 68.7),
    ] {
        let config = run(recipe, Some(recompute), weight_codes);
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &llama(), &gpu(138.0)).unwrap();
        let [planned_peak, planned_reserved] = [plan.peak_bytes, plan.reserved_bytes].map(|bytes| bytes as f64 / GIB);
        println!("{recipe:?} {recompute:?}: {planned_peak:.2} and {planned_reserved:.2} GiB");
        // Differences of up to 0.04 GiB are seen. An activation `[8192, 4096]` in BF16 takes 0.0625 GiB, so a missing activation would be noticed.
        assert!((planned_peak - peak).abs() < 0.06, "{recipe:?} {recompute:?}: {planned_peak} for {peak}");
        // Differences of up to 0.08 GiB are seen. The output of gate and up, `[8192, 22016]` in BF16, takes 0.34 GiB.
        assert!(
            (planned_reserved - reserved).abs() < 0.3,
            "{recipe:?} {recompute:?}: {planned_reserved} for {reserved}"
        );
        let sum: u64 = plan.lines.iter().map(|line| line.bytes).sum();
        assert_eq!(sum, plan.peak_bytes, "the lines are all of it");
        assert!(plan.fits && plan.save_bytes < plan.peak_bytes);
    }
}

/// Compares plans with measured peaks if activations are saved in FP8.
#[test]
fn plans_of_saved_activations_are_what_was_measured() {
    for (recompute, weight_codes, peak) in
        [(Recompute::None, true, 69.92), (Recompute::NormSwiglu, true, 66.95), (Recompute::NormSwiglu, false, 54.83)]
    {
        let mut config = run(RecipeName::Fp8Delayed, Some(recompute), weight_codes);
        config.memory.saved_activations = SavedActivations::Float8;
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &llama(), &gpu(138.0)).unwrap();
        let planned = plan.peak_bytes as f64 / GIB;
        // Measured peaks are rounded to 0.01 GiB, which hides differences of up to 0.005.
        assert!((planned - peak).abs() < 0.006, "{recompute:?}, {weight_codes}: {planned} for {peak}");
    }
}

/// Lists the blocks that each product reads, and the reason for square blocks.
#[test]
fn linears_say_which_blocks_their_products_read() {
    let read = |wgrad_blocks| {
        let precision = Precision { recipe: RecipeName::Fp8Block, wgrad_blocks, ..Precision::default() };
        let linear = linears::linears(&described(&precision.recipe()), &precision.recipe()).swap_remove(0);
        assert_eq!(linear.fprop, "x E4M3 1x128 · W E4M3 128x128, exact sums");
        assert_eq!(linear.dgrad, "dy E4M3 1x128 · W E4M3 128x128, exact sums");
        (linear.wgrad, linear.reason.contains("wgrad_blocks: dy in 128x128"))
    };
    assert_eq!(read(WgradBlocks::Square), ("dy E4M3 128x128 · x E4M3 1x128, exact sums".into(), true));
    assert_eq!(read(WgradBlocks::Along), ("dy E4M3 1x128 · x E4M3 1x128, exact sums".into(), false));
}

#[test]
fn auto_takes_the_cheapest_policy_that_fits() {
    let chosen = |gib: f64| {
        let resolved = ResolvedRun::new(&run(RecipeName::Fp8Delayed, None, true), &llama(), &gpu(gib)).unwrap();
        (resolved.config.recompute, resolved.memory.fits, resolved.choice.unwrap())
    };
    // Each memory is larger than the reservation of the pool under its policy, and smaller than the reservation under the preceding policy. The text
    // of a choice names the peaks of `plans_are_what_was_measured`.
    for (gib, policy) in
        [(81.0, Recompute::None), (77.9, Recompute::NormSwiglu), (73.5, Recompute::Attention), (67.9, Recompute::Full)]
    {
        let (chosen, fits, words) = chosen(gib);
        assert_eq!((chosen, fits), (policy, true), "{gib} GiB: {words}");
        assert!(words.contains(&format!("is \"{}\"", policy.as_str())), "{words}");
    }
    assert!(chosen(77.9).2.contains("about 1 % slower"), "{}", chosen(77.9).2);
    assert_eq!((chosen(50.0).0, chosen(50.0).1), (Recompute::Full, false));
}

/// A run that does not fit is proposed on more GPUs than it has, whether its file says the number of data ranks or leaves it out.
#[test]
fn more_gpus_are_proposed_with_zero_3() {
    let proposed = |data: usize, tensor: usize| {
        let mut run = run(RecipeName::Fp8Delayed, Some(Recompute::Full), false);
        (run.parallel.data, run.parallel.tensor) = (data, tensor);
        let sizes = llama().with_layers(8);
        larger::proposals(&ResolvedConfig::fastest(&run), &sizes, &gpu(8.0)).unwrap()
    };
    let least = proposed(0, 1);
    assert!(least.contains("parallel.data = 8, parallel.zero = 3"), "{least}");
    // States of lower precision fit fewer GPUs.
    assert!(least.contains("optimizer.storage = \"msamp-o2\", parallel.data = 4, parallel.zero = 3"), "{least}");
    assert_eq!(proposed(1, 1), least);
    assert!(proposed(16, 1).contains("parallel.data = 16, parallel.zero = 3"), "{}", proposed(16, 1));
    assert!(!proposed(1, 2).contains("parallel.zero"), "{}", proposed(1, 2));
}

/// The states of the smallest number of blocks that suffices move to host memory, starting at the last block.
#[test]
fn auto_offloads_the_smallest_share_that_fits() {
    let mut config = run(RecipeName::Fp8Delayed, Some(Recompute::None), true);
    let resolved = |config: &RunConfig, gib: f64| ResolvedRun::new(config, &llama(), &gpu(gib)).unwrap();
    let whole = resolved(&config, 100.0).memory;
    assert_eq!(whole.host_bytes, 0);
    config.memory.offload_optimizer = None;
    assert_eq!(resolved(&config, 100.0).config.offload_optimizer, 0.0);
    // Each weight in the blocks has two moments of two bytes.
    let matrices: usize = block_weights();
    let of_block = 4 * matrices as u64;
    let mut odd = 0;
    for gib in (0..8).map(|i| 69.0 + 0.5 * f64::from(i)) {
        let least = resolved(&config, gib);
        let (share, host) = (least.config.offload_optimizer, least.memory.host_bytes);
        assert!(least.memory.fits && share > 0.0 && share < 1.0, "{share}");
        let blocks = (share * 32.0).round() as u64;
        odd += blocks % 2;
        assert_eq!(host, blocks * of_block);
        assert_eq!(least.memory.peak_bytes, whole.peak_bytes - host);
        let mut less = config.clone();
        less.memory.offload_optimizer = Some((blocks - 1) as f64 / 32.0);
        assert!(!resolved(&less, gib).memory.fits, "one block less than {blocks} is not enough for {gib} GiB");
        let words = least.choice.unwrap();
        assert!(words.contains(&format!("offload_optimizer = \"auto\" is {share:.3}")), "{words}");
    }
    assert!(odd > 0, "halving meets odd numbers at its end alone");
}

/// Moments are offloaded first, then weights. The GPU frees as much memory as the host holds, except for the weights of at most two blocks that are
/// on the GPU while they are used.
#[test]
fn weights_are_offloaded_where_moments_are_not_enough() {
    let mut config = run(RecipeName::Fp8Delayed, Some(Recompute::Full), false);
    let resolved = |config: &RunConfig, gib: f64| ResolvedRun::new(config, &llama(), &gpu(gib)).unwrap();
    let whole = resolved(&config, 100.0).memory;
    (config.memory.offload_optimizer, config.memory.offload_parameters) = (None, None);
    let moments = resolved(&config, 40.0).config;
    assert!(moments.offload_optimizer > 0.0 && moments.offload_parameters == 0.0);
    let least = resolved(&config, 22.0);
    let chosen = &least.config;
    assert!(least.memory.fits && chosen.offload_optimizer == 1.0, "{chosen:?}");
    let blocks = (chosen.offload_parameters * 32.0).round() as u64;
    assert!(blocks > 2 && blocks < 32, "{blocks}");
    let matrices: usize = block_weights();
    let (block, tables) = (matrices as u64, 4096 * 32000 * 2);
    // Each weight has four bytes of moments.
    assert_eq!(least.memory.host_bytes, 4 * (32 * block + tables) + 2 * blocks * block);
    let visiting = least.memory.peak_bytes + least.memory.host_bytes - whole.peak_bytes;
    assert!(visiting <= 2 * 2 * block, "{visiting} bytes on the device twice, {block} weights in a block");
    let words = least.choice.unwrap();
    assert!(words.contains("offload_parameters = \"auto\" is"), "{words}");
}

/// With four ranks, host memory holds the slices of the gathered weights, and the slices of weights without a master. These slices leave the device.
/// With ZeRO 1 and 2, the whole blocks that a rank would keep leave it too, except for the blocks in use.
#[test]
fn ranks_offload_their_slices_of_weights() {
    let (block, ranks) = (block_weights() as u64, 4);
    for (recipe, storage, stored, gathered) in [
        (RecipeName::Fp8Delayed, Storage::Float32, 1, 1),
        (RecipeName::Fp8Row, Storage::Float32, 2, 2),
        (RecipeName::Bf16, Storage::Bfloat16, 2, 2),
        (RecipeName::Fp8Current, Storage::Bfloat16, 3, 1),
    ] {
        for zero in [Zero::OptimizerStates, Zero::Gradients, Zero::Weights] {
            let planned = |share| {
                let mut config = run(recipe, Some(Recompute::Full), true);
                (config.optimizer.storage, config.parallel.data, config.parallel.zero) = (storage, ranks, zero);
                config.memory.offload_parameters = Some(share);
                MemoryPlan::new(&ResolvedConfig::fastest(&config), &llama(), &gpu(138.0)).unwrap()
            };
            let what = format!("{recipe:?}, {storage:?}, {zero:?}");
            let (here, half, all) = (planned(0.0), planned(0.5), planned(1.0));
            let slices = 32 * block / ranks as u64 * stored;
            assert_eq!([here.host_bytes, half.host_bytes, all.host_bytes], [0, slices / 2, slices], "{what}");
            let gone = here.peak_bytes - all.peak_bytes;
            let expected = if zero == Zero::Weights { slices } else { (32 - 3) * block * gathered };
            assert!(gone >= expected, "{what}: {gone} bytes, {expected} expected");
        }
    }
}

#[test]
fn offloading_more_than_the_host_has_is_an_error() {
    let mut config = run(RecipeName::Fp8Delayed, Some(Recompute::None), true);
    config.memory.offload_optimizer = Some(0.5);
    let mut resolved = ResolvedRun::new(&config, &llama(), &gpu(100.0)).unwrap();
    assert_eq!(resolved.memory.host_available_bytes, None, "a GPU that is elsewhere");
    resolved.expect_fit().unwrap();
    (resolved.memory.host_available_bytes, resolved.memory.fits) = (Some(1 << 30), false);
    let error = resolved.expect_fit().unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let text = "the offloaded tensors of each rank take 12.1 GiB, 1.0 GiB available for it";
    assert!(error.to_string().contains(text), "{error}");
}

/// A snapshot holds weights of 2 bytes, in three files that ranks write in turn, and 12 bytes of FP32 master weights and moments, which ranks divide.
/// Alignment and vectors add a little.
#[test]
fn snapshots_are_planned_and_refused_where_they_do_not_fit() {
    let mut config = run(RecipeName::Fp8Delayed, Some(Recompute::Full), true);
    config.optimizer.storage = Storage::Float32;
    let resolved = |config: &RunConfig| ResolvedRun::new(config, &llama(), &gpu(138.0)).unwrap();
    let parameters = 6.738e9;
    // With two ranks, the first rank writes the first file, of 5 GB, and the third file.
    let of_first = parameters * 2.0 - 4.9e9;
    for (ranks, expected) in [(1, 14.0 * parameters), (2, of_first + 6.0 * parameters)] {
        config.parallel.data = ranks;
        config.parallel.zero = Zero::OptimizerStates;
        let automatic = resolved(&config);
        assert!(automatic.config.async_save);
        let ratio = automatic.memory.snapshot_bytes as f64 / expected;
        assert!((ratio - 1.0).abs() < 3e-3, "{ranks} ranks: {ratio}");
    }
    config.checkpoint.async_save = Some(false);
    assert_eq!(resolved(&config).memory.snapshot_bytes, 0);
    config.checkpoint.async_save = Some(true);
    let mut asked = resolved(&config);
    asked.expect_fit().unwrap();
    asked.memory.snapshots_fit = false;
    let error = asked.expect_fit().unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let text = "`checkpoint.async_save` is true, and a snapshot of a checkpoint takes 45.6 GiB of the host's memory";
    assert!(error.to_string().contains(text), "{error}");
}

/// The inputs of 32 blocks are offloaded in forward and fetched one by one in backward, while gradients of weights accumulate.
#[test]
fn offloaded_residuals_leave_at_most_two_on_the_gpu() {
    let mut config = run(RecipeName::Fp8Delayed, Some(Recompute::Full), false);
    config.data.max_length = 16 * 4096;
    let planned =
        |config: &RunConfig| MemoryPlan::new(&ResolvedConfig::fastest(config), &llama(), &gpu(138.0)).unwrap();
    let whole = planned(&config);
    config.memory.offload_residuals = true;
    let elsewhere = planned(&config);
    let residual = 2 * 16 * 4096 * 4096 * 2;
    assert_eq!(elsewhere.host_bytes, 32 * residual);
    let gradients = 2 * 32 * block_weights() as u64;
    let kept = elsewhere.peak_bytes + 32 * residual - whole.peak_bytes;
    assert!(kept < gradients + 2 * residual, "{kept}, where gradients are {gradients} and a residual {residual}");
}

#[test]
fn what_does_not_fit_is_refused_with_the_cheapest_changes() {
    let config = run(RecipeName::Fp8Delayed, Some(Recompute::None), true);
    let found = |gib: f64| {
        let changes = changes(&ResolvedConfig::fastest(&config), &llama(), &gpu(gib)).unwrap();
        assert!(changes.iter().all(|change| change.peak_bytes as f64 <= gib * GIB));
        changes.iter().map(|change| change.settings.join(", ")).collect::<Vec<_>>()
    };
    let (device, settings) = (gpu(79.0), found(79.0));
    // The first two changes keep all bits, and the third does not.
    let saved = "memory.saved_activations = \"float8\"";
    assert_eq!(settings, ["memory.recompute = \"norm-swiglu\"", "memory.weight_codes = false", saved]);
    let more = format!("memory.recompute = \"norm-swiglu\", {saved}");
    assert_eq!(found(70.0), ["memory.weight_codes = false", "memory.recompute = \"full\"", &more]);
    let error = ResolvedRun::new(&config, &llama(), &device).unwrap().expect_fit().unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let text = error.to_string();
    for part in
        ["does not fit NVIDIA H200", "tensors take 76.8 GiB", "; 79.0 GiB available. ", &settings[0], &settings[2]]
    {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }

    // Adapters fit a small GPU.
    let refused =
        |gib: f64| ResolvedRun::new(&config, &llama(), &gpu(gib)).unwrap().expect_fit().unwrap_err().to_string();
    let text = refused(23.0);
    for part in ["No setting that takes less memory makes this run fit.", "lora.r = 16"] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    let text = refused(1.0);
    assert!(text.contains("No setting that takes less memory makes it fit"), "{text}");
}

#[test]
fn changes_that_reduce_precision_are_proposed_beside_slow_ones() {
    let mut config = run(RecipeName::Bf16, Some(Recompute::Full), true);
    config.optimizer = RunConfig::default().optimizer;
    config.training.per_device_train_batch_size = 1;
    let changes = changes(&ResolvedConfig::fastest(&config), &llama(), &gpu(100.0)).unwrap();
    let found: Vec<_> = changes.iter().map(|change| (change.settings[0].as_str(), change.effect)).collect();
    let expected = [
        ("optimizer.storage = \"bfloat16\"", Effect::Precision),
        ("memory.offload_optimizer = 0.25", Effect::SameBits),
    ];
    assert_eq!(found, expected);
    let heading =
        "Each of these changes makes it fit (cheapest first; lower precision is ranked as if steps took 50 % longer";
    let text = proposals(&changes);
    assert!(text.starts_with(heading), "{text}");
}

#[test]
fn changes_are_ordered_by_harm() {
    for (recipe, storage, memory) in
        [(RecipeName::Fp8Delayed, Storage::Float32, &[60.0, 120.0][..]), (RecipeName::Bf16, Storage::Bfloat16, &[90.0])]
    {
        let mut config = run(recipe, Some(Recompute::None), false);
        config.optimizer.storage = storage;
        config.training.per_device_train_batch_size = 4;
        for &gib in memory {
            let changes = changes(&ResolvedConfig::fastest(&config), &llama(), &gpu(gib)).unwrap();
            let rounds = |change: &Change| change.effect == Effect::Precision;
            let harm = |change: &Change| change.time * if rounds(change) { 1.5 } else { 1.0 };
            assert!(changes.iter().map(harm).is_sorted(), "{gib} GiB: {changes:?}");
            assert!(changes.iter().filter(|change| rounds(change)).count() < 3, "{gib} GiB: {changes:?}");
        }
    }
}

/// Another process takes memory that the plan assumed. The message has the planned and the measured memory, and proposals.
#[test]
fn memory_that_runs_out_is_explained() {
    let device = gpu(100.0);
    let config = run(RecipeName::Fp8Delayed, Some(Recompute::None), true);
    let resolved = ResolvedRun::new(&config, &llama(), &device).unwrap();
    resolved.expect_fit().unwrap();
    let _other = Tensor::empty(&device, &[40 << 30], DType::E4M3).unwrap();
    let mut weights = RandomWeights { seed: 1, device: device.clone() };
    let mut decoder =
        Decoder::new(&llama(), &config.recipe_on(&device), &device, resolved.config.purpose(), 4096, &mut weights)
            .unwrap();
    let Err(error) = config.new_optimizer(&decoder.parameters()).and_then(|mut optimizer| {
        decoder.quantize_weights()?;
        crate::step::TrainStep::new(&decoder, 1, 2, 4096)?.run(
            &mut decoder,
            &mut *optimizer,
            1e-4,
            StepPrecision::Recipe,
        )
    }) else {
        panic!("40 GiB of 100 are taken, and 77 are needed")
    };
    assert_eq!(error.exit_code(), 3);
    let explained = resolved.explain(error);
    assert_eq!(explained.exit_code(), 3);
    let text = explained.to_string();
    for part in [
        "out of device memory",
        "Planned: 76.8 GiB of tensors in ",
        "100.0 GiB available. Measured: at most 9",
        "Each of these changes makes it fit",
        "memory.weight_codes = false",
    ] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    let other = resolved.explain(Error::Config("something else".into()));
    assert_eq!(other.to_string(), "something else");
}

/// In stage 3, a rank holds the whole weights while it draws: codes of the blocks, and BF16 values of embedding and head. In stage 1, it draws from the
/// buffers that it keeps.
#[test]
fn a_plan_counts_the_whole_weights_of_draws() {
    let sizes = model("llama-3-8b").unwrap();
    let planned = |zero| {
        let mut config = run(RecipeName::Fp8Block, Some(Recompute::Full), true);
        (config.data.max_length, config.training.per_device_train_batch_size) = (64, 8);
        (config.parallel.data, config.parallel.zero, config.reinforcement.sampling.kv_cache_tokens) = (8, zero, 64);
        config.precision.exceptions.skip_slow_linears = false;
        config.reinforcement.rewards = vec!["type = 'math'".parse::<toml::Table>().unwrap().try_into().unwrap()];
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu(140.0)).unwrap();
        plan.lines.into_iter().find(|line| line.what.starts_with("whole weights")).map_or(0, |line| line.bytes)
    };
    let (block, vocabulary) = (218_103_808_u64, 2 * 2 * 128_256 * 4096);
    // The buffers of gathers stay allocated: embedding, head, and a block.
    let expected = 32 * block + vocabulary + vocabulary + block;
    let bytes = planned(Zero::Weights) as f64 / expected as f64;
    // Scales of 128x128 blocks.
    assert!((1.0..1.001).contains(&bytes), "{bytes}");
    assert_eq!(planned(Zero::OptimizerStates), 0);
}

/// Returns the traffic that one of several ranks sends in each step after the first step.
fn sent_in_steps(config: &RunConfig, sizes: &DecoderConfig, comm: Group) -> Vec<Traffic> {
    let shape = config.parallel.mesh(comm.size()).unwrap();
    let ranks = Ranks::new(comm, shape, &Device::Cpu).unwrap();
    let ranks = Rc::new(ranks.with_shard_groups(config.parallel.zero_shard_size).unwrap());
    let weights = &mut RandomWeights { seed: 1, device: Device::Cpu };
    let mut run = Run::new(&ResolvedConfig::fastest(config), sizes, &Device::Cpu, weights, ranks.clone()).unwrap();
    run.quantize_weights().unwrap();
    let mut step = || {
        let before = ranks.traffic();
        run.step(1e-3, StepPrecision::Recipe).unwrap();
        ranks.traffic() - before
    };
    step();
    vec![step(), step()]
}

/// For each token of a micro-batch, a rank sends values and gradients to the other rank. It sends codes instead of values if all ranks would cast to
/// the same codes.
#[test]
fn tokens_travel_to_experts_as_codes_where_all_ranks_cast_alike() {
    let sizes = model("qwen3-30b-a3b").unwrap().with_layers(1);
    let gathered = |name, recompute| {
        let mut config = run(name, Some(recompute), true);
        (config.parallel.data, config.parallel.expert) = (2, 2);
        let plan = CommunicationPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu(140.0)).unwrap().unwrap();
        plan.of_layers.all_gather.bytes
    };
    let tokens = 2 * 4096;
    let (values, choices) = (tokens * 2048 * 2, tokens * 8 * 8);
    for (name, forward) in [
        (RecipeName::Bf16, values),
        (RecipeName::Fp8Delayed, values / 2),
        (RecipeName::Fp8Current, values / 2),
        // The cast for wgrad has other scales, so values are sent.
        (RecipeName::Fp8Block, values),
        (RecipeName::Fp8Row, values),
    ] {
        assert_eq!(gathered(name, Recompute::None), choices + forward + values, "{}", name.as_str());
    }
    // Under full recomputation, the first forward has no cast for wgrad, so it sends codes with a scale per row or per 128 values. The recomputed
    // forward sends values.
    for (name, scales) in [(RecipeName::Fp8Row, tokens * 4), (RecipeName::Fp8Block, tokens * 2048 / 128 * 4)] {
        let expected = choices + values / 2 + scales + choices + values + values;
        assert_eq!(gathered(name, Recompute::Full), expected, "{}", name.as_str());
    }
}

/// Plans `config`, and checks that each rank sends in each step what the plan says.
fn expect_planned_traffic(config: &RunConfig, sizes: &DecoderConfig, what: &str) -> CommunicationPlan {
    let plan = CommunicationPlan::new(&ResolvedConfig::fastest(config), sizes, &Device::Cpu).unwrap().unwrap();
    let group = threads::group(config.parallel.ranks()).into_iter().map(|comm| {
        let (config, sizes) = (config.clone(), sizes.clone());
        thread::spawn(move || sent_in_steps(&config, &sizes, comm))
    });
    for rank in group.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), [plan.traffic; 2], "{what}");
    }
    plan
}

#[test]
fn planned_communication_is_what_ranks_send() {
    let sizes = sizes(json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }));
    let recipes = [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row];
    let storages = recipes.map(|recipe| (recipe, Storage::Bfloat16, 0)).into_iter();
    let others = [RecipeName::Fp8Current, RecipeName::Fp8Row].map(|recipe| (recipe, Storage::Float32, 4));
    let storages = storages.chain([(RecipeName::Fp8Delayed, Storage::MsampO3, 0)]).chain(others);
    for (at, (recipe, storage, adapter_rank)) in storages.enumerate() {
        let lora = LoraConfig { r: adapter_rank, ..LoraConfig::default() };
        let sizes = DecoderConfig { lora: lora.adapters(), ..sizes.clone() };
        for zero in Zero::ALL {
            // Each recipe has two of these ranks with each stage.
            let divisions = [(2, 1), (3, 2), (2, 3)];
            for (ranks, micro_batches) in [divisions[at % 3], divisions[(at + 1) % 3]] {
                let mut config = run(recipe, Some(Recompute::None), true);
                (config.optimizer.storage, config.optimizer.gradient_dtype) = (storage, Some(Gradients::Bfloat16));
                config.lora = lora.clone();
                config.data.max_length = 8;
                config.training.per_device_train_batch_size = 1;
                config.training.gradient_accumulation_steps = micro_batches;
                (config.parallel.data, config.parallel.zero) = (ranks, zero);
                let what =
                    format!("{recipe:?}, {storage:?}, r {adapter_rank}, {zero:?}, {ranks} ranks, {micro_batches}");
                let plan = expect_planned_traffic(&config, &sizes, &what);
                // A GPU chooses the same linears as the CPU. A GPU of 1 MiB also has a plan, and tensors in host memory are not sent.
                config.precision.exceptions.skip_slow_linears = false;
                config.memory.offload_optimizer = (adapter_rank == 0).then_some(1.0);
                let on_gpu =
                    CommunicationPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu(1e-3)).unwrap().unwrap();
                assert_eq!(on_gpu.traffic, plan.traffic, "{what}");
            }
        }
    }
    let alone = run(RecipeName::Bf16, Some(Recompute::None), true);
    assert!(CommunicationPlan::new(&ResolvedConfig::fastest(&alone), &sizes, &Device::Cpu).unwrap().is_none());
}

/// Also in groups of two ranks that each have one half of the experts.
#[test]
fn planned_communication_of_shard_groups_is_what_ranks_send() {
    let dense = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    });
    for (recipe, zero, micro_batches) in [
        (RecipeName::Fp8Delayed, Zero::OptimizerStates, 1),
        (RecipeName::Bf16, Zero::Gradients, 3),
        (RecipeName::Fp8Row, Zero::Weights, 3),
    ] {
        let mut config = run(recipe, Some(Recompute::None), true);
        (config.data.max_length, config.training.per_device_train_batch_size) = (8, 1);
        config.training.gradient_accumulation_steps = micro_batches;
        (config.parallel.data, config.parallel.zero, config.parallel.zero_shard_size) = (4, zero, 2);
        let plan = expect_planned_traffic(&config, &sizes(dense.clone()), &format!("{recipe:?}, {zero:?}"));
        let slices: u64 = plan.units.iter().map(|unit| unit.slice_bytes).sum();
        // An all-reduce of two groups sends each slice once.
        assert_eq!((plan.sharing, plan.shard, plan.of_replicas.total().bytes), (4, 2, slices), "{zero:?}");
    }
}

#[test]
fn planned_communication_of_latent_attention_is_what_ranks_send() {
    for query_rank in [None, Some(32)] {
        let sizes = sizes(json!({
            "model_type": "deepseek_v2", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
            "num_attention_heads": 4, "q_lora_rank": query_rank, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 16, "num_experts_per_tok": 1, "first_k_dense_replace": 2,
        }));
        for (name, tensor, context) in
            [(RecipeName::Bf16, 2, 1), (RecipeName::Fp8Delayed, 2, 1), (RecipeName::Bf16, 1, 2)]
        {
            let mut config = run(name, Some(Recompute::None), true);
            (config.data.max_length, config.training.per_device_train_batch_size) = (32, 1);
            (config.parallel.data, config.parallel.tensor, config.parallel.context) = (1, tensor, context);
            expect_planned_traffic(&config, &sizes, &format!("{name:?}, {query_rank:?}, tensor {tensor}"));
        }
    }
}

/// The ranks of the axes tensor and expert divide the experts.
#[test]
fn planned_communication_of_experts_is_what_ranks_send() {
    let sizes = sizes(json!({
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64,
        "num_experts_per_tok": 2, "norm_topk_prob": true,
    }));
    for recipe in [RecipeName::Bf16, RecipeName::Fp8Delayed] {
        for (data, tensor, expert) in [(1, 2, 1), (1, 4, 1), (2, 2, 2)] {
            let mut config = run(recipe, Some(Recompute::None), true);
            (config.data.max_length, config.training.per_device_train_batch_size) = (64, 1);
            (config.parallel.data, config.parallel.tensor, config.parallel.expert) = (data, tensor, expert);
            expect_planned_traffic(&config, &sizes, &format!("{recipe:?}, {data} x {tensor}, {expert}"));
        }
    }
}
