//! A run holds as much memory as planned, and a run that runs out of memory loses nothing. On a CPU, a separate test binary checks the plan
//! (`tests/memory`).

#[path = "../../memory/settings.rs"]
mod settings;

use crate::objectives::preference::{run_config, write_records};
use crate::objectives::rollouts;
use crate::runs::resume::{config, write_inputs};
use crate::setup::{recipe, tiny_llama_with};
use ottava_checkpoint::{RandomWeights, Verify, latest_complete};
use ottava_engine::{Engine, EngineOptions, LogprobsMode};
use ottava_models::Decoder;
use ottava_recipe::param::Purpose;
use ottava_recipe::{ExceptionsConfig, Fp8Format, KvCacheDtype, Precision, RecipeName};
use ottava_settings::{Interval, LoraConfig, LossType, LossTypes, ResolvedConfig, RunConfig};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::testing::gpu;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::bench::model;
use ottava_train::objective::rollout::{Draw, sample};
use ottava_train::plan::{MemoryPlan, expect_random_model_fits, inference_bytes};
use ottava_train::trainer::{Start, Trainer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Thirteen settings of a model of 0.35 billion parameters are tested. The promise is 2 %, but the same code makes the same requests.
#[test]
fn a_run_on_the_gpu_holds_what_was_planned() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(pool) = &device else { unreachable!("a GPU was asked for") };
    let sizes = tiny_llama_with(json!({
        "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "max_position_embeddings": 1024,
    }));
    for (name, config) in settings::settings(4, 1024) {
        let planned = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &device).unwrap();
        pool.release_memory().unwrap();
        let before = pool.memory().allocated;
        pool.reset_peak_memory();
        settings::steps(&config, &sizes, &device).unwrap();
        settings::expect_close(&name, planned.peak_bytes, pool.memory().peak - before);
    }
}

fn dry_gpu(memory: usize) -> Device {
    Device::dry_gpu(GpuModel { memory, ..GpuModel::h200() })
}

#[test]
fn a_run_that_does_not_fit_ends_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let config = config(folder.path(), &folder.path().join("run"), RecipeName::Fp8Current);
    let Err(error) = Trainer::new(config, &dry_gpu(1 << 18), &Start::New) else { panic!("256 KiB are too little") };
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("the run does not fit"), "{error}");
    assert!(!folder.path().join("run").exists(), "nothing was written");
}

/// The trainer and the plan run the same code on a GPU without data. The objectives have passes of a reference model before the first step, before
/// each step and in evaluations, or passes from which KTO estimates a divergence, or no passes.
#[test]
fn a_run_of_each_objective_holds_what_was_planned() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let adapters = LoraConfig { r: 2, ..LoraConfig::default() };
    let modules_to_save = ["embed_tokens", "norm", "lm_head"].map(String::from).to_vec();
    let modules = LoraConfig { modules_to_save, ..adapters.clone() };
    for (name, records, loss, lora) in [
        ("texts", "text.txt", None, LoraConfig::default()),
        ("DPO", "pairs.jsonl", None, LoraConfig::default()),
        ("texts of adapters and modules", "text.txt", None, modules.clone()),
        ("DPO of adapters", "pairs.jsonl", None, adapters.clone()),
        ("DPO of adapters and modules", "pairs.jsonl", None, modules),
        ("KTO", "labels.jsonl", None, LoraConfig::default()),
        ("KTO of adapters", "labels.jsonl", None, adapters),
        ("rewards", "pairs.jsonl", Some(LossType::BradleyTerry), LoraConfig::default()),
    ] {
        for micro_batches in [1, 2, 4] {
            let output = tempfile::tempdir().unwrap();
            let mut config = run_config(inputs.path(), &output.path().join("run"), RecipeName::Fp8Current, records);
            config.preference.loss_type = loss.map(LossTypes::from);
            config.training.gradient_accumulation_steps = micro_batches;
            config.lora = lora.clone();
            expect_planned(&format!("{name}, {micro_batches} micro-batches"), config, 1.02);
        }
    }
}

/// Runs `config` on a GPU without data, and expects at most the memory that was planned, and at least a `slack`-th part of it. Returns the planned bytes.
fn expect_planned(name: &str, config: RunConfig, slack: f64) -> u64 {
    let device = dry_gpu(64 << 20);
    let output = config.output_dir.clone();
    let mut trainer = Trainer::new(config, &device, &Start::New).unwrap();
    trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    let record: Value = read_json(&output.join("run.json"));
    let Device::Cuda(gpu) = &device else { unreachable!("a GPU was made") };
    let [planned, held] = [record["planned_memory_bytes"].as_u64().unwrap(), gpu.memory().peak as u64];
    println!("{name}: {planned} bytes planned, {held} held");
    assert!(held <= planned, "{name}: {held} held, {planned} planned");
    assert!(planned as f64 <= slack * held as f64, "{name}: {planned} planned, {held} held");
    planned
}

/// The KV cache of draws and the activations of steps use the same memory in turns.
#[test]
fn a_run_that_draws_holds_what_was_planned() {
    let inputs = tempfile::tempdir().unwrap();
    rollouts::write_inputs(inputs.path());
    // Where many completions are drawn at once, the plan has longer prompts than the run.
    let planned = |(kv_cache_tokens, slack)| {
        let output = tempfile::tempdir().unwrap();
        let mut config = rollouts::config(inputs.path(), &output.path().join("run"), RecipeName::Fp8Row, 5);
        config.reinforcement.sampling.kv_cache_tokens = kv_cache_tokens;
        // Two completions have no room in a row, so steps run all micro-batches, as planned.
        (config.reinforcement.max_completion_length, config.data.max_length) = (3, 9);
        expect_planned(&format!("{kv_cache_tokens} tokens"), config, slack)
    };
    let [few, many] = [(32, 1.02), (0, 1.5)].map(planned);
    assert!(few <= many, "{few} and {many} bytes");
}

/// Between draws, an engine holds no keys and values and no logits, only the inputs of its decode steps.
#[test]
fn an_engine_returns_its_memory_between_draws() {
    const TOKENS: usize = 4096;
    let device = dry_gpu(1 << 30);
    let Device::Cuda(gpu) = &device else { unreachable!("a GPU was made") };
    let held = || gpu.memory().allocated;
    let sizes = tiny_llama_with(json!({"vocab_size": 32_000}));
    let mut weights = RandomWeights { seed: 0, device: device.clone() };
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let mut model = Decoder::new(&sizes, &recipe, &device, Purpose::Infer, 64, &mut weights).unwrap();
    let options = EngineOptions {
        max_model_len: 64,
        max_batch: 8,
        kv_cache_tokens: TOKENS,
        prefill_chunk: 64,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_caching: true,
        saved_states: 8,
        batch_invariant: false,
        async_scheduling: false,
        logprobs_mode: LogprobsMode::Loss,
    };
    let mut engine = Engine::to_lend(&model, &options).unwrap();
    let made = held();
    let cache: usize = model.kv_groups(64).iter().map(|group| model.kv_block_bytes(group, TOKENS, DType::BF16)).sum();
    let logits = 8 * 32_000 * DType::F32.size();
    let wanted: Vec<_> = (0..8).map(|seed| Draw { prompt: vec![1, 2, 3], seed, max_tokens: 8 }).collect();
    let mut draw = || {
        let mut during = 0;
        engine
            .lend(&mut model, |engine| {
                during = held();
                sample(engine, &wanted, &[], 1.0).map(drop)
            })
            .unwrap();
        (during, held())
    };
    let [(first, after), (second, again)] = [draw(), draw()];
    // The bytes of a block count a few bytes more than the cache holds.
    let has_cache = |before: usize, during: usize| during - before > cache / 100 * 99;
    assert!(has_cache(made, first) && has_cache(after, second), "{made}, {first}, {after}, {second}: {cache}");
    assert!(after < made + logits && again == after, "{made}, {after}, {again}: {logits}");
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// After the fourth step, another process takes all memory that the run does not hold.
#[test]
fn a_run_out_of_memory_says_so_and_keeps_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let mut config = config(folder.path(), &folder.path().join("run"), RecipeName::Fp8Current);
    config.checkpoint.save_steps = Interval::Every(3);
    let device = dry_gpu(64 << 20);
    let mut trainer = Trainer::new(config.clone(), &device, &Start::New).unwrap();
    let mut others = Vec::new();
    let outcome = trainer.run(&AtomicBool::new(false), &mut |report| {
        for bytes in [32 << 20, 1 << 20, 1 << 12, 512] {
            while report.step == 4
                && let Ok(other) = Tensor::empty(&device, &[bytes], DType::E4M3)
            {
                others.push(other);
            }
        }
    });
    let error = outcome.unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let saved = latest_complete(&config.output_dir.join("checkpoints"), Verify::Hashes).unwrap().complete.unwrap().0;
    assert!(saved.ends_with("checkpoint-3"), "{}", saved.display());
    for part in ["out of device memory", "Planned: ", "Measured: ", &format!("goes on from {}", saved.display())] {
        assert!(error.to_string().contains(part), "no {part:?} in: {error}");
    }
    drop((others, trainer));
    Trainer::new(config, &device, &Start::Resume).unwrap().run(&AtomicBool::new(false), &mut |_| {}).unwrap();
}

/// Ranks that divide a model for inference draw and cast only their parts of the weights.
#[test]
fn a_rank_of_a_divided_model_never_holds_the_whole_weights() {
    let sizes = model("llama-3-70b").unwrap().with_layers(8);
    let gpu = dry_gpu(GpuModel::h200().memory);
    for name in [RecipeName::Bf16, RecipeName::Fp8Row] {
        let recipe = Precision {
            recipe: name,
            exceptions: ExceptionsConfig { skip_slow_linears: false, ..ExceptionsConfig::default() },
            ..Precision::default()
        }
        .recipe();
        let bytes = |ranks| inference_bytes(&sizes, &recipe, &gpu, 1024, ranks, &[]).unwrap() as f64;
        let one = bytes(1);
        for ranks in [2, 4] {
            // Norms and tables of RoPE are on every rank, and the pool rounds sizes.
            let share = bytes(ranks) / one * ranks as f64;
            assert!((1.0..1.02).contains(&share), "{name:?}: a rank of {ranks} takes {share} of its share");
        }
        let small = dry_gpu(one as usize / 3);
        let error = expect_random_model_fits(&sizes, &recipe, &small, 1024, 2).unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let words = "the model does not fit: each of 2 ranks takes";
        assert!(error.to_string().contains(words) && error.to_string().contains("--gpus"), "{error}");
        expect_random_model_fits(&sizes, &recipe, &small, 1024, 4).unwrap();
    }
}
