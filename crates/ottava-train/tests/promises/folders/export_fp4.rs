//! Exported folders with weights in four bits: their tensors and settings, the codes of training, and reading them back.

use super::export::{DOWN, checkpoint, exported, inputs, precision};
use ottava_checkpoint::{ModelFiles, WeightFiles};
use ottava_convert::export::{Convention::CompressedTensors, Fp8Format, Scheme, Source, export};
use ottava_recipe::RecipeName;
use ottava_tensor::fp8::{E4M3, E8M0};
use ottava_tensor::ops::{CodeCopies, Operand, dequantize};
use ottava_tensor::testing::{quantized, relative_error, values};
use ottava_tensor::{DType, Granularity, fp4};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn settings_of(folder: &Path) -> Value {
    let text = std::fs::read(folder.join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["quantization_config"].clone()
}

/// Returns the values that readers compute: code times scale, divided by the global scale of NVFP4.
fn values_of_parts(files: &ModelFiles, linear: &str, block: usize) -> Vec<f32> {
    let [codes, scales] = ["packed", "scale"].map(|part| files.read(&format!("{linear}.weight_{part}")).unwrap());
    let global = format!("{linear}.weight_global_scale");
    let global = files.has(&global).then(|| f32::from_le_bytes(files.read(&global).unwrap().try_into().unwrap()));
    let code = |i: usize| if i.is_multiple_of(2) { codes[i / 2] & 0xf } else { codes[i / 2] >> 4 };
    let scale = |i: usize| match global {
        Some(global) => E4M3(scales[i / block]).to_f32() / global,
        None => E8M0(scales[i / block]).to_f32(),
    };
    (0..2 * codes.len()).map(|i| fp4::value(code(i)) * scale(i)).collect()
}

#[test]
fn four_bit_folders_have_the_schema_of_their_readers_and_are_read_back() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let number = |fields: Value| {
        let mut number = json!({"num_bits": 4, "type": "float", "symmetric": true, "dynamic": false});
        number.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        number
    };
    for (scheme, name, block, of_scales, weights) in [
        (Scheme::Nvfp4, "nvfp4-pack-quantized", 16, DType::E4M3, json!({"strategy": "tensor_group", "group_size": 16})),
        (Scheme::Mxfp4, "mxfp4-pack-quantized", 32, DType::U8, json!({"strategy": "group", "group_size": 32})),
    ] {
        let output = inputs.path().join(name);
        let report = exported(&folder, (CompressedTensors, scheme), &output).unwrap();
        let errors: Vec<_> = report.linears.iter().map(|linear| linear.relative_error).collect();
        assert!(errors.iter().all(|error| (0.05..0.15).contains(error)), "{errors:?}");
        let group = json!({"targets": ["Linear"], "weights": number(weights), "input_activations": null, "output_activations": null});
        let expected = json!({"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "ignore": ["lm_head"], "kv_cache_scheme": null, "config_groups": {"group_0": group}});
        assert_eq!(settings_of(&output), expected);

        let (files, read) = (ModelFiles::open(&output).unwrap(), WeightFiles::open(&output).unwrap());
        assert_eq!(files.shape_of_bytes("model.layers.1.mlp.down_proj.weight_packed").unwrap(), [128, 128]);
        let scales = "model.layers.1.mlp.down_proj.weight_scale";
        let shape =
            if of_scales == DType::U8 { files.shape_of_bytes(scales) } else { Ok(files.info(scales).unwrap().shape) };
        assert_eq!(shape.unwrap(), [128, 256 / block]);
        let source = ModelFiles::open(&folder).unwrap();
        let names: BTreeMap<_, _> =
            read.names().map(|name| (name.to_string(), read.info(name).unwrap().shape)).collect();
        let of_source = source.names().map(|name| (name.to_string(), source.info(name).unwrap().shape)).collect();
        assert_eq!(names, of_source, "the folder has the weights of the source");
        for name in source.names().filter(|name| name.ends_with("_proj.weight")) {
            let linear = name.strip_suffix(".weight").unwrap();
            let found = read.values(name).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(found, values_of_parts(&files, linear, block), "{name}");
            // A part of a weight may begin and end within a block.
            let part = read.values_of(name, 37..1001).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(part, found[37..1001], "{name}");
            let error = relative_error(&values(&read.values(name).unwrap()), &values(&source.values(name).unwrap()));
            assert!(error < 0.15, "{name}: {error}");
        }
        // Other linears of the blocks are written as BF16.
        let plain = inputs.path().join(format!("{name}-plain"));
        export(&Source::open(&output).unwrap(), None, &BTreeMap::new(), &plain).unwrap();
        let plain = ModelFiles::open(&plain).unwrap();
        assert_eq!(plain.info(DOWN).unwrap().dtype, DType::BF16);
    }
}

/// Linears that engines fuse have one scale of the tensor.
#[test]
fn exported_codes_are_those_of_training_with_nvfp4() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Nvfp4));
    let output = inputs.path().join("exported");
    let (format, reason) = Fp8Format::default_for(&Source::open(&folder).unwrap(), false).unwrap();
    assert_eq!(format, Fp8Format { layout: CompressedTensors, scheme: Scheme::Nvfp4 }, "{reason}");
    let report = exported(&folder, (CompressedTensors, Scheme::Nvfp4), &output).unwrap();
    assert!(report.linears.iter().all(|linear| linear.recast.is_none()), "{report:?}");
    let weight = ModelFiles::open(&folder).unwrap().values(DOWN).unwrap();
    let cast = quantized(&weight, DType::E4M3, Granularity::Nvfp4Squares, CodeCopies::Rows).unwrap();
    let trained = values(&dequantize(Operand::Rows(&cast), 1, DType::F32).unwrap());
    let read = values(&WeightFiles::open(&output).unwrap().values(DOWN).unwrap());
    // Training multiplies by the inverse of the global scale, and readers divide by it.
    assert!(trained.iter().zip(&read).all(|(a, b)| (a - b).abs() <= 1e-6 * a.abs()), "codes differ");
    let files = ModelFiles::open(&output).unwrap();
    let global = |part: &str| files.read(&format!("model.layers.0.self_attn.{part}.weight_global_scale")).unwrap();
    assert_eq!([global("k_proj"), global("v_proj")], [global("q_proj"), global("q_proj")]);
    assert_ne!(global("q_proj"), global("o_proj"));
    // The other format casts the weights again, and says so.
    let report = exported(&folder, (CompressedTensors, Scheme::Mxfp4), &inputs.path().join("other")).unwrap();
    let expected = "cast again from the weights: the run's recipe nvfp4";
    assert!(report.linears.iter().all(|linear| linear.recast.as_ref().unwrap().starts_with(expected)), "{report:?}");
}

#[test]
fn four_bit_folders_with_other_settings_are_refused() {
    let inputs = inputs(256);
    let folder = checkpoint(inputs.path(), precision(RecipeName::Bf16));
    let output = inputs.path().join("exported");
    exported(&folder, (CompressedTensors, Scheme::Nvfp4), &output).unwrap();
    let path = output.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, words) in [
        ("\"group_size\": 16", "\"group_size\": 32", "`group_size` 32"),
        ("\"symmetric\": true", "\"symmetric\": false", "a weight of 4 bits"),
        ("\"num_bits\": 4", "\"num_bits\": 8", "a weight of 8 bits"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let error = WeightFiles::open(&output).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // Scales of the wrong type or shape are errors that name the tensors.
    std::fs::write(
        &path,
        text.replace("nvfp4-pack-quantized", "mxfp4-pack-quantized")
            .replace("tensor_group", "group")
            .replace("\"group_size\": 16", "\"group_size\": 32"),
    )
    .unwrap();
    let read = WeightFiles::open(&output).unwrap();
    let error = read.info(DOWN).unwrap_err().to_string();
    assert!(error.contains("down_proj.weight_scale"), "{error}");
}
