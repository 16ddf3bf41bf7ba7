//! Compiles the kernels that training and inference of the known models launch on Hopper, and writes them to a file. A build with this file as
//! `OTTAVA_KERNELS` starts its first step without NVRTC. This example needs NVRTC, but no GPU.
//!
//! usage: cargo run --release -p ottava-train --example pack_kernels FILE

use ottava_engine::{Engine, EngineOptions, LogprobsMode};
use ottava_models::DecoderConfig;
use ottava_parallel::Ranks;
use ottava_recipe::storage::Storage;
use ottava_recipe::{KvCacheDtype, Precision, RecipeName};
use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::cuda::{GpuModel, Workload, pack_kernels};
use ottava_train::bench::{models, random_decoder};
use ottava_train::plan::MemoryPlan;
use std::rc::Rc;

const RECIPES: [RecipeName; 5] =
    [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block];
/// The number of tokens of a sequence. GPT-2 has no more positions.
const SEQ_LEN: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("usage: pack_kernels FILE")?;
    let mut all = Workload::default();
    for (name, sizes) in models() {
        // Layers repeat a pattern of at most two, and the first layer may be dense.
        let sizes = sizes.with_layers(3);
        for recipe in RECIPES {
            for storage in Storage::ALL {
                all.merge(&training(&sizes, recipe, storage)?);
            }
            for kv_cache_dtype in [KvCacheDtype::Auto, KvCacheDtype::Fp8] {
                all.merge(&inference(&sizes, recipe, kv_cache_dtype)?);
            }
        }
        println!("{name}: {} kernel files so far", all.kernels.len());
    }
    let pack = pack_kernels(&all.kernels, "sm_90a")?;
    std::fs::write(&file, &pack)?;
    println!("{} kernel files, {:.1} MB, in {file}", all.kernels.len(), pack.len() as f64 / 1e6);
    Ok(())
}

/// Returns the launches of a run, including evaluations and comparisons with BF16.
fn training(sizes: &DecoderConfig, recipe: RecipeName, storage: Storage) -> ottava_common::Result<Workload> {
    let mut run = RunConfig::default();
    (run.precision.recipe, run.optimizer.storage, run.data.max_length) = (recipe, storage, SEQ_LEN);
    if recipe != RecipeName::Bf16 {
        run.sentinel.sentinel_steps = 100;
    }
    let device = Device::dry_gpu(GpuModel::h200());
    Ok(MemoryPlan::new(&ResolvedConfig::fastest(&run), sizes, &device)?.workload)
}

/// Returns the launches of an engine.
fn inference(
    sizes: &DecoderConfig,
    recipe: RecipeName,
    kv_cache_dtype: KvCacheDtype,
) -> ottava_common::Result<Workload> {
    let device = Device::dry_gpu(GpuModel::h200());
    let precision = Precision { recipe, ..Precision::default() }.recipe();
    let model = random_decoder(sizes, &precision, &device, SEQ_LEN, &Rc::new(Ranks::solo()))?;
    let options = EngineOptions {
        max_model_len: SEQ_LEN,
        max_batch: 64,
        kv_cache_tokens: 4 * SEQ_LEN,
        prefill_chunk: SEQ_LEN,
        kv_cache_dtype,
        prefix_caching: true,
        saved_states: 8,
        batch_invariant: false,
        async_scheduling: false,
        logprobs_mode: LogprobsMode::Raw,
    };
    Engine::new(model, &options)?.warm_up()?;
    let Device::Cuda(gpu) = &device else { unreachable!("a GPU in a dry run") };
    Ok(gpu.workload().unwrap_or_default())
}
