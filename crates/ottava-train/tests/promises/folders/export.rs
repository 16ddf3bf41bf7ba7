//! Exported folders: the schema of each format, the codes of training, how engines load them, and reading them back.

use crate::runs::resume::{config, train, write_inputs};
use crate::setup::logits;
use ottava_checkpoint::slices::{FOLDER, SliceFiles};
use ottava_checkpoint::{FolderWeights, Manifest, ModelFiles, WeightFiles, training};
use ottava_common::{Error, Result};
use ottava_convert::export::{Convention, Fp8Format, Report, Scheme, Source, export};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Loan, Param, Purpose};
use ottava_recipe::{Delayed, ExceptionsConfig, Precision, Recipe, RecipeName};
use ottava_settings::{RunConfig, WeightInit};
use ottava_tensor::fp8::E4M3;
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Granularity, Tensor};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const FORMATS: [(Convention, Scheme); 7] = [
    (Convention::DeepSeek, Scheme::Block),
    (Convention::CompressedTensors, Scheme::Dynamic),
    (Convention::CompressedTensors, Scheme::Static),
    (Convention::CompressedTensors, Scheme::Block),
    (Convention::ModelOpt, Scheme::Static),
    (Convention::ModelOpt, Scheme::Dynamic),
    (Convention::ModelOpt, Scheme::Block),
];

/// The name of a weight `[128, 256]`.
pub const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

/// Makes a folder with inputs of runs. The MLPs of the model have `intermediate` channels, so weights have whole 128x128 blocks if `intermediate`
/// allows it.
pub fn inputs(intermediate: usize) -> tempfile::TempDir {
    inputs_of(intermediate, [4, 2], 64)
}

fn inputs_of(intermediate: usize, [heads, kv_heads]: [usize; 2], head_dim: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let config = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
        "intermediate_size": intermediate, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "unknown_key": "kept"});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Trains two steps and returns the path of the checkpoint.
pub fn checkpoint(inputs: &Path, precision: Precision) -> PathBuf {
    let output = inputs.join(format!("run-{}-{}", precision.recipe.as_str(), precision.power_of_two_scales));
    let mut config = RunConfig { precision, ..config(inputs, &output, RecipeName::Bf16) };
    config.training.max_steps = Some(2);
    config.training.per_device_train_batch_size = 2;
    config.data.val_set_size = 0.0;
    train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    output.join("checkpoints/checkpoint-2")
}

pub fn precision(recipe: RecipeName) -> Precision {
    Precision {
        recipe,
        delayed: Delayed { amax_history_len: 3, ..Delayed::default() },
        power_of_two_scales: recipe == RecipeName::Fp8Block,
        ..Precision::default()
    }
}

pub fn exported(folder: &Path, (layout, scheme): (Convention, Scheme), output: &Path) -> Result<Report> {
    let source = Source::open(folder)?;
    // Runs without static scales get scales that no run has measured.
    let mut scales = source.input_scales()?;
    if scales.is_empty() {
        let linears = Decoder::describe(&source.sizes, &source.recipe).unwrap().linears;
        scales = linears.into_iter().enumerate().map(|(i, (site, _))| (site.name, 0.5 + i as f32)).collect();
    }
    export(&source, Some(Fp8Format { layout, scheme }), &scales, output)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn numbers(files: &ModelFiles, name: &str) -> Vec<f32> {
    files.read(name).unwrap().chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Loads the model of a checkpoint with its codes, as a resumed run does.
fn resumed(folder: &Path, recipe: &Recipe) -> Decoder {
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let mut weights = FolderWeights::open(folder).unwrap();
    let mut decoder = Decoder::new(&sizes, recipe, &Device::Cpu, Purpose::Infer, 16, &mut weights).unwrap();
    if recipe.name == RecipeName::Fp8Delayed {
        let progress = training::progress(folder, &Manifest::read(folder).unwrap().unwrap()).unwrap();
        let files = SliceFiles::open(&folder.join(FOLDER)).unwrap();
        let array = |name: &str| {
            let info = files.info(name)?;
            Ok(Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?)
        };
        decoder.scaling().restore(&progress.scaling_slots, array).unwrap();
    }
    decoder.quantize_weights().unwrap();
    decoder
}

/// Returns the codes and scales of each FP8 weight that products of a resumed run read, by its name in a folder.
pub fn codes_of_training(folder: &Path, recipe: &Recipe) -> BTreeMap<String, (Vec<u8>, Vec<f32>)> {
    let mut decoder = resumed(folder, recipe);
    let mut found = BTreeMap::new();
    let names: Vec<String> =
        decoder.description().linears.iter().map(|(site, _)| format!("{}.weight", site.parts[0])).collect();
    let codes: Vec<_> = {
        let (params, scaling) = decoder.parameters_and_scaling();
        let mut casts = scaling.casts(Mode::TRAINING);
        let cast = params.into_iter().filter(|param| names.contains(&param.identity.name().to_string()));
        cast.map(|param: &mut Param| {
            (param.identity.shards.clone(), param.codes_for_forward(Loan::none(), &mut casts).unwrap())
        })
        .collect()
    };
    for (shards, codes) in codes {
        let (bytes, scales) = (codes.codes.as_ref().unwrap(), values(&codes.scale_inv));
        let (pitch, mut row) = (bytes.shape()[1], 0);
        let bytes = bytes.read_bytes().unwrap();
        for shard in shards {
            let rows = row..row + shard.shape()[0];
            row = rows.end;
            let own =
                bytes[rows.start * pitch..rows.end * pitch].chunks(pitch).flat_map(|r| r[..codes.columns].to_vec());
            let scales: Vec<f64> = match codes.granularity {
                Granularity::PerTensor => scales.clone(),
                Granularity::PerRow => scales[rows.clone()].to_vec(),
                _ => {
                    let pitch = codes.scale_inv.shape()[1];
                    let blocks = scales[rows.start / 128 * pitch..rows.end / 128 * pitch].chunks(pitch);
                    blocks.flat_map(|row| row[..codes.columns / 128].to_vec()).collect()
                }
            };
            found.insert(shard.tensor.name, (own.collect(), scales.into_iter().map(|scale| scale as f32).collect()));
        }
    }
    found
}

#[test]
fn exported_codes_are_those_of_training() {
    use Convention::{CompressedTensors, DeepSeek, ModelOpt};
    use Scheme::{Block, Dynamic, Static};
    let inputs = inputs(256);
    let blocks = [(DeepSeek, Block), (CompressedTensors, Block), (ModelOpt, Block)];
    for (recipe, power_of_two_scales, formats) in [
        (RecipeName::Fp8Delayed, false, &[(ModelOpt, Static), (CompressedTensors, Static)][..]),
        (RecipeName::Fp8Current, false, &[(CompressedTensors, Static)]),
        (RecipeName::Fp8Row, false, &[(CompressedTensors, Dynamic), (ModelOpt, Dynamic)]),
        (RecipeName::Fp8Row, true, &[(CompressedTensors, Dynamic)]),
        (RecipeName::Fp8Block, false, &blocks),
        (RecipeName::Fp8Block, true, &blocks),
    ] {
        let precision = Precision { power_of_two_scales, ..precision(recipe) };
        let folder = checkpoint(inputs.path(), precision.clone());
        let trained = codes_of_training(&folder, &precision.recipe());
        assert_eq!(trained.len(), 14);
        let output = |what: String| inputs.path().join(format!("{}-{power_of_two_scales}-{what}", recipe.as_str()));
        for (layout, scheme) in formats {
            let (output, format) = (output(format!("{layout:?}")), Fp8Format { layout: *layout, scheme: *scheme });
            let report = exported(&folder, (*layout, *scheme), &output).unwrap();
            assert!(report.linears.iter().all(|linear| linear.recast.is_none()), "{report:?}");
            let files = ModelFiles::open(&output).unwrap();
            for (name, (codes, scales)) in &trained {
                assert_eq!(&files.read(name).unwrap(), codes, "{name} with {} in {format:?}", recipe.as_str());
                let scale = format.scale_name(name.strip_suffix(".weight").unwrap());
                assert_eq!(&numbers(&files, &scale), scales, "{scale} with {} in {format:?}", recipe.as_str());
                let all_powers = scales.iter().all(|scale| scale.log2().fract() == 0.0);
                assert_eq!(all_powers, power_of_two_scales, "{scale}: {scales:?}");
            }
            if recipe == RecipeName::Fp8Delayed {
                // The scales of inputs also equal the scales of training.
                let source = Source::open(&folder).unwrap();
                let scale = 1.0 / source.delayed["model.layers.1.self_attn.qkv_proj.input"];
                assert_eq!(numbers(&files, "model.layers.1.self_attn.k_proj.input_scale"), [scale]);
                assert!(scale > 0.0 && scale < 1.0, "{scale}");
            }
        }
        // Weights with another kind of scales are cast again, and the export says so.
        let other = (CompressedTensors, if formats[0].1 == Dynamic { Block } else { Dynamic });
        let report = exported(&folder, other, &output("other".into())).unwrap();
        let expected = format!("cast again from the weights: the run's recipe {}", recipe.as_str());
        assert!(
            report.linears.iter().all(|linear| linear.recast.as_ref().unwrap().starts_with(&expected)),
            "{report:?}"
        );
    }
}

/// Checks the settings, names, types and shapes that the tables of readers require.
#[test]
fn each_format_has_the_schema_of_its_readers() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let compressed = |weights: Value, activations: Value| {
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
            "kv_cache_scheme": null, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
            "input_activations": activations, "output_activations": null}}})
    };
    let number = |fields: Value| {
        let mut number = json!({"num_bits": 8, "type": "float", "symmetric": true});
        number.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        number
    };
    let modelopt = |algorithm: &str| {
        json!({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "ottava 0.1.0"}})
    };
    let settings = [
        json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"]}),
        compressed(
            number(json!({"dynamic": false, "strategy": "channel"})),
            number(json!({"dynamic": true, "strategy": "token"})),
        ),
        compressed(
            number(json!({"dynamic": false, "strategy": "tensor"})),
            number(json!({"dynamic": false, "strategy": "tensor"})),
        ),
        compressed(
            number(json!({"dynamic": false, "strategy": "block", "block_structure": [128, 128]})),
            number(json!({"dynamic": true, "strategy": "group", "group_size": 128})),
        ),
        modelopt("FP8"),
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        modelopt("FP8_PB_WO"),
    ];
    // The shapes are for the up projection of an MLP, [256, 128].
    let shapes: [&[usize]; 7] = [&[2, 1], &[256, 1], &[1], &[2, 1], &[], &[256], &[2, 1, 1, 1]];
    for (i, (format, (settings, shape))) in FORMATS.into_iter().zip(settings.into_iter().zip(shapes)).enumerate() {
        let output = inputs.path().join(format!("format-{i}"));
        exported(&folder, format, &output).unwrap();
        let config = json_of(&output.join("config.json"));
        assert_eq!(config["quantization_config"], settings, "{format:?}");
        assert_eq!((&config["dtype"], &config["unknown_key"]), (&json!("bfloat16"), &json!("kept")));
        let beside = output.join("hf_quant_config.json");
        assert_eq!(beside.is_file(), format.0 == Convention::ModelOpt);
        if format.0 == Convention::ModelOpt {
            let expected = json!({"producer": settings["producer"], "quantization": {"quant_algo": settings["quant_algo"],
                "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]}});
            assert_eq!(json_of(&beside), expected);
        }
        assert!(output.join("tokenizer.json").is_file() && !output.join("training").exists());

        let (files, ending) = (ModelFiles::open(&output).unwrap(), if i == 0 { "_inv" } else { "" });
        let mut expected = BTreeMap::new();
        let source = ModelFiles::open(&folder).unwrap();
        for name in source.names() {
            let linear = name.strip_suffix(".weight").filter(|name| name.ends_with("_proj"));
            let dtype = if linear.is_some() { DType::E4M3 } else { DType::BF16 };
            expected.insert(name.to_string(), (dtype, Some(source.info(name).unwrap().shape)));
            let Some(linear) = linear else { continue };
            let own = linear.ends_with("up_proj").then(|| shape.to_vec());
            expected.insert(format!("{linear}.weight_scale{ending}"), (DType::F32, own));
            if format.1 == Scheme::Static {
                expected.insert(format!("{linear}.input_scale"), (DType::F32, Some(shape.to_vec())));
            }
        }
        for name in files.names() {
            let info = files.info(name).unwrap();
            let (dtype, shape) = expected.remove(name).unwrap_or_else(|| panic!("{format:?}: {name} is not expected"));
            assert_eq!(info.dtype, dtype, "{name}");
            assert!(shape.is_none_or(|shape| shape == info.shape), "{format:?}: {name} has shape {:?}", info.shape);
        }
        assert!(expected.is_empty(), "{format:?} lacks {expected:?}");
    }
}

/// vLLM fuses q, k and v, and gate and up. It casts them again by the largest of their scales unless their scales are equal.
#[test]
fn linears_that_engines_fuse_share_their_scales() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    for (i, layout) in [Convention::CompressedTensors, Convention::ModelOpt].into_iter().enumerate() {
        let output = inputs.path().join(format!("static-{i}"));
        exported(&folder, (layout, Scheme::Static), &output).unwrap();
        let files = ModelFiles::open(&output).unwrap();
        for (module, parts) in [("self_attn", &["q", "k", "v"][..]), ("mlp", &["gate", "up"])] {
            for scale in ["weight_scale", "input_scale"] {
                let of = |part: &&str| numbers(&files, &format!("model.layers.1.{module}.{part}_proj.{scale}"));
                let all: Vec<_> = parts.iter().map(of).collect();
                assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{module} {scale}: {all:?}");
            }
        }
    }
}

/// transformers and vLLM reject cut blocks, and load a scale only if the weight has codes.
#[test]
fn weights_without_whole_blocks_stay_in_bf16_and_are_listed() {
    let inputs = inputs(192);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let output = inputs.path().join("exported");
    let report = exported(&folder, FORMATS[0], &output).unwrap();
    let listed = &json_of(&output.join("config.json"))["quantization_config"]["modules_to_not_convert"];
    let names = |layer: usize| ["gate", "up", "down"].map(|part| format!("model.layers.{layer}.mlp.{part}_proj"));
    let expected: Vec<String> = names(0).into_iter().chain(names(1)).chain(["lm_head".into()]).collect();
    assert_eq!(*listed, json!(expected));
    let reasons: Vec<_> = report.left.iter().map(|left| left.reason.as_str()).collect();
    assert!(
        reasons[0].starts_with("gate_proj has 192 outputs, no multiple of 128, and linears that engines fuse"),
        "{reasons:?}"
    );
    assert!(reasons[2].starts_with("down_proj has 192 inputs, no multiple of 128"), "{reasons:?}");
    let files = ModelFiles::open(&output).unwrap();
    for name in files.names() {
        let Some(linear) = name.strip_suffix("_inv").and_then(|name| name.strip_suffix(".weight_scale")) else {
            continue;
        };
        assert_eq!(files.info(&format!("{linear}.weight")).unwrap().dtype, DType::E4M3, "{name} has no codes");
    }
    for name in &expected[..6] {
        assert_eq!(files.info(&format!("{name}.weight")).unwrap().dtype, DType::BF16);
        assert!(files.info(&format!("{name}.weight_scale_inv")).is_err(), "{name} has a scale");
    }
    // Linears that the run computed in BF16 stay in BF16.
    let kept = Precision {
        exceptions: ExceptionsConfig { first_layers_bf16: 1, ..ExceptionsConfig::default() },
        ..precision(RecipeName::Fp8Row)
    };
    let report = exported(&checkpoint(inputs.path(), kept), FORMATS[1], &inputs.path().join("kept")).unwrap();
    assert_eq!(report.left.iter().filter(|left| left.reason == "in the run too: first_layers_bf16 = 1").count(), 7);
    assert_eq!(report.linears.len(), 4);
}

/// Exceptions hold in all formats, for all casts of the run, and when the exported folder is exported again.
#[test]
fn linears_that_an_export_excepts_stay_in_bf16() {
    let inputs = inputs(256);
    for recipe in [RecipeName::Bf16, RecipeName::Fp8Block] {
        let folder = checkpoint(inputs.path(), precision(recipe));
        let mut source = Source::open(&folder).unwrap();
        source.leave(&["first_layers_bf16=1".into(), "high_precision_layers=[\"*.o_proj\"]".into()]).unwrap();
        let scales = Decoder::describe(&source.sizes, &source.recipe).unwrap().linears;
        let scales = scales.into_iter().map(|(site, _)| (site.name, 0.5)).collect();
        for (i, (layout, scheme)) in FORMATS.into_iter().enumerate() {
            let output = inputs.path().join(format!("{}-{i}", recipe.as_str()));
            let report = export(&source, Some(Fp8Format { layout, scheme }), &scales, &output).unwrap();
            let left: Vec<_> = report.left.iter().map(|left| (&left.name[..], &left.reason[..])).collect();
            assert_eq!((left.len(), report.linears.len()), (7 + 1 + 1, 3));
            assert_eq!(left[0], ("model.layers.0.self_attn.q_proj", "first_layers_bf16 = 1"));
            assert_eq!(left[7], ("model.layers.1.self_attn.o_proj", "`*.o_proj` of high_precision_layers"));
            let again = output.with_extension("again");
            let report = exported(&output, (layout, scheme), &again).unwrap();
            assert_eq!(
                (report.left.len(), &report.left[0].reason[..]),
                (9, "in the folder too"),
                "{layout:?} {scheme:?}"
            );
            let config = |folder: &Path| json_of(&folder.join("config.json"))["quantization_config"].clone();
            assert_eq!(config(&again), config(&output));
            let of =
                |folder: &Path| ModelFiles::open(folder).unwrap().read("model.layers.0.mlp.up_proj.weight").unwrap();
            assert_eq!(of(&again), of(&folder));
        }
    }
    let mut source = Source::open(&checkpoint(inputs.path(), precision(RecipeName::Fp8Row))).unwrap();
    for (setting, words) in [
        ("recipe=fp8-row", "an export sets only `high_precision_layers`, `first_layers_bf16` and `last_layers_bf16`"),
        ("high_precision_layers=[\"*.x_proj\"]", "`*.x_proj` matches no linear of this model"),
        ("max_steps=1", "only keys of [precision] are set here"),
    ] {
        let error = source.leave(&[setting.into()]).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
    }
}

/// The share of each rank has whole heads and whole blocks.
#[test]
fn the_largest_safe_tensor_parallelism_is_reported() {
    for (intermediate, heads, head_dim, expected) in [
        // A block of 128 rows of keys has two heads, and two ranks would cut it.
        (256, [4, 2], 64, [1, 4]),
        (512, [8, 4], 64, [2, 8]),
        // If there are more ranks than key heads, several ranks have the same key heads.
        (512, [4, 1], 128, [4, 4]),
        (384, [6, 3], 128, [3, 6]),
    ] {
        let inputs = inputs_of(intermediate, heads, head_dim);
        let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
        let ranks = [0, 1].map(|i| {
            exported(&folder, FORMATS[i], &inputs.path().join(format!("{i}"))).unwrap().tensor_parallel.unwrap()
        });
        assert_eq!(ranks, expected, "{intermediate} {heads:?}");
    }
}

/// Replaces a tensor of a folder by `weights`, BF16 `[128, 256]`.
pub fn replace(folder: &Path, name: &str, weights: impl Fn(usize) -> f32) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let stored = ModelFiles::open(folder).unwrap().read(name).unwrap();
    let at = bytes.windows(64).position(|window| window == &stored[..64]).unwrap();
    for (i, value) in bytes[at..at + stored.len()].chunks_mut(2).enumerate() {
        value.copy_from_slice(&half::bf16::from_f32(weights(i)).to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn folders_with_fp8_weights_are_read_as_their_values() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let ids = Tensor::from_slice(&Device::Cpu, &[16], &(1..17).collect::<Vec<i32>>()).unwrap();
    let sizes = decoder_config(&ConfigFile::read(&folder).unwrap()).unwrap();
    let logits_of = |folder: &Path, recipe: RecipeName| {
        let mut weights = FolderWeights::open(folder).unwrap();
        let recipe = precision(recipe).recipe();
        let mut decoder = Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 16, &mut weights).unwrap();
        weights.finish(&sizes).unwrap();
        decoder.quantize_weights().unwrap();
        values(&logits(&decoder, &ids))
    };
    let expected = logits_of(&folder, RecipeName::Bf16);
    for (i, format) in FORMATS.into_iter().enumerate() {
        let output = inputs.path().join(format!("exported-{i}"));
        let report = exported(&folder, format, &output).unwrap();
        let [worst, best] = [f64::max, f64::min]
            .map(|pick| report.linears.iter().map(|linear| linear.relative_error).reduce(pick).unwrap());
        assert!(worst < 0.03 && best > 0.02, "{format:?} loses {best} to {worst}");
        // The dequantized values are exactly codes times scales.
        let (files, weights) = (ModelFiles::open(&output).unwrap(), WeightFiles::open(&output).unwrap());
        let name = "model.layers.1.mlp.down_proj.weight";
        let read = weights.values(name).unwrap().to_vec::<f32>().unwrap();
        let scales =
            numbers(&files, &Fp8Format { layout: format.0, scheme: format.1 }.scale_name(&name[..name.len() - 7]));
        let codes = files.read(name).unwrap();
        for (i, (read, code)) in read.iter().zip(codes).enumerate() {
            let (row, column) = (i / 256, i % 256);
            let scale = match format.1 {
                Scheme::Static => 0,
                Scheme::Dynamic => row,
                Scheme::Block => row / 128 * 2 + column / 128,
                Scheme::Nvfp4 | Scheme::Mxfp4 => unreachable!("`FORMATS` has FP8 formats"),
            };
            assert_eq!(*read, E4M3(code).to_f32() * scales[scale], "{format:?}, element {i}");
        }
        assert_eq!(weights.names().count(), 14 + 2 * 2 + 3, "scales are no weights");
        assert_eq!(weights.input_scales().unwrap().len(), if format.1 == Scheme::Static { 14 } else { 0 });
        let error = crate::setup::relative_error(&logits_of(&output, RecipeName::Bf16), &expected);
        assert!((1e-3..0.1).contains(&error), "{format:?}: logits are {error} apart");
        // The plain folder has the dequantized values.
        let plain = inputs.path().join(format!("plain-{i}"));
        export(&Source::open(&output).unwrap(), None, &BTreeMap::new(), &plain).unwrap();
        assert!(json_of(&plain.join("config.json")).get("quantization_config").is_none());
        assert_eq!(logits_of(&plain, RecipeName::Bf16), logits_of(&output, RecipeName::Bf16), "{format:?}");
        // A cast with power-of-two scales is exact for these values, so FP8 products read the stored codes.
        if format.1 == Scheme::Block {
            let trained = codes_of_training(&output, &precision(RecipeName::Fp8Block).recipe());
            for (name, (codes, scales)) in trained {
                let again: Vec<f32> = codes
                    .iter()
                    .enumerate()
                    .map(|(i, code)| {
                        let columns = weights.info(&name).unwrap().shape[1];
                        E4M3(*code).to_f32() * scales[i / columns / 128 * (columns / 128) + i % columns / 128]
                    })
                    .collect();
                assert_eq!(weights.values(&name).unwrap().to_vec::<f32>().unwrap(), again, "{name}");
            }
        }
    }
}

#[test]
fn what_cannot_be_exported_is_refused_and_leaves_nothing() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Fp8Row));
    let output = inputs.path().join("exported");
    let source = Source::open(&folder).unwrap();
    let format = |(layout, scheme)| Some(Fp8Format { layout, scheme });
    let refused = |error: Error, words: &str| {
        assert!(error.to_string().contains(words), "{error} lacks {words:?}");
        assert!(!output.exists(), "{error}");
    };
    let error = export(&source, format(FORMATS[4]), &BTreeMap::new(), &output).unwrap_err();
    refused(
        error,
        "there is no scale for the input of `model.layers.0.self_attn.qkv_proj`: measure them with `ottava calibrate`",
    );
    let error = export(&source, None, &BTreeMap::new(), &folder).unwrap_err();
    refused(error, "this exists already; name a new folder");
    replace(&folder, DOWN, |i| if i == 300 { f32::INFINITY } else { 0.5 });
    let error = export(&Source::open(&folder).unwrap(), format(FORMATS[1]), &BTreeMap::new(), &output).unwrap_err();
    refused(error, &format!("`{DOWN}`: element 300 is not finite"));
}

/// Training continues from dequantized codes with the same bits as from a plain folder with these values, and saves plain folders.
#[test]
fn training_goes_on_from_fp8_weights() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Fp8Block));
    let (fp8, plain) = (inputs.path().join("fp8"), inputs.path().join("plain"));
    exported(&folder, FORMATS[0], &fp8).unwrap();
    export(&Source::open(&fp8).unwrap(), None, &BTreeMap::new(), &plain).unwrap();
    let weights: Vec<_> = [&fp8, &plain]
        .into_iter()
        .map(|start| {
            let output = start.join("run");
            let mut config = config(start, &output, RecipeName::Fp8Block);
            config.model.init = WeightInit::Pretrained;
            config.data.train_files = vec![inputs.path().join("text.txt")];
            config.training.max_steps = Some(1);
            train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
            let saved = output.join("checkpoints/checkpoint-1");
            assert!(json_of(&saved.join("config.json")).get("quantization_config").is_none());
            std::fs::read(saved.join("model.safetensors")).unwrap()
        })
        .collect();
    assert!(weights[0] == weights[1], "the weights after a step differ");
}

/// A block of zeros has the scale 1, since engines divide by the scale.
#[test]
fn weights_of_zeros_have_the_scale_1() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    replace(&folder, DOWN, |_| 0.0);
    for (i, format) in FORMATS.into_iter().enumerate() {
        let output = inputs.path().join(format!("zeros-{i}"));
        exported(&folder, format, &output).unwrap();
        let (files, ending) = (ModelFiles::open(&output).unwrap(), if i == 0 { "_inv" } else { "" });
        assert!(files.read(DOWN).unwrap().iter().all(|code| *code == 0));
        assert!(numbers(&files, &format!("{DOWN}_scale{ending}")).iter().all(|scale| *scale == 1.0), "{format:?}");
    }
}
