//! Folders with FP8 weights of other programs: their scales are read, or rejected with a remedy.

use ottava_checkpoint::WeightFiles;
use ottava_models::{ConfigFile, Quantization, WeightScales, decoder_config};
use ottava_tensor::fp8::E4M3;
use ottava_tensor::{DType, Device, Staging};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Writes a folder with one FP8 weight `[4, 6]` of 24 consecutive codes, with `settings` in config.json, and with further tensors: name, type, shape,
/// bytes.
fn stored(settings: Value, tensors: &[(&str, DType, &[usize], Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"architectures": ["LlamaForCausalLM"], "quantization_config": settings});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weight = ("a.weight", DType::E4M3, &[4, 6][..], (0x30..0x48).collect::<Vec<u8>>());
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in std::iter::once(&weight).chain(tensors) {
        let dtype = match dtype {
            DType::E4M3 => "F8_E4M3",
            DType::E8M0 => "F8_E8M0",
            DType::BF16 => "BF16",
            _ => "F32",
        };
        let start = data.len();
        data.extend(bytes);
        header.insert(name.to_string(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Other programs write these forms, and Ottava does not.
#[test]
fn scales_of_other_writers_are_read() {
    let rows = |scales: [f32; 4]| (0..24).map(move |i| scales[i / 6]);
    let expect = |settings: Value, tensors: &[(&str, DType, &[usize], Vec<u8>)], scales: Vec<f32>| {
        let folder = stored(settings.clone(), tensors);
        let found = WeightFiles::open(folder.path()).unwrap().values("a.weight").unwrap().to_vec::<f32>().unwrap();
        let codes = (0x30..0x48).map(|code| E4M3(code).to_f32());
        assert_eq!(found, codes.zip(scales).map(|(code, scale)| code * scale).collect::<Vec<_>>(), "{settings}");
    };
    let four = [0.5, 0.3, 2.0, 1e-3];
    let fbgemm =
        json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]});
    expect(fbgemm, &[("a.weight_scale", DType::F32, &[4, 1], f32s(&four))], rows(four).collect());
    // One scale per tensor and a scale for inputs, as in older folders of vLLM, also in BF16.
    let tensor = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let inputs = ("a.input_scale", DType::F32, &[][..], f32s(&[0.25]));
    expect(tensor, &[("a.weight_scale", DType::BF16, &[], vec![0x40, 0x3f]), inputs.clone()], vec![0.75; 24]);
    // The last blocks end with the matrix, and scales are E8M0: 2^-1, 2, 1, 4.
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [3, 4], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"});
    let scale = |i: usize| [0.5, 2.0, 1.0, 4.0][i / 6 / 3 * 2 + i % 6 / 4];
    expect(
        blocks,
        &[("a.weight_scale_inv", DType::E8M0, &[2, 2], vec![126, 128, 127, 129])],
        (0..24).map(scale).collect(),
    );
    // ModelOpt's own file, without `quantization_config` in config.json.
    let folder = stored(Value::Null, &[("a.weight_scale", DType::F32, &[], f32s(&[0.5])), inputs]);
    let weights = WeightFiles::open(folder.path()).unwrap();
    let error = weights.values("a.weight").unwrap_err().to_string();
    assert!(error.contains("`a.weight` is float8_e4m3, and config.json has no `quantization_config`"), "{error}");
    let settings = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}});
    std::fs::write(folder.path().join("hf_quant_config.json"), settings.to_string()).unwrap();
    let weights = WeightFiles::open(folder.path()).unwrap();
    assert_eq!(weights.values("a.weight").unwrap().to_vec::<f32>().unwrap()[8], E4M3(0x38).to_f32() * 0.5);
    assert_eq!(weights.input_scales().unwrap(), BTreeMap::from([("a".to_string(), 0.25)]));
}

/// Threads dequantize parts of 65,536 codes, which begin within rows and blocks.
#[test]
fn values_of_large_weights_are_codes_times_scales() {
    let (rows, columns) = (300usize, 700usize);
    let (down, across) = (rows.div_ceil(128), columns.div_ceil(128));
    let codes: Vec<u8> = (0..rows * columns).map(|i| (i * 7 % 0x7f) as u8).collect();
    let scales: Vec<f32> = (0..down * across).map(|i| 0.01 + i as f32).collect();
    let block = |i: usize| i / columns / 128 * across + i % columns / 128;
    let expected: Vec<f32> = (0..codes.len()).map(|i| E4M3(codes[i]).to_f32() * scales[block(i)]).collect();
    let settings = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    let with = |codes: Vec<u8>| {
        let scales = ("b.weight_scale_inv", DType::F32, &[down, across][..], f32s(&scales));
        stored(settings.clone(), &[("b.weight", DType::E4M3, &[rows, columns], codes), scales])
    };
    let folder = with(codes.clone());
    let weights = WeightFiles::open(folder.path()).unwrap();
    for range in [0..codes.len(), 1234..1235, 3..65_539, 65_530..200_001] {
        let found = weights.values_of("b.weight", range.clone()).unwrap().to_vec::<f32>().unwrap();
        assert!(found == expected[range.clone()], "{range:?}");
    }
    let mut damaged = codes;
    *damaged.last_mut().unwrap() = 0x7f;
    let folder = with(damaged);
    let weights = WeightFiles::open(folder.path()).unwrap();
    let of_codes = weights.codes(&mut Staging::new(&Device::Cpu), "b.weight").map(drop);
    for error in [of_codes, weights.values("b.weight").map(drop)].map(|read| read.unwrap_err().to_string()) {
        assert!(error.contains("`b.weight` has codes or scales that are not finite"), "{error}");
    }
}

/// Scales of a KV cache are ignored for all writers, also if only the cache is quantized. If config.json does not mention quantization, they are
/// ordinary tensors.
#[test]
fn scales_of_a_cache_are_no_weights() {
    let one = f32s(&[0.5]);
    let scale = |name: &'static str| (name, DType::F32, &[][..], one.clone());
    let caches = ["l.attn.k_scale", "l.attn.kv_scale", "l.k_proj.output_scale", "l.q_scale", "l.v_proj.output_scale"];
    let tensors: Vec<_> = caches.map(scale).into_iter().chain([scale("a.weight_scale")]).collect();
    let compressed = json!({"quant_method": "fp8"});
    let folder = stored(compressed, &tensors);
    let weights = WeightFiles::open(folder.path()).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a.weight"]);
    assert_eq!(weights.cache_scales().collect::<Vec<_>>(), caches);
    // ModelOpt writes this if only the cache is quantized.
    let cache = json!({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"});
    let folder = stored(cache, &tensors[..5]);
    let weights = WeightFiles::open(folder.path()).unwrap();
    assert_eq!((weights.quantization(), weights.names().count(), weights.cache_scales().count()), (None, 1, 5));
    let folder = stored(Value::Null, &tensors[..5]);
    let weights = WeightFiles::open(folder.path()).unwrap();
    assert_eq!((weights.names().count(), weights.cache_scales().count()), (6, 0));
}

#[test]
fn other_quantization_is_refused_with_a_remedy() {
    let wrong = |settings: Value, tensors: &[(&str, DType, &[usize], Vec<u8>)], words: &str| {
        let folder = stored(settings.clone(), tensors);
        let read = WeightFiles::open(folder.path()).and_then(|weights| weights.values("a.weight").map(drop));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(words), "{settings}: {error} lacks {words:?}");
    };
    for mut settings in [json!({"load_in_8bit": true}), json!({"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"})] {
        settings["quant_method"] = json!("bitsandbytes");
        wrong(settings, &[], "the 8-bit or FP4 format of bitsandbytes (NF4 is read");
    }
    for method in ["gptq", "awq", "mxfp4", "quark"] {
        let words = format!(
            "the method `{method}` is not read; FP8 weights of fp8, fbgemm_fp8, compressed-tensors (float-quantized) and"
        );
        wrong(json!({"quant_method": method, "bits": 4}), &[], &words);
        let config = json!({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": method}});
        let file = ConfigFile::from_values("config.json", config.as_object().unwrap().clone());
        assert!(decoder_config(&file).unwrap_err().to_string().contains("save this one with BF16 weights"));
    }
    let group = |weights: Value| json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}});
    let tensor = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
    wrong(
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        &[],
        "`format` \"pack-quantized\" is not read",
    );
    wrong(
        group(json!({"num_bits": 8, "type": "int", "strategy": "channel"})),
        &[],
        "a weight of 8 bits of type \"int\" is not read",
    );
    wrong(group(json!({"num_bits": 8, "type": "float", "strategy": "group"})), &[], "`strategy` \"group\" is not read");
    wrong(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), &[], "`quant_algo` \"NVFP4\" is not read");
    wrong(json!({"quant_method": "fp8", "fmt": "e5m2"}), &[], "`fmt` \"e5m2\" is not read");
    wrong(json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), &[], "`weight_block_size` is [0, 128]");
    for (key, value) in [("transform_config", json!({"config_groups": {"u": {}}})), ("a_key_of_tomorrow", json!(1))] {
        let mut settings = group(tensor.clone());
        settings[key] = value.clone();
        wrong(settings, &[], &format!("the key `{key}` is not read"));
        let mut settings = json!({"quant_method": "fp8"});
        settings[key] = value;
        wrong(settings, &[], &format!("the key `{key}` is not read"));
    }
    let mut sparse = group(tensor.clone());
    sparse["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
    wrong(sparse, &[], "`sparsity_config` of the format \"sparse-24-bitmask\" is not read");
    let grouped = json!({"num_bits": 8, "type": "float", "strategy": "channel", "actorder": "group"});
    wrong(group(grouped), &[], "the key `actorder` is not read");
    wrong(group(tensor.clone()), &[], "its scale `a.weight_scale` or `a.weight_scale_inv` is not in the folder");
    let two = ("a.weight_scale", DType::F32, &[2][..], f32s(&[1.0, 1.0]));
    wrong(group(tensor.clone()), &[two], "`a.weight_scale` has shape [2], config.json makes it [1, 1]");
    let nan = ("a.weight_scale", DType::F32, &[][..], f32s(&[f32::NAN]));
    wrong(group(tensor), &[nan], "codes or scales that are not finite");
}

/// llm-compressor writes the format `dense` if only the KV cache is quantized, and writes settings without effect as null.
#[test]
fn folders_without_quantized_weights_and_with_neutral_settings_are_read() {
    let read = |settings: Value| {
        let config = json!({"architectures": ["LlamaForCausalLM"], "quantization_config": settings});
        Quantization::read(&ConfigFile::from_values("config.json", config.as_object().unwrap().clone())).unwrap()
    };
    let cache = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true});
    let dense = json!({"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": cache, "quantization_status": "compressed"});
    assert_eq!(read(dense), None);
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false, "group_size": null,
        "block_structure": null, "actorder": null, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": null, "zp_dtype": null});
    let group = json!({"weights": weights, "input_activations": {"num_bits": 8, "dynamic": true}, "output_activations": null,
        "targets": ["Linear"], "format": "float-quantized"});
    for format in ["float-quantized", "naive-quantized"] {
        let full = json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": null, "quantization_status": "compressed", "global_compression_ratio": 1.4,
            "sparsity_config": {}, "transform_config": {}, "version": "0.12.2"});
        assert_eq!(read(full).unwrap().scales, WeightScales::Rows);
    }
}
