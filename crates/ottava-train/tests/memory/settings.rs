//! Thirteen runs, and their memory.

use ottava_checkpoint::RandomWeights;
use ottava_models::DecoderConfig;
use ottava_parallel::Ranks;
use ottava_recipe::RecipeName;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::{Gradients, Masters, Storage};
use ottava_settings::{Algorithm, Lion, Muon, ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::run::Run;
use std::rc::Rc;

/// Returns thirteen runs with batches of `rows` sequences of `seq_len` tokens. They differ in recipes, policies, accumulation, batches, states and
/// optimizers.
pub fn settings(rows: usize, seq_len: usize) -> Vec<(String, RunConfig)> {
    let run = |words: &str, recipe, recompute, change: fn(&mut RunConfig)| {
        let mut config = RunConfig::default();
        config.data.max_length = seq_len;
        config.data.val_set_size = 0.0;
        config.training.per_device_train_batch_size = rows;
        config.precision.recipe = recipe;
        config.precision.exceptions.skip_slow_linears = false;
        config.precision.delayed.amax_history_len = 16;
        config.memory.recompute = Some(recompute);
        change(&mut config);
        let name = format!("{}, recompute {}{words}", recipe.as_str(), recompute.as_str());
        (name, config)
    };
    fn accumulate(config: &mut RunConfig) {
        config.training.gradient_accumulation_steps = 2;
    }
    vec![
        run("", RecipeName::Fp32, Recompute::None, |_| {}),
        run("", RecipeName::Bf16, Recompute::None, |_| {}),
        run("; storage coat", RecipeName::Bf16, Recompute::Attention, |config| {
            config.optimizer.storage = Storage::Coat
        }),
        run("", RecipeName::Fp8Delayed, Recompute::None, |_| {}),
        run("; two micro-batches", RecipeName::Fp8Delayed, Recompute::Attention, accumulate),
        run("; muon", RecipeName::Bf16, Recompute::Attention, |config| {
            config.optimizer.algorithm = Algorithm::Muon(Muon::default())
        }),
        run("; lion, storage O2", RecipeName::Fp8Delayed, Recompute::Attention, |config| {
            config.optimizer.algorithm = Algorithm::Lion(Lion::default());
            config.optimizer.storage = Storage::MsampO2;
        }),
        run(
            "; storage bf16, smooth, activations saved in FP8",
            RecipeName::Fp8Delayed,
            Recompute::NormSwiglu,
            |config| {
                config.optimizer.storage = Storage::Bfloat16;
                config.precision.smooth_swiglu = true;
                config.memory.saved_activations = SavedActivations::Float8;
            },
        ),
        run("; storage O2", RecipeName::Fp8Current, Recompute::NormSwiglu, |config| {
            config.optimizer.storage = Storage::MsampO2
        }),
        run(
            "; two micro-batches, no codes of weights, gradients in bfloat16",
            RecipeName::Fp8Current,
            Recompute::Full,
            |config| {
                accumulate(config);
                config.memory.weight_codes = Some(false);
                config.optimizer.gradient_dtype = Some(Gradients::Bfloat16);
            },
        ),
        run("; storage O3, half of all in the host's memory", RecipeName::Fp8Delayed, Recompute::Full, |config| {
            config.optimizer.storage = Storage::MsampO3;
            let memory = &mut config.memory;
            (memory.offload_optimizer, memory.offload_parameters) = (Some(0.75), Some(0.5));
            memory.offload_residuals = true;
        }),
        run("; half the batch, storage O3, masters in two halves", RecipeName::Fp8Row, Recompute::None, |config| {
            config.training.per_device_train_batch_size /= 2;
            config.optimizer.storage = Storage::MsampO3;
            config.optimizer.master_weights = Some(Masters::Remainder);
        }),
        run("; two micro-batches, activations saved in FP8", RecipeName::Fp8Block, Recompute::Attention, |config| {
            accumulate(config);
            config.memory.saved_activations = SavedActivations::Float8;
        }),
    ]
}

/// Runs the first steps of a run.
pub fn steps(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> ottava_common::Result<()> {
    let weights = &mut RandomWeights { seed: config.seed, device: device.clone() };
    let mut run = Run::new(&ResolvedConfig::fastest(config), sizes, device, weights, Rc::new(Ranks::solo()))?;
    run.model.quantize_weights()?;
    for _ in 0..2 {
        run.step(1e-3, StepPrecision::Recipe)?;
    }
    Ok(())
}

/// Checks that a run held as much memory as planned.
pub fn expect_close(name: &str, planned: u64, measured: usize) {
    let ratio = measured as f64 / planned as f64;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    println!("{:9.2} MiB planned, {:9.2} measured, {ratio:.4}: {name}", mib(planned as f64), mib(measured as f64));
    assert!((ratio - 1.0).abs() <= 0.02, "{measured} bytes measured, {planned} planned: {name}");
}
