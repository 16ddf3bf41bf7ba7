//! QLoRA: adapters beside frozen weights in four bits, compared with bitsandbytes and PEFT.

use super::lora::{adapter_run, base};
use crate::models::recorded::Recorded;
use crate::parallel::divided::{F32, Setup, adapters, llama, train as parallel_train};
use crate::runs::resume::{metrics, train, write_inputs};
use crate::setup::{Training, largest_error, on_ranks, recipe};
use ottava_checkpoint::FolderWeights;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::{LayerAxes, Zero};
use ottava_recipe::lora::{Lora, PEFT_PREFIX};
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Purpose, WeightSource};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{LoraConfig, ResolvedConfig};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::ops::{dequantize_nf4, nf4_levels, nf4_of_parts, quantize_nf4};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Nf4Tensor, Tensor};
use ottava_train::plan::MemoryPlan;
use ottava_train::trainer::Start;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

const CASE: &str = "qlora";

fn recorded() -> Recorded {
    Recorded::open("referee_qlora", CASE)
}

/// The codes of whole blocks, of an incomplete block, and of a matrix in BF16 equal bitsandbytes', and so do the values of its codes and scales, bit for
/// bit. The mean of amaxes is a sum in another order.
#[test]
fn codes_and_values_are_those_of_bitsandbytes() {
    assert_eq!(nf4_levels()[16..], recorded().tensor("levels").to_vec::<f32>().unwrap());
    for name in ["wide", "odd", "rounded"] {
        let matrix = recorded().tensor(&format!("matrices/{name}"));
        let packed = quantize_nf4(&matrix).unwrap();
        let named = |what: &str| recorded().tensor(&format!("{what}/{name}"));
        let expected = |what: &str| recorded().values(&format!("{what}/{name}"));
        let [codes, scales] = ["codes", "scales"].map(|what| named(what).to_vec::<u8>().unwrap());
        let [groups, mean] = ["groups", "mean"].map(|what| named(what).to_vec::<f32>().unwrap());
        assert_eq!(packed.codes.to_vec::<u8>().unwrap(), codes, "{name}");
        // bitsandbytes' kernel for CPUs takes the other neighbour of a few amaxes that lie near a midpoint.
        let own = packed.scales.to_vec::<u8>().unwrap();
        let apart: Vec<u8> = own.iter().zip(&scales).map(|(a, b)| a.abs_diff(*b)).filter(|apart| *apart > 0).collect();
        assert!(apart.len() * 50 <= own.len() && apart.iter().all(|apart| *apart == 1), "{name}: {apart:?}");
        assert!(largest_error(&values(&packed.groups), &expected("groups")) < 1e-6, "{name}");
        assert!((packed.mean / mean[0] - 1.0).abs() < 1e-6, "{name}: {} for {mean:?}", packed.mean);
        let shape = matrix.dims("matrix").unwrap();
        let packed = nf4_of_parts(&Device::Cpu, shape, (&codes, &scales, &groups), mean[0]).unwrap();
        for (dtype, named) in [(DType::F32, "float32"), (DType::BF16, "bfloat16")] {
            let got = values(&dequantize_nf4(std::slice::from_ref(&packed), dtype).unwrap());
            assert!(got == expected(&format!("values/{named}")), "{name} in {named}");
        }
    }
}

fn training(name: RecipeName, four_bit: bool) -> Training {
    training_from(name, four_bit, &mut recorded())
}

fn training_from(name: RecipeName, four_bit: bool, weights: &mut dyn WeightSource) -> Training {
    let lora = Some(Lora { r: 6, alpha: 8.0, ..Lora::default() });
    let sizes = DecoderConfig { lora, ..recorded().sizes() };
    let purpose = Purpose::Train(MemoryPolicy { four_bit, ..MemoryPolicy::FULL });
    let recipe = recipe(name, Fp8Format::Auto);
    let mut decoder = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 32, weights).unwrap();
    decoder.quantize_weights().unwrap();
    Training::new(decoder)
}

/// Writes the base model as bitsandbytes saved it.
fn write_base(folder: &Path) {
    let file = std::fs::read(Recorded::path_of("referee_qlora")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let own = tensors.tensors().into_iter();
    let own = own.filter_map(|(name, view)| Some((name.strip_prefix("qlora/folder/")?.to_string(), view)));
    safetensors::serialize_to_file(own, None, &folder.join("model.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    let mut config: Value = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["qlora/config"]).unwrap();
    config["quantization_config"] = json!({
        "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": true, "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0, "llm_int8_skip_modules": null,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// The weights of a folder of bitsandbytes, beside the recorded adapters.
struct Beside {
    folder: FolderWeights,
    adapters: Recorded,
}

impl WeightSource for Beside {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        match tensor.name.starts_with(PEFT_PREFIX) {
            true => self.adapters.read(tensor, elements, init),
            false => self.folder.read(tensor, elements, init),
        }
    }

    fn packed(&mut self, tensor: &FolderTensor, device: &Device) -> ottava_common::Result<Option<Nf4Tensor>> {
        self.folder.packed(tensor, device)
    }
}

/// Checks that a run holds the values of the folder, although the mean of their amaxes would be another.
fn expect_codes_of_folder_in_runs(folder: &Path) {
    let folder = folder.to_path_buf();
    let held = on_ranks(1, move |comm| {
        let lora = Some(Lora { r: 6, alpha: 8.0, ..Lora::default() });
        let mut setup = Setup::new(llama(json!({})), RecipeName::Fp32);
        setup.mesh.sizes = DecoderConfig { lora, ..recorded().sizes() };
        setup.mesh.memory.four_bit = true;
        let ranks = setup.mesh.join(comm);
        let axis = Rc::new(LayerAxes::new(ranks.clone()));
        let mut weights = Beside { folder: FolderWeights::open(&folder).unwrap(), adapters: recorded() };
        let mut model = setup.mesh.build(&ranks, &setup.mesh.spans(0), axis, &mut weights).model;
        let mut held = BTreeMap::new();
        for param in model.all_parameters().into_iter().filter(|param| param.weights.are_packed()) {
            let (values, last) = (values(&param.weights.value().unwrap()), param.identity.shards.last().unwrap());
            held.insert(last.tensor.name.clone(), values[values.len() - last.elements()..].to_vec());
        }
        ranks.finish().unwrap();
        held
    });
    assert_eq!(held[0].len(), 2 * 4, "the fused linears of two blocks");
    for (name, held) in &held[0] {
        assert!(*held == recorded().values(&format!("stored/{name}")), "{name}");
    }
}

/// Codes and scales of the folder are kept. Without `load_in_4bit`, their values are.
#[test]
fn folders_of_bitsandbytes_are_read_and_trained_beside() {
    let folder = tempfile::tempdir().unwrap();
    write_base(folder.path());
    let weights = || FolderWeights::open(folder.path()).unwrap();
    weights().finish(&recorded().sizes()).unwrap_err();
    FolderWeights::check(folder.path(), &recorded().sizes(), &recipe(RecipeName::Fp32, Fp8Format::Auto)).unwrap();
    let beside = |four_bit| {
        let mut weights = Beside { folder: weights(), adapters: recorded() };
        losses(training_from(RecipeName::Fp32, four_bit, &mut weights))
    };
    let kept = beside(true);
    let error = apart(&kept, &recorded().values("losses"));
    assert!(error < 1e-5, "losses are {error:e} apart");
    assert_eq!(beside(false), kept, "the values are the same in F32");
    expect_codes_of_folder_in_runs(folder.path());

    let file = folder.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let level = nf4_levels()[8].to_le_bytes();
    let at = whole.windows(4).position(|bytes| bytes == level).expect("a table of values");
    std::fs::write(&file, [&whole[..at], &0.08f32.to_le_bytes(), &whole[at + 4..]].concat()).unwrap();
    let error = FolderWeights::open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("quant_map` has other values than NF4"), "{error}");
    std::fs::write(&file, whole).unwrap();

    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    for (from, to, words) in
        [("\"nf4\"", "\"fp4\"", "NF4 is read"), ("\"load_in_4bit\":true", "\"load_in_4bit\":false", "the 8-bit or FP4")]
    {
        std::fs::write(&config, text.replace(from, to)).unwrap();
        let error = FolderWeights::open(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.contains(words), "{to}: {error}");
    }
}

/// Returns the losses of the recorded steps.
fn losses(mut training: Training) -> Vec<f64> {
    let ids = recorded().tensor("ids");
    let [steps, rows, length] = ids.dims("ids").unwrap();
    let of_step = |step: usize| {
        let ids = ids.rows(step, step + 1).unwrap().to_vec::<i32>().unwrap();
        [0, 1].map(|skip| {
            let row = |row: &[i32]| row[skip..skip + length - 1].to_vec();
            let ids: Vec<i32> = ids.chunks_exact(length).flat_map(row).collect();
            Tensor::from_slice(&Device::Cpu, &[ids.len()], &ids).unwrap()
        })
    };
    (0..steps).map(|step| training.step(&of_step(step), rows)).collect()
}

fn apart(got: &[f64], expected: &[f64]) -> f64 {
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn twenty_steps_beside_four_bit_weights_lose_what_they_lose_in_peft() {
    let expected = recorded().values("losses");
    let error = apart(&losses(training(RecipeName::Fp32, true)), &expected);
    // A few scales differ by one code, and sums in F32 have another order: 4.9e-5 is seen.
    assert!(error < 1e-4, "losses are {error:e} apart");
    let whole = apart(&losses(training(RecipeName::Fp32, false)), &expected);
    assert!(whole > 1e-3, "weights that are not in four bits go unnoticed: {whole:e}");
    for (name, allowed) in [(RecipeName::Bf16, 2e-3), (RecipeName::Fp8Current, 2e-2), (RecipeName::Fp8Row, 2e-2)] {
        let error = apart(&losses(training(name, true)), &expected);
        assert!(error < allowed, "{}: losses are {error:e} apart", name.as_str());
    }
}

#[test]
fn ranks_and_recomputation_read_the_same_values() {
    let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
    (alone.mesh.memory.four_bit, alone.mesh.sizes.lora) = (true, adapters(false));
    for (mesh, zero) in
        [([2, 1, 1, 1], Zero::Gradients), ([1, 2, 1, 1], Zero::OptimizerStates), ([1, 1, 2, 1], Zero::Nothing)]
    {
        alone.mesh.zero = zero;
        let (apart, tensor_name) = crate::parallel::divided::apart(&alone, mesh);
        assert!(apart < F32, "{mesh:?}, {zero:?}: {tensor_name} is {apart:.1e} apart");
    }
    let mut losses = |recompute, four_bit| {
        (alone.mesh.memory.recompute, alone.mesh.memory.four_bit) = (recompute, four_bit);
        parallel_train(&alone)["losses and norms"].clone()
    };
    let kept = losses(Recompute::None, true);
    assert_eq!(losses(Recompute::Full, true), kept);
    assert_ne!(losses(Recompute::None, false), kept);
}

#[test]
fn runs_beside_four_bit_weights_resume_exactly() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let run = |output: &str| {
        let mut run = adapter_run(inputs.path(), &base, &inputs.path().join(output), RecipeName::Fp8Current);
        run.lora.load_in_4bit = true;
        run
    };
    let (straight, split, mut whole) = (run("straight"), run("split"), run("whole"));
    whole.lora.load_in_4bit = false;
    train(&whole, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir));
    assert_ne!(metrics(&straight.output_dir), metrics(&whole.output_dir), "the base is in four bits");
}

/// A weight takes 4.127 bits: a code of 4 bits, an eighth of a bit for its block's scale, and a share of a group. The memory is planned for a GPU.
#[test]
fn four_bit_weights_take_little_more_than_half_a_byte() {
    const LAYERS: usize = 16;
    let plan = |load_in_4bit: bool| {
        let mut config = crate::runs::resume::config(Path::new("none"), Path::new("none"), RecipeName::Bf16);
        config.checkpoint.async_save = Some(false);
        config.lora = LoraConfig { r: 2, load_in_4bit, ..LoraConfig::default() };
        let keys = serde_json::json!({"hidden_size": 256, "intermediate_size": 1024, "head_dim": 32});
        let sizes = crate::setup::tiny_llama_with(keys).with_layers(LAYERS);
        let sizes = DecoderConfig { lora: config.lora.adapters(), ..sizes };
        let gpu = Device::dry_gpu(GpuModel::h200());
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &gpu).unwrap();
        let frozen = plan.lines.iter().filter(|line| line.what.starts_with("frozen weights"));
        let linears = Decoder::describe(&sizes, &recipe(RecipeName::Bf16, Fp8Format::Auto)).unwrap();
        let of_block: usize = linears.block_linears().map(|site| site.outputs * site.inputs).sum();
        (frozen.map(|line| line.bytes).sum::<u64>() as f64, (LAYERS * of_block) as f64)
    };
    let ((whole, weights), (packed, _)) = (plan(false), plan(true));
    let bits = 8.0 * (packed - (whole - 2.0 * weights)) / weights;
    // The tables of levels and the gaps of small tensors add to 4.127 bits.
    assert!((4.12..4.4).contains(&bits), "{bits} bits of a weight");
}
