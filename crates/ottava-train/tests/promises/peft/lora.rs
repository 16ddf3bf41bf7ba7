//! LoRA: adapters on frozen weights, compared with PEFT, and saved, resumed, loaded and merged.

use crate::models::recorded::Recorded;
use crate::peft::modules::saved_in;
use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::{
    Seeded, Training, decoder, devices, eight_bit_names_on, gradients, largest_error, losses, losses_and_gradients,
    mean, recipe, recipes, text, text_batch, tiny_llama, tiny_llama_with,
};
use ottava_checkpoint::{AdaptedWeights, AdapterFolder, RandomWeights, merge};
use ottava_data::Batch;
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_parallel::Zero;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, Optimizer};
use ottava_recipe::lora::{Lora, Pattern, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, Shard};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::Storage;
use ottava_recipe::{FirstStep, Fp8Format, RecipeName};
use ottava_settings::{LoraConfig, Pairs, ResolvedConfig, RunConfig, WeightInit};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{Device, Tensor};
use ottava_train::plan::MemoryPlan;
use ottava_train::step::TrainStep;
use ottava_train::trainer::{Start, build};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The cases that `scripts/make_lora_referee.py` recorded: LoRA, and DoRA with the scale of rsLoRA.
const CASES: [&str; 2] = ["lora", "dora"];

pub fn recorded(case: &'static str) -> Recorded {
    Recorded::open(&format!("referee_{case}"), case)
}

/// Returns the adapters of the recorded model, with `alpha` in place of its 8.
fn lora(case: &str, alpha: f64) -> Option<Lora> {
    let ([use_rslora, use_dora], modules_to_save) = ([case == "dora"; 2], saved_in(case));
    Some(Lora { r: 6, alpha, use_rslora, use_dora, targets: Targets::AllLinear, modules_to_save, ..Lora::default() })
}

pub fn peft(case: &'static str, name: RecipeName, device: &Device, alpha: f64) -> Training {
    let mut recorded = recorded(case);
    let sizes = DecoderConfig { lora: lora(case, alpha), ..recorded.sizes() };
    let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut decoder = Decoder::new(&sizes, &recipe, device, purpose, 32, &mut recorded).unwrap();
    decoder.quantize_weights().unwrap();
    Training::new(decoder)
}

/// Returns inputs and targets of a recorded step, and the number of rows.
pub fn batch(case: &'static str, step: usize) -> ([Tensor; 2], usize) {
    let ids = recorded(case).tensor("ids");
    let [_, rows, length] = ids.dims("ids").unwrap();
    let ids = ids.rows(step, step + 1).unwrap().to_vec::<i32>().unwrap();
    let without = |skip: usize| {
        let ids: Vec<i32> =
            ids.chunks_exact(length).flat_map(|row| row[skip..skip + length - 1].iter().copied()).collect();
        Tensor::from_slice(&Device::Cpu, &[ids.len()], &ids).unwrap()
    };
    ([without(0), without(1)], rows)
}

/// Returns the largest difference between the losses of the first `steps` steps and PEFT's losses.
fn apart(case: &'static str, mut training: Training, steps: usize) -> f64 {
    let expected = recorded(case).values("losses");
    let apart = expected.iter().enumerate().take(steps).map(|(step, expected)| {
        let (batch, rows) = batch(case, step);
        (training.step(&batch, rows) - expected).abs()
    });
    apart.fold(0.0, f64::max)
}

#[test]
fn gradients_of_adapters_are_those_of_peft() {
    for (device, case) in devices().into_iter().flat_map(|device| CASES.map(|case| (device.clone(), case))) {
        let mut decoder = peft(case, RecipeName::Fp32, &device, 8.0).decoder;
        let ([inputs, targets], rows) = batch(case, 0);
        let [inputs, targets] = [inputs, targets].map(|ids| ids.to_device(&device).unwrap());
        losses_and_gradients(&mut decoder, &inputs, &targets, rows, 1.0 / targets.len() as f64).unwrap();
        let shards: Vec<Vec<Shard>> = decoder.parameters().iter().map(|param| param.identity.shards.clone()).collect();
        let mut compared = 0;
        for ((_, gradient), of_param) in gradients(&mut decoder).into_iter().zip(shards) {
            let mut rest = &gradient[..];
            for shard in of_param {
                let (own, after) = rest.split_at(shard.elements());
                rest = after;
                let name = format!("gradients/{}", shard.tensor.name);
                let error = largest_error(own, &recorded(case).values(&name));
                // Sums in F32 have another order than in PEFT: differences of up to 2.5e-6 of the largest element are seen.
                assert!(error < 1e-5, "{case}: {}: {error:e} apart", shard.tensor.name);
                compared += 1;
            }
        }
        let tensors = if case == "dora" { 3 } else { 2 };
        assert_eq!(compared, tensors * 2 * 7, "A, B and with DoRA magnitudes of seven linears in two blocks");
    }
}

/// Measured on the CPU, losses differ from PEFT's by at most 1e-6 in F32, 6.4e-4 in BF16 and 4.9e-3 in FP8.
#[test]
fn twenty_steps_lose_what_they_lose_in_peft() {
    for (device, case) in devices().into_iter().flat_map(|device| CASES.map(|case| (device.clone(), case))) {
        let names = [RecipeName::Fp32, RecipeName::Bf16].into_iter().chain(eight_bit_names_on(&device));
        for name in names {
            let allowed = match name {
                RecipeName::Fp32 => 1e-5,
                RecipeName::Bf16 => 1e-3,
                _ => 1e-2,
            };
            let error = apart(case, peft(case, name, &device, 8.0), 20);
            eprintln!("{case}, {} on {device}: losses are at most {error:.1e} apart from PEFT's", name.as_str());
            assert!(error < allowed, "{case}, {} on {device}: {error:e}", name.as_str());
        }
    }
    let wrong = apart("lora", peft("lora", RecipeName::Fp32, &Device::Cpu, 8.0 * 1.1), 2);
    assert!(wrong > 1e-3, "a scale that is a tenth too large goes unnoticed: {wrong:e}");
}

#[test]
fn new_magnitudes_are_the_norms_of_rows_as_in_peft() {
    let mut base = recorded("dora");
    let sizes = DecoderConfig { lora: lora("dora", 8.0), ..base.sizes() };
    let new = RandomWeights { seed: 5, device: Device::Cpu };
    let mut weights = AdaptedWeights::new(&mut base, None, new, false);
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut decoder = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 32, &mut weights).unwrap();
    let mut compared = 0;
    for param in decoder.parameters().iter().filter(|param| !param.identity.is_matrix()) {
        let expected = recorded("dora").values(&format!("norms/{}", param.identity.name()));
        // The values are roots of sums of squares of a row in F32. Some units of 2⁻²⁴ are expected, and up to 2.5e-7 is seen.
        assert!(largest_error(&values(&param.weights.value().unwrap()), &expected) < 1e-6, "{}", param.identity.name());
        compared += 1;
    }
    assert_eq!(compared, 2 * 7);
}

/// Returns a model with seeded adapters.
fn adapted(targets: Targets) -> DecoderConfig {
    DecoderConfig {
        lora: Some(Lora { r: 3, alpha: 4.0, use_rslora: true, use_dora: false, targets, ..Lora::default() }),
        ..tiny_llama()
    }
}

#[test]
fn frozen_weights_keep_their_bits_and_have_nothing_to_be_updated() {
    for device in devices() {
        for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Block] {
            let mut model = decoder(&adapted(Targets::AllLinear), &recipe(name, Fp8Format::Auto), &device, 0.1);
            let bits = |model: &mut Decoder, trained: bool| -> Vec<Vec<u8>> {
                let params = model.all_parameters().into_iter().filter(|param| param.is_trained() == trained);
                params.map(|param| param.weights.value().unwrap().read_bytes().unwrap()).collect()
            };
            let (frozen, before) = (bits(&mut model, false), bits(&mut model, true));
            let (mut optimizer, _) = trained(&mut model, 3);
            assert!(bits(&mut model, false) == frozen, "{} on {device}: a frozen weight has changed", name.as_str());
            assert!(bits(&mut model, true).iter().zip(&before).all(|(a, b)| a != b), "all adapters are trained");
            let mut kept = model.all_parameters().into_iter().filter(|param| !param.is_trained());
            assert!(kept.all(|param| !param.gradient.has_memory() && param.weights.tensors_mut().1.is_none()));
            let (count, moments) = (model.parameters().len(), optimizer.states().len());
            assert_eq!(count, moments, "moments are those of adapters");
        }
    }
}

/// Trains `model` for some steps of two micro-batches. Returns the optimizer, and the losses of the steps.
fn trained(model: &mut Decoder, steps: usize) -> (AdamWOptimizer, Vec<f64>) {
    let how = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(how, &model.parameters()).unwrap();
    let mut step = TrainStep::new(model, 2, 2, 16).unwrap();
    let learned = text();
    let mut losses = Vec::new();
    for i in 0..steps {
        for micro_batch in 0..2 {
            let [inputs, targets] = text_batch(learned, 64 * (2 * i + micro_batch), 2, 16)
                .map(|ids| ids.to_vec::<i32>().unwrap().iter().map(|id| id % 96).collect());
            let batch = Batch::whole(inputs, targets, 2);
            step.load(micro_batch, &batch).unwrap();
        }
        losses.push(step.run(model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap().loss);
    }
    (optimizer, losses)
}

/// Adapters have the formats of the storage, and frozen weights have no states.
#[test]
fn adapters_train_at_every_level() {
    let sizes = adapted(Targets::AllLinear);
    let sizes = DecoderConfig { lora: sizes.lora.map(|lora| Lora { use_dora: true, ..lora }), ..sizes };
    for (device, name) in
        devices().iter().flat_map(|device| [RecipeName::Bf16, RecipeName::Fp8Current].map(|name| (device, name)))
    {
        let losses = |storage: Storage| {
            let kept = MemoryPolicy { formats: storage.formats(), frozen_values: false, ..MemoryPolicy::FULL };
            let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(kept));
            let mut model = Decoder::new(&sizes, &recipe, device, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
            model.quantize_weights().unwrap();
            trained(&mut model, 8).1
        };
        let plain = losses(Storage::Float32);
        assert!(plain[7] < plain[0] - 0.3, "{plain:?}");
        for storage in Storage::ALL {
            let other = losses(storage);
            let apart = plain.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            eprintln!(
                "{} on {device}, {}: losses are at most {apart:.1e} from those of O0",
                name.as_str(),
                storage.as_str()
            );
            // Measured on the CPU, losses of eight steps differ from O0 by up to 6.6e-2, a fifth of the improvement.
            assert!(
                apart < 0.15 && other[7] < other[0] - 0.3,
                "{} on {device}, {}: {other:?} for {plain:?}",
                name.as_str(),
                storage.as_str()
            );
        }
    }
}

/// Returns the losses and gradients of a step, in bits, with magnitudes if `use_dora` is set.
fn step_bits(
    recipe: &ottava_recipe::Recipe,
    device: &Device,
    kept: MemoryPolicy,
    use_dora: bool,
) -> Vec<(String, Vec<f64>)> {
    let targets = Targets::Names(["q_proj", "o_proj", "up_proj", "down_proj"].map(String::from).to_vec());
    // With 128x128 blocks, backward also transposes the codes of all weights except `o_proj`, [128, 64].
    let sizes = DecoderConfig {
        lora: adapted(targets).lora,
        ..tiny_llama_with(json!({"hidden_size": 128, "intermediate_size": 128, "head_dim": 16}))
    };
    let lora = sizes.lora.map(|lora| Lora { use_dora, ..lora });
    let sizes = DecoderConfig { lora, ..sizes };
    let purpose = Purpose::Train(kept);
    let mut model = Decoder::new(&sizes, recipe, device, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let [inputs, targets] = ["inputs", "targets"].map(|name| integers(name, 32, 96).to_device(device).unwrap());
    let seen = losses_and_gradients(&mut model, &inputs, &targets, 2, 1.0 / 32.0).unwrap();
    gradients(&mut model).into_iter().chain([("losses".to_string(), values(&seen))]).collect()
}

#[test]
fn adapters_have_the_same_gradients_whatever_is_recomputed() {
    for device in devices() {
        for (name, recipe) in recipes().into_iter().filter(|(_, recipe)| recipe.expect_on(&device).is_ok()) {
            if recipe.smooth_swiglu {
                continue;
            }
            let step_bits = |kept, use_dora| step_bits(&recipe, &device, kept, use_dora);
            for use_dora in [false, true] {
                let what = format!("{name} on {device}, magnitudes {use_dora}");
                let all = step_bits(MemoryPolicy::FULL, use_dora);
                for recompute in [Recompute::NormSwiglu, Recompute::Attention, Recompute::Full] {
                    let kept = MemoryPolicy { recompute, ..MemoryPolicy::FULL };
                    assert!(step_bits(kept, use_dora) == all, "{what}, {}", recompute.as_str());
                }
                let kept = MemoryPolicy { weight_codes: false, ..MemoryPolicy::FULL };
                assert!(step_bits(kept, use_dora) == all, "{what}, without stored codes");
                let kept = MemoryPolicy { frozen_values: false, ..MemoryPolicy::FULL };
                assert!(step_bits(kept, use_dora) == all, "{what}, with codes alone");
            }
            let all = step_bits(MemoryPolicy::FULL, false);
            let kept = MemoryPolicy { saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL };
            let compressed = step_bits(kept, false);
            let losses = |step: &[(String, Vec<f64>)]| step.last().expect("losses").1.clone();
            assert!(losses(&compressed) == losses(&all), "{name}: forward does not read what it saves");
        }
    }
}

/// Returns a Llama whose linears are wider than its heads.
fn wide_llama() -> DecoderConfig {
    tiny_llama_with(json!({"hidden_size": 128, "intermediate_size": 512, "head_dim": 16}))
}

/// Frozen weights have no gradients, master weights or moments. They take one byte each if backward can transpose their codes. At most one of them is
/// loaded before it is cast. The memory is planned for a GPU, whose code runs up to the launch of kernels.
#[test]
fn a_run_of_adapters_takes_no_memory_for_training_frozen_weights() {
    const LAYERS: usize = 32;
    let gpu = Device::dry_gpu(GpuModel::h200());
    let plan = |lora: LoraConfig, recipe: RecipeName| {
        let mut config = config(Path::new("none"), Path::new("none"), recipe);
        config.checkpoint.async_save = Some(false);
        config.lora = lora;
        let sizes = DecoderConfig { lora: config.lora.adapters(), ..wide_llama().with_layers(LAYERS) };
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu).unwrap();
        let of = |what: &str| plan.lines.iter().filter(|line| line.what.starts_with(what)).map(|line| line.bytes).sum();
        let trained: [u64; 3] = ["optimizer states", "master weights", "gradients"].map(of);
        (trained, plan.peak_bytes, of("frozen weights, bfloat16"), of("FP8 codes"), plan.build_bytes)
    };
    // These are the rows and columns of QKV, output, gate and up, and down.
    let linears =
        LAYERS as u64 * [[128, 128], [128, 64], [1024, 128], [128, 512]].map(|[n, k]| n * k).iter().sum::<u64>();
    let mut weights = Vec::new();
    for (recipe, bytes) in
        [(RecipeName::Bf16, 0.0), (RecipeName::Fp8Delayed, 1.0), (RecipeName::Fp8Row, 2.0), (RecipeName::Fp8Block, 1.0)]
    {
        let (all, whole, ..) = plan(LoraConfig::default(), recipe);
        let (adapters, peak, of_weights, codes, build) = plan(LoraConfig { r: 2, ..LoraConfig::default() }, recipe);
        eprintln!("{}: {all:?} of {whole}, with adapters {adapters:?} of {peak}", recipe.as_str());
        assert!(all.iter().zip(adapters).all(|(all, adapters)| adapters * 10 < *all), "{all:?} and {adapters:?}");
        assert!(2 * peak < whole, "{}: {peak} of {whole}", recipe.as_str());
        let of_each = codes as f64 / linears as f64;
        // With 128x128 blocks, codes of `o_proj` have two layouts of padded rows.
        assert!((bytes..1.1 * bytes + 0.1).contains(&of_each), "{}: {of_each} bytes of codes", recipe.as_str());
        // The largest weight is gate and up. It is loaded in F32 and BF16, and has codes in two layouts.
        let stays = codes + of_weights + adapters.iter().sum::<u64>() + 8 * 1024 * 128;
        assert!(build < stays + stays / 10, "{}: {build} while loading, {stays} in training", recipe.as_str());
        weights.push(of_weights);
    }
    // Codes replace the weights of FP8 products. Embedding, head and adapters stay.
    assert!(weights[1..].iter().all(|fp8| fp8 * 4 < weights[0]), "{weights:?}");
}

/// In ZeRO stage 3, each rank has its share of the frozen codes and weights. The memory is planned for a GPU.
#[test]
fn ranks_divide_frozen_weights() {
    let gpu = Device::dry_gpu(GpuModel::h200());
    for recipe in [RecipeName::Bf16, RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let frozen = |zero| {
            let mut config = config(Path::new("none"), Path::new("none"), recipe);
            config.checkpoint.async_save = Some(false);
            config.lora = LoraConfig { r: 2, ..LoraConfig::default() };
            (config.parallel.data, config.parallel.zero) = (4, zero);
            let sizes = DecoderConfig { lora: config.lora.adapters(), ..wide_llama().with_layers(8) };
            let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu).unwrap();
            let is_frozen = |what: &str| what.starts_with("frozen weights") || what.starts_with("FP8 codes");
            let lines = plan.lines.iter().filter(|line| is_frozen(&line.what));
            (lines.map(|line| line.bytes).sum::<u64>(), plan.peak_bytes)
        };
        let (whole, peak_of_whole) = frozen(Zero::Gradients);
        let (share, peak) = frozen(Zero::Weights);
        // Norms and scales are not divided, and slices are padded.
        let bound = whole as f64 * 0.27;
        assert!((share as f64) < bound && 4 * share >= whole, "{}: {share} of {whole}", recipe.as_str());
        // A pass holds two whole units.
        assert!(peak + (whole - share) / 2 < peak_of_whole, "{}: {peak} of {peak_of_whole}", recipe.as_str());
    }
}

#[test]
fn settings_that_adapters_cannot_have_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    let path = inputs.path().join("run.toml");
    std::fs::write(&path, "[model]\npath = \"m\"\n[data]\ntrain_files = [\"t.txt\"]\n[lora]\nlora_r = 8\n").unwrap();
    let load = |setting: &str| RunConfig::load(&path, &[setting.to_string()]).map(|loaded| loaded.config);
    let plain = load("lora_target=[\"q_proj\"]").unwrap();
    assert_eq!(plain.lora.adapters().unwrap().targets, Targets::Names(vec!["q_proj".into()]));
    for (setting, words) in [
        ("init=random", "`model.init` is \"random\""),
        ("offload_parameters=0.5", "`memory.offload_parameters` must be 0"),
        ("smooth_swiglu=true", "`precision.smooth_swiglu` is true"),
        ("lora_dropout=1.0", "`lora.lora_dropout` is a probability"),
        ("loraplus_lr_ratio=0.0", "`lora.loraplus_lr_ratio` is a finite factor"),
        ("target_modules=(q_proj", "\"(q_proj\" is no regular expression"),
        ("target_modules=[]", "names no linear"),
        ("lora_alpha=0", "must be above 0"),
        ("rank_pattern=[\"q_proj=x\"]", "is \"x\", expected a whole number"),
        ("rank_pattern=q_proj=0", "`lora.rank_pattern` has 0 for \"q_proj\""),
        ("alpha_pattern={q_proj=-1}", "`lora.alpha_pattern` has -1 for \"q_proj\""),
    ] {
        let error = load(setting).unwrap_err().to_string();
        assert!(error.contains(words), "{setting}: {error}");
    }
}

#[test]
fn unknown_targets_are_errors_that_list_the_linears() {
    let sizes = adapted(Targets::Names(vec!["q_proj".into(), "query".into()]));
    let error = Decoder::describe(&sizes, &recipe(RecipeName::Bf16, Fp8Format::Hybrid)).unwrap_err().to_string();
    assert!(error.contains("`query`") && error.contains("`down_proj`, `gate_proj`, `k_proj`"), "{error}");
}

/// Makes the folder of a base model that was trained for two steps.
pub fn base(inputs: &Path) -> PathBuf {
    let run = inputs.join("base");
    let mut first = config(inputs, &run, RecipeName::Fp32);
    first.training.max_steps = Some(2);
    train(&first, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    run.join("checkpoints/checkpoint-2")
}

pub fn adapter_run(inputs: &Path, base: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    let mut config = config(inputs, output, recipe);
    config.model.path = base.to_path_buf();
    config.model.init = WeightInit::Pretrained;
    // Frozen weights are cast only before the first step, and not with a scale of 1.
    config.precision.delayed.first_step = FirstStep::Unscaled;
    config.lora = LoraConfig { r: 3, lora_alpha: 4.0, ..LoraConfig::default() };
    config
}

/// Returns the losses of a model folder on fixed tokens, with an adapter if it is given.
pub fn folder_losses(folder: &Path, adapter: Option<&Path>, name: RecipeName) -> f64 {
    let adapter = adapter.map(|path| AdapterFolder::open(path).unwrap());
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let sizes = adapter.as_ref().map_or(sizes.clone(), |adapter| adapter.on(sizes));
    let recipe = recipe(name, Fp8Format::Auto);
    let mut model = build(Some(folder), adapter, 0, &Device::Cpu, &sizes, |weights| {
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 16, weights)
    })
    .unwrap();
    model.quantize_weights().unwrap();
    mean(&losses(&mut model, &integers("inputs", 32, 96), &integers("targets", 32, 96), 2).unwrap())
}

#[test]
fn runs_of_adapters_resume_exactly_and_their_folders_are_those_of_peft() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let run = |output: &str| {
            let output = inputs.path().join(format!("{}-{output}", name.as_str()));
            let mut run = adapter_run(inputs.path(), &base, &output, name);
            (run.lora.lora_dropout, run.training.neftune_noise_alpha, run.lora.loraplus_lr_ratio) = (0.1, 5.0, 4.0);
            run
        };
        let (straight, split) = (run("straight"), run("split"));
        train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        let metrics_of = |run: &RunConfig| metrics(&run.output_dir);
        assert_eq!(metrics_of(&straight), metrics_of(&split), "{}", name.as_str());
        let last = |run: &RunConfig| run.output_dir.join("checkpoints/checkpoint-6");
        for file in ["adapter_model.safetensors", "training/optimizer.safetensors"] {
            let bytes = |run: &RunConfig| std::fs::read(last(run).join(file)).unwrap();
            assert!(bytes(&straight) == bytes(&split), "{}: {file} differs", name.as_str());
        }
        let folder = last(&straight);
        assert!(!folder.join("config.json").exists() && !folder.join("model.safetensors").exists());
        let saved: Value = serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!((saved["peft_type"].as_str(), saved["r"].as_u64()), (Some("LORA"), Some(3)));
        assert_eq!(saved["lora_dropout"].as_f64(), Some(0.1));
        let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let b = tensors.tensor("base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight").unwrap();
        assert_eq!((tensors.len(), b.shape()), (28, &[16, 3][..]));
    }
}

/// The base is F32, so the sum is exact except for the order of additions.
#[test]
fn a_merged_model_is_the_base_plus_its_adapter() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let run = adapter_run(inputs.path(), &base, &inputs.path().join("run"), RecipeName::Fp32);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let (folder, merged) = (run.output_dir.join("checkpoints/checkpoint-6"), inputs.path().join("merged"));
    let adapter = AdapterFolder::open(&folder).unwrap();
    assert_eq!(merge(&base, &adapter, None, &merged).unwrap(), 14);
    let [plain, with, sum] = [(&base, None), (&base, Some(&*folder)), (&merged, None)]
        .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
    // A loss averages the roundings of its tokens, 2⁻²⁴ each: differences of up to 4e-9 are seen, and the adapter changes the loss by more than 1e-3.
    assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
    assert!((with / plain - 1.0).abs() > 1e-3, "the adapter changes the loss of {plain} to {with}");
    assert!(merge(&base, &adapter, None, &merged).unwrap_err().to_string().contains("exists already"));
    // The next adapter has other linears.
    let small = inputs.path().join("small");
    std::fs::create_dir(&small).unwrap();
    for (name, from) in [("adapter_config.json", &folder), ("adapter_model.safetensors", &folder)] {
        std::fs::copy(from.join(name), small.join(name)).unwrap();
    }
    let path = small.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 4}")).unwrap();
    let error = merge(&base, &AdapterFolder::open(&small).unwrap(), None, &inputs.path().join("other"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("q_proj.lora_A.weight` has rank 3, and adapter_config.json says 4"), "{error}");
    // Older versions of PEFT write a pickle.
    std::fs::rename(small.join("adapter_model.safetensors"), small.join("adapter_model.bin")).unwrap();
    let error = AdapterFolder::open(&small).err().expect("a pickle is not read").to_string();
    assert!(error.contains("save the adapter anew with PEFT"), "{error}");
}

/// Fused linears whose parts have other ranks and factors, layers without adapters, and names as a pattern are trained, resumed, merged, and trained
/// further.
#[test]
fn adapters_by_patterns_are_trained_saved_merged_and_gone_on_with() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let settings: [(&str, LoraConfig); 2] = [
        (
            "names",
            LoraConfig {
                target_modules: Targets::Names(["q_proj", "v_proj", "up_proj", "down_proj"].map(String::from).to_vec()),
                layers_to_transform: vec![1],
                rank_pattern: Pairs(vec![("q_proj".into(), 5), ("mlp.*".into(), 2)]),
                alpha_pattern: Pairs(vec![("v_proj".into(), 9.0)]),
                ..LoraConfig::default()
            },
        ),
        (
            "pattern",
            LoraConfig {
                target_modules: Targets::Pattern(Pattern::new(r".*\.(?!o_)[a-z]+_proj").unwrap()),
                exclude_modules: Targets::Names(vec!["down_proj".into(), "0.self_attn.q_proj".into()]),
                use_dora: true,
                ..LoraConfig::default()
            },
        ),
    ];
    for (name, lora) in settings {
        let run = |output: &str| {
            let mut run =
                adapter_run(inputs.path(), &base, &inputs.path().join(format!("{name}-{output}")), RecipeName::Fp32);
            run.lora = LoraConfig { r: 3, lora_alpha: 4.0, ..lora.clone() };
            run
        };
        let (straight, split) = (run("straight"), run("split"));
        train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir), "{name}");
        let folder = straight.output_dir.join("checkpoints/checkpoint-6");
        let adapter = AdapterFolder::open(&folder).unwrap();
        assert_eq!(
            Some(&adapter.lora.exceptions),
            straight.lora.adapters().map(|lora| lora.exceptions).as_ref(),
            "{name}"
        );
        let merged = inputs.path().join(format!("{name}-merged"));
        let count = merge(&base, &adapter, None, &merged).unwrap();
        assert_eq!(count, if name == "names" { 4 } else { 9 });
        let [plain, with, sum] = [(&base, None), (&base, Some(&*folder)), (&merged, None)]
            .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
        // A loss averages the roundings of its tokens, 2⁻²⁴ each: differences of up to 4e-9 are seen, and the adapter changes the loss by more than
        // 1e-4.
        assert!((with / sum - 1.0).abs() < 1e-6, "{name}: base and adapter lose {with}, the merged model {sum}");
        assert!((with / plain - 1.0).abs() > 1e-4, "{name}: the adapter changes the loss of {plain} to {with}");
        // Without `lora.r`, all settings come from the adapter.
        let mut further = run("further");
        further.lora = LoraConfig { init_from: folder.clone(), ..LoraConfig::default() };
        let further = further.with_adapter().unwrap();
        assert_eq!(further.lora.exceptions(), straight.lora.exceptions(), "{name}");
        train(&further, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    }
}

/// The loss before the first step equals the loss of the adapter, and the adapter's matrices are trained further.
#[test]
fn a_run_starts_from_an_adapter() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let first = adapter_run(inputs.path(), &base, &inputs.path().join("first"), RecipeName::Fp32);
    train(&first, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let adapter = first.output_dir.join("checkpoints/checkpoint-6");
    let trained = metrics(&first.output_dir).last().unwrap()["eval_loss"].as_f64().unwrap();
    let start = |name: &str, path: &Path, lora: LoraConfig| {
        let mut run = adapter_run(inputs.path(), path, &inputs.path().join(name), RecipeName::Fp32);
        run.lora = lora;
        run.with_adapter()
    };
    let given = LoraConfig { init_from: adapter.clone(), ..first.lora.clone() };
    for (name, path, lora) in [
        ("named", &adapter, LoraConfig::default()),
        ("same", &base, given.clone()),
        ("path", &adapter, first.lora.clone()),
    ] {
        let run = start(name, path, lora).unwrap();
        assert_eq!((run.lora.r, run.lora.lora_alpha, &run.lora.init_from), (3, 4.0, &adapter), "{name}");
        assert_eq!(run.model.path.canonicalize().unwrap(), base.canonicalize().unwrap(), "{name}");
        train(&run, &Device::Cpu, &Start::New, 2).unwrap_err();
        let first_line = metrics(&run.output_dir)[0].clone();
        assert_eq!((&first_line["step"], first_line["eval_loss"].as_f64()), (&Value::from(0), Some(trained)), "{name}");
        // The run resumes from its own checkpoint.
        train(&run, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        let bytes = |run: &Path| std::fs::read(run.join("checkpoints/checkpoint-6/adapter_model.safetensors")).unwrap();
        assert!(bytes(&run.output_dir) != bytes(&first.output_dir), "{name}: nothing was trained");
    }
    for (lora, words) in [
        (LoraConfig { r: 4, ..given.clone() }, "`lora.r` is 4, and the adapter "),
        (LoraConfig { lora_alpha: 8.0, ..given.clone() }, "`lora.lora_alpha` is 8, and the adapter "),
        (LoraConfig { use_rslora: true, ..given.clone() }, "`lora.use_rslora` is true, and the adapter "),
    ] {
        let error = start("refused", &base, lora).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
    }
    let few = LoraConfig { target_modules: Targets::Names(vec!["q_proj".into()]), ..given };
    let error = train(&start("few", &base, few).unwrap(), &Device::Cpu, &Start::New, 1).unwrap_err().to_string();
    assert!(error.contains("the adapter has `base_model.model.model.layers.0."), "{error}");
}
