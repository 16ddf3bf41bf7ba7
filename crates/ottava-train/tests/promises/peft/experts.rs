//! Adapters of experts and routers, compared with PEFT: trained, saved, resumed, read in both of PEFT's forms, and merged.

use crate::models::recorded::Recorded;
use crate::parallel::divided::{F32, Setup, train as train_mesh};
use crate::parallel::expert_ranks::{apart_on, f32_setup, llama4, on, routed};
use crate::parallel::mesh::distance;
use crate::peft::lora::{adapter_run, base, folder_losses};
use crate::runs::resume::{metrics, train, write_inputs};
use crate::setup::{
    Seeded, Training, config, devices, devices_of, double, gradients, largest_error, logits, losses,
    losses_and_gradients, losses_and_gradients_of, mean, numbered, on_one_thread, on_ranks, recipe,
};
use crate::step::gradients::{expect_gradient, family};
use ottava_checkpoint::{AdaptedWeights, AdapterFolder, FolderWeights, RandomWeights, merge};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_parallel::{LayerAxes, Ranks, Zero};
use ottava_recipe::lora::{Exceptions, Lora, Targets};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::comm::MeshShape;
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::trainer::Start;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The models that `scripts/make_expert_lora_referee.py` recorded: an adapter of all linears, of linears of experts by name, of interleaved and of
/// transposed parameters and a router, and of one parameter with another rank.
const CASES: [&str; 5] = ["qwen3_moe", "mixtral", "gpt_oss", "llama4", "deepseek_v3"];

fn recorded(case: &'static str) -> Recorded {
    Recorded::open("referee_expert_lora", case)
}

/// Returns a JSON object of the recording's metadata.
fn metadata(case: &str, what: &str) -> Value {
    let file = std::fs::read(Recorded::path_of("referee_expert_lora")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    serde_json::from_str(&metadata.metadata().as_ref().unwrap()[&format!("{case}/{what}")]).unwrap()
}

/// Writes the recorded tensors of a `kind` to a file.
fn write_tensors(case: &str, kind: &str, path: &Path) {
    let file = std::fs::read(Recorded::path_of("referee_expert_lora")).unwrap();
    let (start, tensors) = (format!("{case}/{kind}/"), SafeTensors::deserialize(&file).unwrap());
    let own = tensors.tensors().into_iter();
    let own = own.filter_map(|(name, view)| Some((name.strip_prefix(&start)?.to_string(), view)));
    safetensors::serialize_to_file(own, None, path).unwrap();
}

/// Writes the folder of the base model.
fn write_base(case: &str, root: &Path) -> PathBuf {
    let folder = root.join("base");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("config.json"), metadata(case, "config").to_string()).unwrap();
    write_tensors(case, "weights", &folder.join("model.safetensors"));
    folder
}

/// Writes a folder with the settings of the recorded adapter, and with the tensors of a `kind`.
fn write_adapter(case: &str, kind: &str, root: &Path, change: impl FnOnce(&mut Value)) -> PathBuf {
    let folder = root.join(kind);
    std::fs::create_dir(&folder).unwrap();
    let mut settings = metadata(case, "adapter_config");
    change(&mut settings);
    std::fs::write(folder.join("adapter_config.json"), settings.to_string()).unwrap();
    write_tensors(case, kind, &folder.join("adapter_model.safetensors"));
    folder
}

/// Builds the recorded model for training, with the adapter of the folder.
fn built(base: &Path, adapter: &Path, name: RecipeName, device: &Device, memory: MemoryPolicy) -> Decoder {
    let adapter = AdapterFolder::open(adapter).unwrap();
    let sizes = adapter.on(decoder_config(&ConfigFile::read(base).unwrap()).unwrap());
    let sizes = ottava_checkpoint::with_experts_of(sizes, base);
    let (recipe, new) = (recipe(name, Fp8Format::Auto), RandomWeights { seed: 0, device: Device::Cpu });
    let mut files = FolderWeights::open(base).unwrap();
    let mut weights = AdaptedWeights::new(&mut files, Some(adapter), new, false);
    let mut decoder = Decoder::new(&sizes, &recipe, device, Purpose::Train(memory), 32, &mut weights).unwrap();
    weights.finish().unwrap();
    decoder.quantize_weights().unwrap();
    decoder
}

/// Returns inputs and targets of a recorded step, and the number of rows.
fn batch(case: &'static str, step: usize) -> ([Tensor; 2], usize) {
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

#[test]
fn gradients_of_experts_are_those_of_peft() {
    for case in CASES {
        let root = tempfile::tempdir().unwrap();
        let (base, adapter) = (write_base(case, root.path()), write_adapter(case, "adapter", root.path(), |_| ()));
        // PEFT's gradients have the names and the layout of the adapter.
        let expected = AdapterFolder::open(&write_adapter(case, "gradients", root.path(), |_| ())).unwrap();
        let sizes = expected.on(decoder_config(&ConfigFile::read(&base).unwrap()).unwrap());
        let mut files = FolderWeights::open(&base).unwrap();
        let new = RandomWeights { seed: 0, device: Device::Cpu };
        let mut expected_source = AdaptedWeights::new(&mut files, Some(expected), new, false);
        let like = Decoder::new(
            &sizes,
            &recipe(RecipeName::Fp32, Fp8Format::Auto),
            &Device::Cpu,
            Purpose::Train(MemoryPolicy::FULL),
            32,
            &mut expected_source,
        );
        let mut like = like.unwrap();
        let expected: Vec<Vec<f64>> =
            like.parameters().into_iter().map(|param| values(&param.weights.value().unwrap())).collect();
        for device in devices() {
            let mut decoder = built(&base, &adapter, RecipeName::Fp32, &device, MemoryPolicy::FULL);
            let ([inputs, targets], rows) = batch(case, 0);
            let [inputs, targets] = [inputs, targets].map(|ids| ids.to_device(&device).unwrap());
            losses_and_gradients(&mut decoder, &inputs, &targets, rows, 1.0 / targets.len() as f64).unwrap();
            let own = gradients(&mut decoder);
            assert_eq!(own.len(), expected.len(), "{case}");
            for ((name, gradient), expected) in own.iter().zip(&expected) {
                let error = largest_error(gradient, expected);
                // Sums in F32 have another order than in PEFT.
                assert!(error < 2e-5, "{case} on {device}: {name}: {error:e} apart");
            }
        }
    }
}

#[test]
fn steps_of_experts_lose_what_they_lose_in_peft() {
    for case in CASES {
        let root = tempfile::tempdir().unwrap();
        let (base, adapter) = (write_base(case, root.path()), write_adapter(case, "adapter", root.path(), |_| ()));
        let expected = recorded(case).values("losses");
        for device in devices() {
            // FP8 products of a GPU need wider experts.
            let has_fp8 = device.same(&Device::Cpu) && case == "qwen3_moe";
            let fp8: &[RecipeName] = if has_fp8 { &[RecipeName::Fp8Current, RecipeName::Fp8Row] } else { &[] };
            for name in [RecipeName::Fp32, RecipeName::Bf16].iter().chain(fp8).copied() {
                let allowed = match name {
                    RecipeName::Fp32 => 1e-5,
                    RecipeName::Bf16 => 3e-2,
                    _ => 5e-2,
                };
                let mut training = Training::new(built(&base, &adapter, name, &device, MemoryPolicy::FULL));
                let apart = expected.iter().enumerate().map(|(step, expected)| {
                    let (batch, rows) = batch(case, step);
                    (training.step(&batch, rows) - expected).abs()
                });
                let apart = apart.fold(0.0, f64::max);
                eprintln!("{case}, {} on {device}: losses are at most {apart:.1e} apart from PEFT's", name.as_str());
                assert!(apart < allowed, "{case}, {} on {device}: {apart:e}", name.as_str());
            }
        }
    }
    let root = tempfile::tempdir().unwrap();
    let base = write_base("gpt_oss", root.path());
    let wrong = write_adapter("gpt_oss", "adapter", root.path(), |settings| settings["lora_alpha"] = json!(8.8));
    let mut training = Training::new(built(&base, &wrong, RecipeName::Fp32, &Device::Cpu, MemoryPolicy::FULL));
    let (batch, rows) = batch("gpt_oss", 0);
    let wrong = (training.step(&batch, rows) - recorded("gpt_oss").values("losses")[0]).abs();
    assert!(wrong > 1e-4, "a factor that is a tenth too large goes unnoticed: {wrong:e}");
}

/// Returns the loss of a recorded step, of a model folder with or without an adapter.
fn loss_of(case: &'static str, folder: &Path, adapter: Option<&Path>) -> f64 {
    let adapter = adapter.map(|path| AdapterFolder::open(path).unwrap());
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let sizes = adapter.as_ref().map_or(sizes.clone(), |adapter| adapter.on(sizes));
    let sizes = ottava_checkpoint::with_experts_of(sizes, folder);
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut model = ottava_train::trainer::build(Some(folder), adapter, 0, &Device::Cpu, &sizes, |weights| {
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 32, weights)
    })
    .unwrap();
    model.quantize_weights().unwrap();
    let ([inputs, targets], rows) = batch(case, 0);
    mean(&losses(&mut model, &inputs, &targets, rows).unwrap())
}

#[test]
fn merged_experts_lose_what_the_adapter_loses() {
    for case in CASES {
        let root = tempfile::tempdir().unwrap();
        let (base, adapter) = (write_base(case, root.path()), write_adapter(case, "adapter", root.path(), |_| ()));
        let merged = root.path().join("merged");
        let count = merge(&base, &AdapterFolder::open(&adapter).unwrap(), None, &merged).unwrap();
        let expected = recorded(case).values("losses")[0];
        let [plain, with, sum] = [(&base, None), (&base, Some(&*adapter)), (&merged, None)]
            .map(|(folder, adapter)| loss_of(case, folder, adapter));
        assert!((with - expected).abs() < 1e-5, "{case}: {with}, and PEFT {expected}");
        assert!((sum - with).abs() < 1e-5, "{case}: the merged model loses {sum}, and with the adapter {with}");
        assert!((plain - with).abs() > 1e-3, "{case}: {plain} without the adapter, {with} with it");
        // Gate, up and down of four experts in two layers, a router, and four linears of attention; or one tensor for all experts.
        let known = match case {
            "qwen3_moe" => 2 * (3 * 4 + 1 + 4),
            "mixtral" => 2 * (3 * 4 + 1),
            "gpt_oss" => 2 * (2 + 1 + 1),
            "llama4" => 2 * (2 + 1),
            _ => 4,
        };
        assert_eq!(count, known, "{case}");
    }
}

/// Adapters of transformers 4 have matrices for the linears of each expert. PEFT with transformers 5 reads them as adapters of parameters.
#[test]
fn adapters_of_the_linears_of_each_expert_are_read() {
    let names = json!(["gate_proj", "up_proj", "down_proj", "gate"]);
    for (case, targets) in [("qwen3_moe", names), ("mixtral", json!(".*block_sparse_moe.*"))] {
        let root = tempfile::tempdir().unwrap();
        let base = write_base(case, root.path());
        let adapter = write_adapter(case, "linears", root.path(), |settings| {
            let keys = ["target_parameters", "rank_pattern", "alpha_pattern"];
            keys.iter().for_each(|key| drop(settings.as_object_mut().unwrap().remove(*key)));
            (settings["target_modules"], settings["use_rslora"]) = (targets, json!(false));
        });
        let expected = recorded(case).values("loss_of_linears")[0];
        let merged = root.path().join("merged");
        merge(&base, &AdapterFolder::open(&adapter).unwrap(), None, &merged).unwrap();
        for found in [loss_of(case, &base, Some(&*adapter)), loss_of(case, &merged, None)] {
            assert!((found - expected).abs() < 1e-5, "{case}: {found}, and PEFT {expected}");
        }
    }
}

/// Returns the sizes of a Qwen3-MoE of one layer, for differences.
fn tiny_experts() -> DecoderConfig {
    let mut keys = family("Qwen3MoeForCausalLM", false);
    let more = json!({
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
        "norm_topk_prob": true,
    });
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config(keys)
}

#[test]
fn backward_of_experts_with_dropout_is_the_gradient() {
    let lora = Lora { r: 2, alpha: 3.0, use_rslora: true, dropout: 0.3, ..Lora::default() };
    let sizes = DecoderConfig { lora: Some(lora), ..tiny_experts() };
    on_one_thread(|| {
        let (purpose, mut weights) = (Purpose::Train(MemoryPolicy::FULL), Seeded { std: 0.5 });
        let mut decoder = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, 5, &mut weights).unwrap();
        let (inputs, targets) = (integers("inputs", 10, 11), integers("targets", 10, 11));
        let loss = |decoder: &mut Decoder| {
            let sequences = numbered(&Device::Cpu, 2, 10);
            values(&losses_and_gradients_of(decoder, &inputs, &targets, sequences, 0.37).unwrap())
        };
        let seen = loss(&mut decoder);
        let once = gradients(&mut decoder);
        let still = values(&losses(&mut decoder, &inputs, &targets, 2).unwrap());
        assert!(largest_error(&seen, &still) > 1e-2, "training draws and evaluation does not: {seen:?}, {still:?}");
        let of_experts = once.iter().filter(|(name, _)| name.contains(".experts.")).count();
        assert_eq!((of_experts, once.iter().filter(|(name, _)| name.contains(".mlp.gate.")).count()), (4, 2));
        for (i, (name, gradient)) in once.iter().enumerate().filter(|(_, (name, _))| name.contains(".mlp.")) {
            assert!(gradient.iter().any(|value| *value != 0.0), "{name}");
            let start = decoder.parameters()[i].weights.value().unwrap();
            expect_gradient(name, gradient, &start, |value| {
                decoder.parameters()[i].weights.set_value(value);
                0.37 * loss(&mut decoder).iter().sum::<f64>()
            });
            decoder.parameters()[i].weights.set_value(start);
        }
    });
}

/// Returns the losses and gradients of a step with dropout, in bits.
fn step_bits(keys: Value, memory: MemoryPolicy, name: RecipeName, device: &Device) -> Vec<(String, Vec<f64>)> {
    let parameters = ["experts.gate_up_proj", "experts.down_proj"].map(String::from).to_vec();
    let lora = Lora { r: 8, alpha: 12.0, dropout: 0.2, parameters, ..Lora::default() };
    let sizes = DecoderConfig { lora: Some(lora), ..config(keys) };
    let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(memory));
    let mut model = Decoder::new(&sizes, &recipe, device, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let [inputs, targets] = ["inputs", "targets"].map(|name| integers(name, 32, 96).to_device(device).unwrap());
    let seen = losses_and_gradients_of(&mut model, &inputs, &targets, numbered(device, 2, 32), 1.0 / 32.0);
    gradients(&mut model).into_iter().chain([("losses".to_string(), values(&seen.unwrap()))]).collect()
}

#[test]
fn experts_have_the_same_gradients_whatever_is_recomputed() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let devices = devices_of(&recipe(name, Fp8Format::Auto));
        let families = [("qwen3_moe", routed(json!({}))), ("llama4", routed(llama4(json!({}))))];
        for (device, (family, keys)) in devices.iter().flat_map(|device| families.clone().map(|of| (device, of))) {
            let bits = |memory| step_bits(keys.clone(), memory, name, device);
            let (what, all) = (format!("{family}, {} on {device}", name.as_str()), bits(MemoryPolicy::FULL));
            assert!(all.iter().any(|(name, _)| name.contains(".experts.")), "{what}");
            for recompute in [Recompute::NormSwiglu, Recompute::Full] {
                let memory = MemoryPolicy { recompute, ..MemoryPolicy::FULL };
                assert!(bits(memory) == all, "{what}, {}", recompute.as_str());
            }
            let memory = MemoryPolicy { frozen_values: false, ..MemoryPolicy::FULL };
            assert!(bits(memory) == all, "{what}: codes alone");
            let memory = MemoryPolicy { saved_activations: SavedActivations::Float8, ..MemoryPolicy::FULL };
            assert!(bits(memory).last() == all.last(), "{what}: forward does not read what it saves");
        }
    }
}

/// Adapters of experts of a GPU, in BF16 and in FP8 products, have the losses and gradients of the CPU, up to rounding.
#[test]
fn experts_train_on_a_gpu_as_on_the_cpu() {
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Current] {
        for device in devices_of(&recipe(name, Fp8Format::Auto)).into_iter().skip(1) {
            let of = |device: &Device| step_bits(routed(json!({})), MemoryPolicy::FULL, name, device);
            let (expected, got) = (of(&Device::Cpu), of(&device));
            let losses = [&expected, &got].map(|step| step.last().unwrap().1.iter().sum::<f64>() / 32.0);
            let allowed = if name == RecipeName::Fp32 { 1e-5 } else { 2e-2 };
            assert!((losses[0] - losses[1]).abs() < allowed, "{} on {device}: {losses:?}", name.as_str());
            for ((name, expected), (_, got)) in expected.iter().zip(&got).filter(|_| name == RecipeName::Fp32) {
                let error = largest_error(got, expected);
                assert!(error < 1e-4, "{name} on {device}: {error:e} apart");
            }
        }
    }
}

/// Weights in four bits are read in the compute type, so their adapters have other losses than with the weights of the folder, by little.
#[test]
fn experts_train_beside_weights_in_four_bits() {
    let bits = |four_bit| {
        step_bits(routed(json!({})), MemoryPolicy { four_bit, ..MemoryPolicy::FULL }, RecipeName::Bf16, &Device::Cpu)
    };
    let (plain, packed) = (bits(false), bits(true));
    let loss = |step: &[(String, Vec<f64>)]| step.last().unwrap().1.iter().sum::<f64>() / 32.0;
    let apart = (loss(&plain) - loss(&packed)).abs();
    assert!(apart > 0.0 && apart < 0.1, "{apart:e}");
    assert_eq!(plain.len(), packed.len());
}

/// Returns adapters of all linears, of experts and of routers, with dropout.
fn of_experts(use_parameters: bool) -> Option<Lora> {
    let parameters = ["experts.gate_up_proj", "experts.down_proj", "router.weight"];
    let parameters = if use_parameters { parameters.map(String::from).to_vec() } else { Vec::new() };
    Some(Lora { r: 4, alpha: 6.0, dropout: 0.2, b_rate: 2.0, parameters, ..Lora::default() })
}

/// Ranks of all axes train the adapters of experts as one rank does, at each ZeRO stage.
#[test]
fn ranks_train_experts_as_one_rank() {
    let gpt_oss =
        routed(json!({"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 64, "sliding_window": 7}));
    let families = [
        ("qwen3_moe", routed(json!({})), false),
        ("gpt_oss", gpt_oss, true),
        ("llama4", routed(llama4(json!({}))), true),
    ];
    for (number, (name, keys, use_parameters)) in families.into_iter().enumerate() {
        let meshes = [
            ([2, 1, 1, 1], 2, Zero::OptimizerStates),
            ([2, 1, 1, 1], 1, Zero::Weights),
            ([2, 1, 2, 1], 4, Zero::Gradients),
            ([1, 1, 1, 2], 1, Zero::Nothing),
            ([2, 1, 1, 2], 2, Zero::OptimizerStates),
            ([1, 2, 1, 1], 1, Zero::Nothing),
        ];
        for (mesh, expert, zero) in meshes.into_iter().filter(|(mesh, ..)| number == 0 || mesh[2] == 1) {
            let mut alone = f32_setup(keys.clone());
            let [_, tokens] = alone.mesh.rows;
            // The random numbers of a token follow from the row of the step.
            (alone.mesh.zero, alone.mesh.rows) = (zero, [1, tokens]);
            alone.mesh.sizes.lora = of_experts(use_parameters);
            let (apart, tensor) = apart_on(&alone, mesh, expert);
            assert!(apart < F32, "{name} on {mesh:?}, {expert} of experts, {zero:?}: {tensor} is {apart:.1e} apart");
        }
    }
}

/// Activations are F32, so few values are cast to another code because of the order of sums. The distance is at most the effect of FP8.
#[test]
fn ranks_train_experts_in_fp8_as_one_rank() {
    let with = |name| {
        let mut alone = Setup::new(routed(json!({})), name);
        let [_, tokens] = alone.mesh.rows;
        (alone.mesh.rows, alone.mesh.sizes.lora) = ([1, tokens], of_experts(false));
        alone.mesh.recipe.compute = DType::F32;
        alone
    };
    let plain = train_mesh(&with(RecipeName::Fp32));
    assert!(plain.keys().any(|name| name.contains(".experts.")));
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let alone = with(name);
        let expected = train_mesh(&on(&alone, [2, 1, 1, 1], 1));
        let (apart, tensor) = distance(&expected, &train_mesh(&on(&alone, [2, 1, 1, 1], 2)));
        let bound = distance(&plain, &expected).0;
        assert!(apart < bound, "{name:?}: {tensor} is {apart:.1e} apart, not below {bound:.1e}");
    }
}

/// Returns logits of a model with adapters of experts on ranks that divide its experts. The adapters belong to the model, or are loaded `beside` it.
fn logits_on(ranks: usize, beside: bool, lora: &Lora) -> Vec<f64> {
    let lora = lora.clone();
    let mut all = on_ranks(ranks, move |comm| {
        let shape = MeshShape { tensor: ranks, ..MeshShape::of_data(1) };
        let group = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
        let own = if beside { Lora::of_no_linear() } else { lora.clone() };
        let sizes = DecoderConfig { lora: Some(own), ..config(routed(json!({}))) };
        let (recipe, axes) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Rc::new(LayerAxes::new(group.clone())));
        let weights = &mut Seeded { std: 0.1 };
        let mut model = Decoder::for_inference(&sizes, &recipe, &Device::Cpu, 64, weights, axes).unwrap();
        model.quantize_weights().unwrap();
        if beside {
            let mut adapters = model.load_adapters(&lora, weights).unwrap();
            model.exchange_adapters(&mut adapters);
        }
        let found = values(&logits(&model, &integers("prompt", 12, 96)));
        group.finish().unwrap();
        found
    });
    all.swap_remove(0)
}

#[test]
fn ranks_of_inference_read_the_adapters_of_their_experts() {
    let lora = Lora { r: 4, alpha: 6.0, ..Lora::default() };
    let (expected, none) = (logits_on(1, false, &lora), Lora::of_no_linear());
    assert!(largest_error(&logits_on(1, false, &none), &expected) > 1e-2, "adapters have no effect");
    for (ranks, beside) in [(1, true), (2, false), (2, true), (4, true)] {
        let error = largest_error(&logits_on(ranks, beside, &lora), &expected);
        assert!(error < 1e-5, "{ranks} ranks, beside {beside}: {error:e} apart");
    }
}

/// Makes a run of adapters of a small model with experts.
fn run_of(inputs: &Path, base: &Path, output: &str, name: RecipeName) -> RunConfig {
    let mut run = adapter_run(inputs, base, &inputs.join(format!("{}-{output}", name.as_str())), name);
    (run.lora.lora_dropout, run.lora.loraplus_lr_ratio) = (0.1, 4.0);
    run
}

/// Writes the inputs of runs, and makes a base model with experts.
fn base_with_experts(inputs: &Path, keys: Value) -> PathBuf {
    write_inputs(inputs);
    let mut all = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 64, "tie_word_embeddings": false,
    });
    all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(inputs.join("config.json"), all.to_string()).unwrap();
    base(inputs)
}

#[test]
fn runs_of_experts_resume_exactly_and_their_folders_are_those_of_peft() {
    let inputs = tempfile::tempdir().unwrap();
    let base = base_with_experts(inputs.path(), json!({}));
    for name in [RecipeName::Fp32, RecipeName::Fp8Delayed] {
        let [straight, split] = ["straight", "split"].map(|output| run_of(inputs.path(), &base, output, name));
        train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir), "{}", name.as_str());
        let last = |run: &RunConfig| run.output_dir.join("checkpoints/checkpoint-6");
        for file in ["adapter_model.safetensors", "training/optimizer.safetensors"] {
            let bytes = |run: &RunConfig| std::fs::read(last(run).join(file)).unwrap();
            assert!(bytes(&straight) == bytes(&split), "{}: {file} differs", name.as_str());
        }
        let saved: Value =
            serde_json::from_slice(&std::fs::read(last(&straight).join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!(saved["target_modules"], json!(["k_proj", "o_proj", "q_proj", "v_proj"]));
        assert_eq!(saved["target_parameters"], json!(["experts.down_proj", "experts.gate_up_proj", "gate.weight"]));
        assert_eq!(saved["rank_pattern"], json!({"experts[.]gate_up_proj": 6}));
        assert_eq!(saved["alpha_pattern"], json!({"experts[.]gate_up_proj": 8.0}));
        assert_eq!(saved["lora_dropout"], json!(0.0), "PEFT has no dropout of parameters");
        let bytes = std::fs::read(last(&straight).join("adapter_model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let shape = |name: &str| {
            tensors.tensor(&format!("base_model.model.model.layers.1.mlp.{name}")).unwrap().shape().to_vec()
        };
        assert_eq!(tensors.len(), 2 * 2 * (4 + 2 + 1));
        assert_eq!(shape("experts.base_layer.lora_A.weight"), [4 * 6, 32]);
        assert_eq!(shape("experts.base_layer.lora_B.weight"), [32, 4 * 6]);
        assert_eq!(shape("experts.lora_B.weight"), [32, 4 * 3]);
        assert_eq!(shape("gate.lora_A.weight"), [3, 32]);
    }
}

/// The checkpoint of a run is read again, merged, and continued with the settings of its folder.
#[test]
fn folders_of_experts_are_read_merged_and_continued() {
    let inputs = tempfile::tempdir().unwrap();
    let base = base_with_experts(inputs.path(), json!({}));
    let run = run_of(inputs.path(), &base, "run", RecipeName::Fp32);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let (folder, merged) = (run.output_dir.join("checkpoints/checkpoint-6"), inputs.path().join("merged"));
    let adapter = AdapterFolder::open(&folder).unwrap();
    assert_eq!(merge(&base, &adapter, None, &merged).unwrap(), 2 * (4 + 3 * 4 + 1));
    let [plain, with, sum] = [(&base, None), (&base, Some(&*folder)), (&merged, None)]
        .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
    assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
    assert!((with / plain - 1.0).abs() > 1e-3, "the adapter changes the loss of {plain} to {with}");
    let mut next = run_of(inputs.path(), &folder, "next", RecipeName::Fp32);
    (next.lora.r, next.training.max_steps) = (0, Some(1));
    let next = next.with_adapter().unwrap();
    assert_eq!(next.lora.target_parameters, ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]);
    train(&next, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let start = metrics(&next.output_dir).iter().find_map(|line| line["eval_loss"].as_f64());
    assert!(start.is_some());
}

fn describe(lora: Lora, keys: Value) -> ottava_common::Result<ottava_recipe::param::Description> {
    let sizes = DecoderConfig { lora: Some(lora), ..config(keys) };
    Decoder::describe(&sizes, &recipe(RecipeName::Bf16, Fp8Format::Auto))
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

#[test]
fn targets_that_experts_cannot_have_are_errors() {
    let targets = |targets: &[&str]| Lora { targets: Targets::Names(names(targets)), ..Lora::default() };
    let ranks =
        |rank: usize, pattern: &str| Exceptions { ranks: [(pattern.into(), rank)].into(), ..Exceptions::default() };
    let gpt_oss = || routed(json!({"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 7}));
    for (lora, keys, words) in [
        (targets(&["gate_proj"]), routed(json!({})), "and not `up_proj`; experts have one adapter"),
        (targets(&["experts.2.down_proj"]), routed(json!({})), "`down_proj` of 1 of the 4 experts"),
        (targets(&["gate_proj"]), gpt_oss(), "`gate_proj` is no linear of this model's blocks"),
        (
            Lora { use_dora: true, ..Lora::default() },
            routed(json!({})),
            "`use_dora` is set, and `model.layers.0.mlp.gate.weight`",
        ),
        (
            Lora { parameters: names(&["experts.gate_proj"]), ..targets(&["q_proj"]) },
            gpt_oss(),
            "`experts.gate_proj` is no parameter of this model's blocks that can have an adapter, which are `experts.down_proj`, `experts.gate_up_proj`, \
             `k_proj.weight`",
        ),
        (
            Lora { exceptions: ranks(2, r"experts\.1\.gate_proj"), ..Lora::default() },
            routed(json!({})),
            "gives the linears of `model.layers.0.mlp.experts.gate_up_proj` different values",
        ),
    ] {
        let error = describe(lora.clone(), keys).unwrap_err().to_string();
        assert!(error.contains(words), "{lora:?}: {error}");
    }
}

/// As in PEFT, all linears of a model are also its experts and routers if PEFT translates their names.
#[test]
fn targets_reach_experts_as_in_peft() {
    let adapted = |lora: Lora, keys: Value| {
        let description = describe(lora.clone(), keys).unwrap();
        let experts = description.experts.iter().filter(|of| lora.of_experts(of).unwrap().is_some()).count();
        let routers = description.routers.iter().filter(|router| lora.has_router(router)).count();
        [experts, routers]
    };
    let of = |targets: Targets, parameters: &[&str]| Lora { targets, parameters: names(parameters), ..Lora::default() };
    let pattern = |text: &str| Targets::Pattern(ottava_recipe::lora::Pattern::new(text).unwrap());
    let qwen2 = || routed(json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}));
    for (lora, keys, expected) in [
        (of(Targets::AllLinear, &[]), routed(json!({})), [4, 2]),
        (of(Targets::AllLinear, &[]), qwen2(), [0, 0]),
        (of(Targets::AllLinear, &["experts.gate_up_proj", "mlp.gate.weight"]), qwen2(), [2, 2]),
        (of(Targets::Names(names(&["q_proj", "down_proj"])), &[]), routed(json!({})), [2, 0]),
        (of(pattern(r".*\.1\..*experts.*_proj"), &[]), routed(json!({})), [2, 0]),
        (of(Targets::NONE, &["model.layers.1.mlp.experts.down_proj"]), routed(json!({})), [1, 0]),
    ] {
        assert_eq!(adapted(lora.clone(), keys), expected, "{lora:?}");
    }
    let found = |lora: Lora| {
        let description = describe(lora.clone(), routed(json!({}))).unwrap();
        lora.of_experts(&description.experts[0]).unwrap().unwrap()
    };
    // The adapter of gate and up has the ranks of both.
    let both = found(Lora { r: 4, alpha: 6.0, ..Lora::default() });
    assert_eq!((both.rank, both.alpha, both.scale), (8, 12.0, 1.5));
    let one = found(Lora { r: 4, alpha: 6.0, parameters: names(&["experts.gate_up_proj"]), ..Lora::default() });
    assert_eq!((one.rank, one.scale), (4, 1.5));
}

/// A plan counts all adapters, and the operations of those that a token chooses.
#[test]
fn plans_count_the_adapters_of_experts() {
    let attention = Lora { targets: Targets::Names(names(&["q_proj"])), ..Lora::default() };
    let all = Lora { parameters: names(&["experts.gate_up_proj", "experts.down_proj"]), ..attention.clone() };
    let [plain, with] = [attention, all].map(|lora| describe(lora, routed(json!({}))).unwrap());
    // Two layers of four experts of rank 8 with 128 channels and 64 hidden values.
    let of_expert = 8 * (128 + 2 * 64 + 64 + 128);
    assert_eq!(with.parameters - plain.parameters, 2 * 4 * of_expert);
    assert_eq!(with.flops_per_token(16) - plain.flops_per_token(16), (6 * 2 * 2 * of_expert) as f64);
}
