//! Adapters on the FP8 weights of a folder: frozen weights keep the folder's codes if the recipe has the same scales.

use crate::setup::{devices, gradients, largest_error, losses_and_gradients, recipe};
use ottava_checkpoint::{AdaptedWeights, FolderWeights, RandomWeights};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, FolderCounts, decoder_config};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{FolderUse, Loan, MemoryPolicy, Param, Purpose, WeightCast};
use ottava_recipe::scaling::Casts;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::fp8::E4M3;
use ottava_tensor::ops::{Operand, dequantize, transpose};
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{DType, Device};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The number of rows and of columns of all matrices of blocks.
const SIZE: usize = 128;

fn keys() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": SIZE, "intermediate_size": SIZE,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    })
}

/// Returns codes far below the largest code. A cast of their dequantized values would have another scale and other codes.
fn codes_of(name: &str) -> Vec<u8> {
    let seed = name.bytes().fold(7u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let draw = |i: u32| seed.wrapping_add(i).wrapping_mul(2_654_435_761) >> 16;
    (0..(SIZE * SIZE) as u32).map(|i| (draw(i) % 0x30) as u8 | ((draw(i) >> 7) as u8 & 0x80)).collect()
}

/// Writes a folder whose linears are in FP8 as `settings` say, with scales of this `shape`. If `equal` is set, the scales of all linears are equal.
/// Returns the scales.
fn write(folder: &Path, settings: Value, shape: &[usize], equal: bool) -> BTreeMap<String, Vec<f32>> {
    let mut config = keys();
    config["quantization_config"] = settings;
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let sizes = sizes(folder, None);
    let (mut header, mut data, mut scales) = (serde_json::Map::new(), Vec::new(), BTreeMap::new());
    let mut add = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let start = data.len();
        data.extend(bytes);
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    };
    let f32s = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let folder_tensors = Decoder::folder_tensors(&sizes, &recipe(RecipeName::Bf16, Fp8Format::Auto)).unwrap();
    for (number, tensor) in folder_tensors.iter().enumerate() {
        let (name, elements) = (&tensor.name, tensor.elements());
        match name.strip_suffix("_proj.weight") {
            Some(linear) => {
                add(name, "F8_E4M3", &tensor.shape, codes_of(name));
                let of = |i: usize| 0.01 * (1.0 + 0.1 * if equal { 0.0 } else { (number + i) as f32 });
                let own: Vec<f32> = (0..shape.iter().product()).map(of).collect();
                add(&format!("{linear}_proj.weight_scale"), "F32", shape, f32s(&own));
                scales.insert(name.clone(), own);
            }
            None => {
                let values: Vec<f32> = (0..elements)
                    .map(|i| if tensor.shape.len() == 1 { 1.0 } else { (i % 7) as f32 * 0.1 - 0.3 })
                    .collect();
                add(name, "F32", &tensor.shape, f32s(&values));
            }
        }
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    scales
}

fn sizes(folder: &Path, lora: Option<Lora>) -> DecoderConfig {
    DecoderConfig { lora, ..decoder_config(&ConfigFile::read(folder).unwrap()).unwrap() }
}

fn adapted(folder: &Path, name: RecipeName, frozen_values: bool, device: &Device) -> Decoder {
    let lora =
        Lora { r: 4, alpha: 8.0, use_rslora: false, use_dora: false, targets: Targets::AllLinear, ..Lora::default() };
    let sizes = sizes(folder, Some(lora));
    let mut base = FolderWeights::open(folder).unwrap().on(device);
    let mut weights = AdaptedWeights::new(&mut base, None, RandomWeights { seed: 1, device: Device::Cpu }, false);
    let purpose = Purpose::Train(MemoryPolicy { frozen_values, ..MemoryPolicy::FULL });
    let recipe = recipe(name, Fp8Format::Auto);
    let mut model = Decoder::new(&sizes, &recipe, device, purpose, 16, &mut weights).unwrap();
    drop(weights);
    base.finish(&sizes).unwrap();
    model.quantize_weights().unwrap();
    model
}

fn settings(strategy: &str) -> Value {
    match strategy {
        "blocks" => json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
        "tensor" => json!({"quant_method": "fp8", "activation_scheme": "dynamic"}),
        _ => json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": strategy}}}}),
    }
}

#[test]
fn frozen_weights_keep_the_codes_of_a_folder() {
    for (strategy, shape, name) in [
        ("tensor", &[][..], RecipeName::Fp8Current),
        ("tensor", &[], RecipeName::Fp8Delayed),
        ("channel", &[SIZE, 1], RecipeName::Fp8Row),
        ("blocks", &[1, 1], RecipeName::Fp8Block),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let scales = write(folder.path(), settings(strategy), shape, strategy == "tensor");
        for device in devices() {
            let of = |frozen_values| {
                let mut model = adapted(folder.path(), name, frozen_values, &device);
                assert_eq!(model.folder_codes(), FolderCounts { kept: 4, recast: 0 }, "{strategy}");
                let exact = strategy != "channel";
                let mut other = adapted(folder.path(), name, true, &device);
                let mut casts = expect_codes(&mut model, &mut other.scaling().casts(Mode::EVALUATION), &scales, exact);
                assert_eq!(casts.len(), 4);
                let [inputs, targets] =
                    ["inputs", "targets"].map(|name| integers(name, 32, 96).to_device(&device).unwrap());
                let losses = losses_and_gradients(&mut model, &inputs, &targets, 2, 1.0 / 32.0).unwrap();
                casts.extend([values(&losses)]);
                casts.extend(gradients(&mut model).into_iter().map(|(_, gradient)| gradient));
                casts
            };
            assert!(of(false) == of(true), "{strategy} on {device}: values beside codes change bits");
        }
    }
}

/// Compares the codes of all frozen linears with the codes of the folder. Also compares the copy that dgrad reads with the dequantized values: it is
/// equal if `exact` is set, and otherwise cast with other scales. Returns the values that dgrad reads.
fn expect_codes(
    model: &mut Decoder,
    casts: &mut Casts,
    scales: &BTreeMap<String, Vec<f32>>,
    exact: bool,
) -> Vec<Vec<f64>> {
    let mut found = Vec::new();
    let is_kept = |param: &&mut Param| param.cast().and_then(WeightCast::folder_use) == Some(FolderUse::Kept);
    for param in model.all_parameters().into_iter().filter(is_kept) {
        let names: Vec<_> = param.identity.shards.iter().map(|shard| shard.tensor.name.clone()).collect();
        let forward = param.codes_for_forward(Loan::none(), casts).unwrap();
        let bytes: Vec<u8> = names.iter().flat_map(|name| codes_of(name)).collect();
        assert!(forward.codes.as_ref().unwrap().read_bytes().unwrap() == bytes, "{}", param.identity.name());
        let stored: Vec<f64> = names
            .iter()
            .flat_map(|name| {
                let scales = &scales[name];
                let value = |(i, code): (usize, &u8)| f64::from(E4M3(*code).to_f32() * scales[i / SIZE % scales.len()]);
                codes_of(name).iter().enumerate().map(value).collect::<Vec<_>>()
            })
            .collect();
        let of_codes = dequantize(Operand::Rows(&forward), 1, DType::F32).unwrap();
        assert!(values(&of_codes) == stored, "{}", param.identity.name());
        let backward = param.codes_for_backward(Loan::none(), casts).unwrap();
        let of_codes = values(&transpose(&dequantize(Operand::Columns(&backward), 1, DType::F32).unwrap()).unwrap());
        let error = largest_error(&of_codes, &stored);
        // A cast to E4M3 changes a value by at most 1/16 of it, so no value changes by more than 0.0625 of the largest. Changes of up to 0.049 are
        // seen.
        assert!(if exact { error == 0.0 } else { error > 1e-4 && error < 0.07 }, "{}: {error}", param.identity.name());
        found.push(of_codes);
    }
    found
}

#[test]
fn codes_with_other_scales_than_the_recipe_are_cast_again() {
    for (strategy, shape, equal, name, kept) in [
        ("tensor", &[][..], true, RecipeName::Fp8Block, 0),
        ("channel", &[SIZE, 1], true, RecipeName::Fp8Current, 0),
        ("blocks", &[1, 1], true, RecipeName::Fp8Current, 0),
        // If fused weights have one scale each, only weights that are not fused keep their codes.
        ("tensor", &[], false, RecipeName::Fp8Current, 2),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), settings(strategy), shape, equal);
        let model = adapted(folder.path(), name, false, &Device::Cpu);
        assert_eq!(model.folder_codes(), FolderCounts { kept, recast: 4 - kept }, "{strategy} with {}", name.as_str());
    }
}
