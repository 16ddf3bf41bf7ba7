//! The source of an export: folders that loading rejects are rejected, values keep their precision, and scales belong to the model.

use crate::folders::export::{FORMATS, checkpoint, exported, inputs, precision};
use crate::runs::resume::{config, train};
use ottava_checkpoint::{FolderWeights, ModelFiles, WeightFiles};
use ottava_convert::export::{Fp8Format, Source, export};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::param::Purpose;
use ottava_recipe::{Precision, RecipeName};
use ottava_settings::{RunConfig, WeightInit};
use ottava_tensor::Device;
use ottava_tensor::fp8::E4M3;
use ottava_train::calibrate::Calibration;
use ottava_train::trainer::{Start, build};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

const NORM: &str = "model.layers.1.input_layernorm.weight";
const UP: &str = "model.layers.0.mlp.up_proj.weight";
const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";

/// The type, the shape and the bytes of tensors by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn f32s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Returns the tensors of a folder in F32.
fn in_f32(folder: &Path) -> Tensors {
    let weights = WeightFiles::open(folder).unwrap();
    let tensor = |name: &str| {
        let values = weights.values(name).unwrap();
        (name.to_string(), (Dtype::F32, values.shape().to_vec(), f32s(values.to_vec::<f32>().unwrap())))
    };
    weights.names().map(tensor).collect()
}

/// Writes a plain folder with the settings of `folder` and these tensors.
fn plain(folder: &Path, output: &Path, tensors: &Tensors) {
    std::fs::create_dir_all(output).unwrap();
    std::fs::copy(folder.join("config.json"), output.join("config.json")).unwrap();
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
        .collect();
    safetensors::serialize_to_file(views, None, &output.join("model.safetensors")).unwrap();
}

/// Returns normal numbers that BF16 would round.
fn normals(elements: usize) -> impl Iterator<Item = f32> {
    let draw = |i: usize| {
        let mixed =
            (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..elements).map(move |i| (0..12).map(|k| draw(12 * i + k)).sum::<f32>() * 0.02)
}

#[test]
fn export_refuses_the_folders_that_loading_refuses() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let whole = in_f32(&folder);
    type Edit<'a> = &'a dyn Fn(&mut Tensors);
    let cases: [(&str, Edit, &str); 5] = [
        (
            "missing",
            &|tensors| drop(tensors.remove(NORM)),
            "there is no tensor \"model.layers.1.input_layernorm.weight\"",
        ),
        (
            "misshaped",
            &|tensors| drop(tensors.insert(NORM.into(), (Dtype::F32, vec![64], f32s([1.0; 64])))),
            "has shape [64], config.json makes it [128]",
        ),
        (
            "unknown",
            &|tensors| drop(tensors.insert("model.extra.weight".into(), (Dtype::F32, vec![2], f32s([1.0; 2])))),
            "holds a tensor `model.extra.weight` that config.json has no place for",
        ),
        (
            "blocks",
            &|tensors| tensors.retain(|name, _| !name.starts_with("model.layers.1.")),
            "there is no tensor \"model.layers.1.",
        ),
        (
            "tied",
            &|tensors| tensors.get_mut(HEAD).unwrap().2[0] ^= 1,
            "config.json ties the head to `model.embed_tokens.weight` (`tie_word_embeddings`), and the folder holds another",
        ),
    ];
    for (name, edit, words) in cases {
        let source = inputs.path().join(name);
        let mut tensors = whole.clone();
        if name == "tied" {
            let table = tensors[TABLE].clone();
            tensors.insert(HEAD.into(), table);
        }
        edit(&mut tensors);
        plain(&folder, &source, &tensors);
        if name == "tied" {
            let mut config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
            config["tie_word_embeddings"] = json!(true);
            std::fs::write(source.join("config.json"), config.to_string()).unwrap();
        }
        let sizes = decoder_config(&ConfigFile::read(&source).unwrap()).unwrap();
        let recipe = precision(RecipeName::Bf16).recipe();
        let loaded = build(Some(&source), None, 0, &Device::Cpu, &sizes, |weights| {
            Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 16, weights)
        });
        let refused = loaded.map(drop).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused} lacks {words:?}");
        for format in [None, Some(Fp8Format { layout: FORMATS[1].0, scheme: FORMATS[1].1 })] {
            let output = inputs.path().join("exported");
            let error = export(&Source::open(&source).unwrap(), format, &BTreeMap::new(), &output).map(drop);
            assert_eq!(error.expect_err(name).to_string(), refused, "{name}");
            assert!(!output.exists());
        }
    }
}

#[test]
fn values_that_are_not_finite_are_errors_that_name_their_place() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let whole = in_f32(&folder);
    let blocks = FORMATS[0];
    for (at, (name, element, value)) in [
        (TABLE, 300, f32::NAN),
        (NORM, 5, f32::INFINITY),
        (HEAD, 7, f32::NEG_INFINITY),
        (UP, 300, f32::NAN),
        // The value is finite in F32 and infinite in BF16.
        (NORM, 6, 3.4e38),
    ]
    .into_iter()
    .enumerate()
    {
        let mut tensors = whole.clone();
        tensors.get_mut(name).unwrap().2[4 * element..4 * element + 4].copy_from_slice(&value.to_le_bytes());
        let source = inputs.path().join(format!("source-{at}"));
        plain(&folder, &source, &tensors);
        let format = Fp8Format { layout: blocks.0, scheme: blocks.1 };
        for format in [Some(format), None] {
            let output = inputs.path().join("exported");
            let error = export(&Source::open(&source).unwrap(), format, &BTreeMap::new(), &output).map(drop);
            let error = error.expect_err(&format!("{name}[{element}] = {value} as {format:?}")).to_string();
            assert!(error.contains(&format!("`{name}`")) && error.contains(&format!("element {element} ")), "{error}");
            assert!(!output.exists(), "{error}");
        }
    }
    // A weight that BF16 cannot represent is accepted if it becomes FP8.
    let mut tensors = whole.clone();
    tensors.get_mut(UP).unwrap().2[..4].copy_from_slice(&3.4e38f32.to_le_bytes());
    let source = inputs.path().join("large");
    plain(&folder, &source, &tensors);
    exported(&source, FORMATS[1], &inputs.path().join("rows")).unwrap();
    // The source is BF16 too, so its bytes are copied.
    let mut tensors = whole;
    let (dtype, _, bytes) = tensors.get_mut(NORM).unwrap();
    *dtype = Dtype::BF16;
    *bytes = (0..128).flat_map(|i| if i == 9 { 0x7fc0u16 } else { 0x3f80 }.to_le_bytes()).collect();
    let source = inputs.path().join("bf16");
    plain(&folder, &source, &tensors);
    let error = exported(&source, blocks, &inputs.path().join("exported")).unwrap_err().to_string();
    assert!(error.contains(&format!("`{NORM}`")) && error.contains("element 9 "), "{error}");
}

/// Each code is the nearest code to the source's value, which has 24 bits. If values were first rounded to BF16, about 2 % of the codes would differ.
#[test]
fn weights_in_f32_are_cast_from_f32() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let mut tensors = in_f32(&folder);
    for (name, (_, shape, bytes)) in &mut tensors {
        if name.contains("proj") {
            *bytes = f32s(normals(shape.iter().product()));
        }
    }
    let source = inputs.path().join("f32");
    plain(&folder, &source, &tensors);
    for (i, format) in FORMATS.into_iter().enumerate() {
        let output = inputs.path().join(format!("exported-{i}"));
        exported(&source, format, &output).unwrap();
        let (weights, files) = (WeightFiles::open(&output).unwrap(), ModelFiles::open(&output).unwrap());
        for name in weights.names().filter(|name| name.contains("proj")) {
            let (scales, codes) = (weights.scales(name).unwrap(), files.read(name).unwrap());
            let values = tensors[name].2.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            for (at, (value, code)) in values.zip(codes).enumerate() {
                let exact = f64::from(value) / f64::from(scales.at(at));
                let distance = |code: u8| (exact - f64::from(E4M3(code).to_f32())).abs();
                let near = [code.wrapping_sub(1), code.wrapping_add(1)].map(distance);
                // A quotient that is rounded to F32 may fall in the middle between two codes.
                let slack = exact.abs() * 2f64.powi(-22);
                let nearest =
                    near.into_iter().filter(|near| near.is_finite()).all(|near| distance(code) <= near + slack);
                assert!(
                    nearest,
                    "{format:?}: {name}, element {at} is {exact} of its scale and became {}",
                    E4M3(code).to_f32()
                );
            }
        }
    }
}

#[test]
fn a_new_folder_inside_the_source_is_refused() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let files = || std::fs::read_dir(&folder).unwrap().count();
    let before = files();
    for output in [folder.join("sub"), folder.join("deep/sub"), folder.join("../checkpoint-2/sub")] {
        let error = exported(&folder, FORMATS[1], &output).map(drop).unwrap_err().to_string();
        assert!(error.contains("this is inside the model folder") && error.contains("name another place"), "{error}");
    }
    assert_eq!(files(), before);
}

/// Measures the inputs of a folder's linears on a few tokens, as `ottava calibrate` does.
fn calibrated(folder: &Path) -> Calibration {
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let recipe = Precision { recipe: RecipeName::Fp8Current, ..Precision::default() }.recipe();
    let mut weights = FolderWeights::open(folder).unwrap();
    let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 16, &mut weights).unwrap();
    let ids: Vec<i32> = (1..17).collect();
    let batch = ottava_data::Batch::whole(ids.clone(), ids, 1);
    let range = ottava_train::calibrate::Range::Max;
    let measured = Calibration::measure(&mut model, [Ok(batch)], range, &mut |_| ()).unwrap();
    measured.of_model(&WeightFiles::open(folder).unwrap()).unwrap()
}

/// The fingerprint is a property of the weights: it is the same if they are stored in BF16 or in F32.
#[test]
fn scales_of_another_model_are_refused() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let scales = calibrated(&folder);
    let weights = |folder: &Path| WeightFiles::open(folder).unwrap();
    assert_eq!(scales.expect_model(&weights(&folder)).map_err(|e| e.to_string()), Ok(()));
    let (same, other) = (inputs.path().join("same"), inputs.path().join("other"));
    let mut tensors = in_f32(&folder);
    plain(&folder, &same, &tensors);
    assert_eq!(scales.expect_model(&weights(&same)).map_err(|e| e.to_string()), Ok(()));
    // Another model has the same names and shapes after further training.
    let mut run: RunConfig = config(inputs.path(), &inputs.path().join("further"), RecipeName::Bf16);
    run.model.path = folder.clone();
    run.model.init = WeightInit::Pretrained;
    run.training.max_steps = Some(1);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let error =
        scales.expect_model(&weights(&run.output_dir.join("checkpoints/checkpoint-1"))).unwrap_err().to_string();
    assert!(error.contains("were measured on another model") && error.contains("ottava calibrate"), "{error}");
    tensors.remove(UP);
    plain(&folder, &other, &tensors);
    let error = scales.expect_model(&weights(&other)).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.mlp.up_proj`, which is no linear of this model"), "{error}");
}

/// If a run has scales, the default format keeps its codes. Other folders get blocks if all linears have whole blocks.
#[test]
fn the_default_format_suits_the_model_and_its_run() {
    for (intermediate, recipe, format) in [
        (256, RecipeName::Fp8Delayed, FORMATS[2]),
        (256, RecipeName::Fp8Row, FORMATS[1]),
        (256, RecipeName::Fp8Block, FORMATS[0]),
        (192, RecipeName::Fp8Block, FORMATS[0]),
        (256, RecipeName::Fp8Current, FORMATS[0]),
        (256, RecipeName::Bf16, FORMATS[0]),
        (192, RecipeName::Bf16, FORMATS[1]),
    ] {
        let inputs = inputs(intermediate);
        let folder = checkpoint(inputs.path(), precision(recipe));
        let (default, reason) = Fp8Format::default_for(&Source::open(&folder).unwrap(), false).unwrap();
        assert_eq!((default.layout, default.scheme), format, "{intermediate} {}: {reason}", recipe.as_str());
        let report = exported(&folder, format, &inputs.path().join("exported")).unwrap();
        let trained = !matches!(recipe, RecipeName::Bf16 | RecipeName::Fp8Current);
        assert!(report.linears.iter().all(|linear| linear.recast.is_none() == trained), "{report:?}");
        assert_eq!(default.scheme == ottava_convert::export::Scheme::Block, report.power_of_two_scales.is_some());
    }
}

/// On a GPU, a run may compute linears in BF16 where FP8 is slower. The export casts these linears to codes that training did not have.
#[test]
fn linears_that_the_run_did_not_cast_are_said_to_be_cast_for_the_export() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Fp8Row));
    let mut source = Source::open(&folder).unwrap();
    assert!(source.casts.remove("model.layers.1.mlp.down_proj.weight"), "{:?}", source.casts);
    let format = Fp8Format { layout: FORMATS[1].0, scheme: FORMATS[1].1 };
    let report = export(&source, Some(format), &BTreeMap::new(), &inputs.path().join("exported")).unwrap();
    let recast: Vec<_> =
        report.linears.iter().filter_map(|linear| Some((&linear.name, linear.recast.as_ref()?))).collect();
    let [(name, reason)] = recast[..] else { panic!("{recast:?}") };
    assert_eq!(name, "model.layers.1.mlp.down_proj");
    assert!(reason.contains("the run computed this linear in BF16"), "{reason}");
}

/// The folder has the form of a folder in which only the KV cache is quantized.
#[test]
fn scales_of_a_cache_are_loaded_around_and_not_exported() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let mut tensors = in_f32(&folder);
    let scales = ["k_proj.output_scale", "kv_scale"].map(|scale| format!("model.layers.0.self_attn.{scale}"));
    for scale in &scales {
        tensors.insert(scale.clone(), (Dtype::F32, vec![1], f32s([0.5])));
    }
    let (source, output) = (inputs.path().join("source"), inputs.path().join("exported"));
    plain(&folder, &source, &tensors);
    let error = exported(&source, FORMATS[1], &output).unwrap_err().to_string();
    assert!(error.contains(&format!("`{}` that config.json has no place for", scales[0])), "{error}");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] =
        json!({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"});
    std::fs::write(source.join("config.json"), config.to_string()).unwrap();
    exported(&source, FORMATS[1], &output).unwrap();
    let files = ModelFiles::open(&output).unwrap();
    assert!(files.names().all(|name| !scales.iter().any(|scale| scale == name)), "a scale of the cache was exported");
}
