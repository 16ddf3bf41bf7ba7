//! Tests with changed arguments of a run. The arguments replace the arguments of a recorded checkpoint.

use super::tests::{archive, copy, recorded};
use crate::{Converted, convert};
use ottava_common::error::Result;
use ottava_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;
use zip::CompressionMethod;

/// Returns the arguments in `common.pt` of the checkpoint `tp2-pp2-dist`.
fn arguments() -> Value {
    json!({"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 8, "group_query_attention": true,
        "num_query_groups": 4, "kv_channels": 4, "max_position_embeddings": 64, "norm_epsilon": 1e-6, "rotary_base": 10000,
        "rotary_percent": 1.0, "normalization": "RMSNorm", "swiglu": true, "position_embedding_type": "rope", "add_bias_linear": false,
        "add_qkv_bias": false, "qk_layernorm": true, "untie_embeddings_and_output_weights": true, "padded_vocab_size": 32,
        "vocab_size": 30, "rotary_interleaved": false, "window_size": null, "attention_backend": "auto", "moe_layer_freq": 1,
        "rope_scaling_factor": 8.0, "use_rope_scaling": false, "attention_dropout": 0.0, "recompute_num_layers": 2})
}

/// Writes a value in pickle protocol 2.
fn pickled(value: &Value, to: &mut Vec<u8>) {
    match value {
        Value::Null => to.push(b'N'),
        Value::Bool(value) => to.push(if *value { 0x88 } else { 0x89 }),
        Value::Number(number) => match number.as_i64() {
            Some(number) => {
                to.push(b'J');
                to.extend((number as i32).to_le_bytes());
            }
            None => {
                to.push(b'G');
                to.extend(number.as_f64().unwrap().to_be_bytes());
            }
        },
        Value::String(text) => {
            to.push(b'X');
            to.extend((text.len() as u32).to_le_bytes());
            to.extend(text.as_bytes());
        }
        Value::Array(items) => {
            to.push(b'(');
            items.iter().for_each(|item| pickled(item, to));
            to.push(b't');
        }
        Value::Object(entries) => {
            to.extend(b"}(");
            for (key, value) in entries {
                pickled(&json!(key), to);
                pickled(value, to);
            }
            to.push(b'u');
        }
    }
}

/// Converts the checkpoint with some changed arguments.
fn converted(changes: &Value, like: Option<&Path>, output: &Path) -> Result<Converted> {
    let mut all = arguments();
    all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let mut pickle = b"\x80\x02}X\x04\0\0\0argscargparse\nNamespace\n)\x81".to_vec();
    pickled(&all, &mut pickle);
    pickle.extend(b"bs.");
    let folder = copy("tp2-pp2-dist");
    std::fs::write(folder.path().join("common.pt"), archive(&pickle, CompressionMethod::Stored)).unwrap();
    convert(folder.path(), like, output, DType::F32)
}

/// Creates a folder for the checkpoint with these keys of `config.json`.
fn like(path: &Path, keys: &Value) {
    let _ = std::fs::remove_dir_all(path);
    convert(&recorded("tp2-pp2-dist"), None, path, DType::F32).unwrap();
    let file = path.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(&file, config.to_string()).unwrap();
}

#[test]
fn arguments_of_another_model_end_the_conversion_with_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let (given, output) = (folder.path().join("like"), folder.path().join("model"));
    like(&given, &json!({}));
    let plain = converted(&json!({}), Some(&given), &output).unwrap();
    assert_eq!(plain.warnings, Vec::<String>::new());
    let refuse = |name: &str, changes: &Value, like: Option<&Path>| {
        let output = folder.path().join("refused");
        let error = converted(changes, like, &output).map(drop).expect_err(&format!("{changes}, like {like:?}"));
        let error = error.to_string();
        assert!(error.contains(&format!("`{name}`")), "{changes}, like {like:?}: {error} lacks `{name}`");
        assert!(!output.exists());
    };
    // No `config.json` can express these arguments, so they are refused with any folder.
    for (name, value) in [
        ("apply_layernorm_1p", json!(true)),
        ("layernorm_zero_centered_gamma", json!(true)),
        ("apply_residual_connection_post_layernorm", json!(true)),
        ("normalization", json!("LayerNorm")),
        ("swiglu", json!(false)),
        ("squared_relu", json!(true)),
        ("quick_geglu", json!(true)),
        ("openai_gelu", json!(true)),
        ("glu_linear_offset", json!(1.0)),
        ("activation_func_clamp_value", json!(7.0)),
        ("add_bias_linear", json!(true)),
        ("add_qkv_bias", json!(true)),
        ("multi_latent_attention", json!(true)),
        ("num_experts", json!(8)),
        ("position_embedding_type", json!("yarn")),
        ("position_embedding_type", json!("learned_absolute")),
        ("rope_type", json!("yarn")),
        ("rotary_percent", json!(0.5)),
        ("no_rope_freq", json!(4)),
        ("no_rope_freq", json!([0, 1, 0, 1])),
        ("mrope_section", json!([1, 1])),
        ("window_attn_skip_freq", json!(2)),
        ("softmax_scale", json!(0.1)),
        ("softmax_type", json!("learnable")),
        ("qk_l2_norm", json!(true)),
        ("attention_output_gate", json!(true)),
        ("experimental_attention_variant", json!("gdn")),
        ("mtp_num_layers", json!(1)),
        ("use_mup", json!(true)),
        ("hybrid_override_pattern", json!("M*-")),
        ("heterogeneous_layers_config_path", json!("a.json")),
        ("spec", json!(["a", "b"])),
        ("window_size", json!([127, 0])),
        ("rotary_seq_len_interpolation_factor", json!(2)),
    ] {
        let changes = json!({name: value});
        refuse(name, &changes, None);
        refuse(name, &changes, Some(&given));
    }
    // A `config.json` could express these arguments, but this folder's `config.json` contradicts them.
    for (name, value) in [
        ("rotary_base", json!(500_000)),
        ("use_rope_scaling", json!(true)),
        ("norm_epsilon", json!(1e-5)),
        ("layernorm_epsilon", json!(1e-5)),
        ("qk_layernorm", json!(false)),
        ("untie_embeddings_and_output_weights", json!(false)),
        ("num_query_groups", json!(2)),
        ("kv_channels", json!(8)),
        ("num_attention_heads", json!(4)),
        ("hidden_size", json!(32)),
        ("ffn_hidden_size", json!(48)),
        ("num_layers", json!(2)),
        ("vocab_size", json!(31)),
    ] {
        refuse(name, &json!({name: value}), Some(&given));
    }
    refuse("num_attention_heads", &json!({"group_query_attention": false}), Some(&given));
    // Megatron's training script computes with the factor 8, whatever the argument says.
    refuse("rope_scaling_factor", &json!({"use_rope_scaling": true, "rope_scaling_factor": 32.0}), None);
    // Keys of `config.json` that the arguments do not have are compared too.
    for (name, keys) in [
        ("swiglu", json!({"hidden_act": "gelu"})),
        ("window_size", json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 0})),
        (
            "use_rope_scaling",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}}),
        ),
    ] {
        like(&given, &keys);
        let changes = if name == "use_rope_scaling" { json!({name: true}) } else { json!({}) };
        refuse(name, &changes, Some(&given));
    }
}

#[test]
fn a_folder_that_says_what_the_arguments_say_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (given, output) = (folder.path().join("like"), folder.path().join("model"));
    let llama3 = |factor: f64| {
        json!({"rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}})
    };
    for (keys, changes) in [
        (json!({"rope_theta": 500_000.0}), json!({"rotary_base": 500_000})),
        (llama3(8.0), json!({"use_rope_scaling": true})),
        (llama3(32.0), json!({"use_rope_scaling": true, "rope_scaling_factor": 32.0})),
        (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), json!({"rotary_seq_len_interpolation_factor": 2})),
        (
            json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 0}),
            json!({"window_size": [31, 0]}),
        ),
        // The last rows are padding to Megatron.
        (json!({"vocab_size": 31}), json!({})),
    ] {
        like(&given, &keys);
        converted(&changes, Some(&given), &output).unwrap_or_else(|error| panic!("{keys}, {changes}: {error}"));
        let config: Value = serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
        for (key, value) in keys.as_object().unwrap() {
            assert_eq!(&config[key], value, "{changes}");
        }
        std::fs::remove_dir_all(&output).unwrap();
    }
    converted(&json!({"use_rope_scaling": true}), None, &output).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["rope_scaling"], llama3(8.0)["rope_scaling"]);
}

#[test]
fn unknown_arguments_that_may_change_the_model_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let unknown = json!({"attention_sink_tokens": 4, "final_logit_softcapping": 30.0, "use_new_attention": false, "head_mixing": null,
        "my_data_option": 3, "lr_warmup": 7});
    let converted = converted(&unknown, None, &folder.path().join("model")).unwrap();
    let [warning] = &converted.warnings[..] else { panic!("{:?}", converted.warnings) };
    assert!(
        warning
            .contains("may change the model: `attention_sink_tokens` = 4, `final_logit_softcapping` = 30.0; compare"),
        "{warning}"
    );
}

/// Names begin with `module.`, and the checkpoint has no arguments.
#[test]
fn checkpoints_of_nemo_need_a_folder_and_say_what_was_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let [like, output] = ["like", "model"].map(|name| folder.path().join(name));
    let error = convert(&recorded("nemo"), None, &output, DType::F32).unwrap_err().to_string();
    assert!(error.contains("it has no arguments of its run; name a Hugging Face folder"), "{error}");
    convert(&recorded("halves"), None, &like, DType::F32).unwrap();
    let converted = convert(&recorded("nemo"), Some(&like), &output, DType::F32).unwrap();
    assert!(converted.warnings[0].contains("nothing but shapes was compared"), "{:?}", converted.warnings);
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&output) == weights(&like), "the same weights in another format");
    // The user may also name the inner folder of the checkpoint.
    convert(&recorded("nemo").join("weights"), Some(&like), &folder.path().join("again"), DType::F32).unwrap();
}

#[test]
fn a_new_folder_inside_a_source_is_refused() {
    let (source, folder) = (copy("tp2-dist"), tempfile::tempdir().unwrap());
    let like = folder.path().join("like");
    convert(source.path(), None, &like, DType::F32).unwrap();
    for output in [source.path().join("model"), like.join("model")] {
        let error = convert(source.path(), Some(&like), &output, DType::F32).unwrap_err().to_string();
        assert!(error.contains("this is inside the model folder"), "{error}");
    }
}
