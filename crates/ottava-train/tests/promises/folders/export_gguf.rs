//! Models in files of llama.cpp are written and read again.

use ottava_checkpoint::{WeightFiles, write_file};
use ottava_common::{Error, Result};
use ottava_convert::convert;
use ottava_convert::export::Source;
use ottava_convert::export::gguf::{FILE, GgufReport, GgufType, export_gguf};
use ottava_convert::gguf::Gguf;
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::Precision;
use ottava_tensor::DType;
use ottava_tensor::testing::normals;
use serde_json::{Value, json};
use std::path::Path;

/// Returns the sizes of a model. No two of them are equal.
pub fn keys(architecture: &str, others: Value) -> Value {
    let mut keys = json!({"architectures": [architecture], "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 20, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 50000.0});
    keys.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    keys
}

/// Makes a folder with random weights in BF16, and with the tokenizer of the recorded Llama after `change`.
pub fn model(folder: &Path, keys: &Value, change: impl Fn(&mut Value)) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ottava-convert/tests/data/llama.gguf");
    convert(&recorded, None, folder, DType::BF16).unwrap();
    std::fs::write(folder.join("config.json"), keys.to_string()).unwrap();
    let path = folder.join("tokenizer.json");
    let mut tokenizer = json_of(&path);
    change(&mut tokenizer);
    std::fs::write(path, tokenizer.to_string()).unwrap();
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let tensors = Decoder::folder_tensors(&sizes, &Precision::default().recipe()).unwrap();
    let random = |name: String, shape: &[usize]| (name.clone(), normals(&name, shape, DType::BF16));
    let weights: Vec<_> = tensors.into_iter().map(|tensor| random(tensor.name, &tensor.shape)).collect();
    write_file(&folder.join("model.safetensors"), &weights).unwrap();
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn exported(folder: &Path, dtype: GgufType, output: &Path) -> Result<GgufReport> {
    export_gguf(&Source::open(folder)?, dtype, output)
}

fn values(folder: &Path) -> Vec<(String, Vec<f32>)> {
    let weights = WeightFiles::open(folder).unwrap();
    weights.names().map(|name| (name.to_string(), weights.values(name).unwrap().to_vec().unwrap())).collect()
}

/// Returns the families that can be exported, with the differences between their models: tied heads, biases, norms of heads, scaled rotary positions,
/// layers with a window.
fn families() -> [(&'static str, Value); 8] {
    let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let linear = || json!({"rope_type": "linear", "factor": 4.0});
    [
        ("LlamaForCausalLM", json!({"tie_word_embeddings": true, "rope_scaling": llama3})),
        ("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true, "rope_scaling": linear()})),
        ("MistralForCausalLM", json!({"sliding_window": null})),
        ("Qwen2ForCausalLM", json!({"tie_word_embeddings": true})),
        ("Qwen3ForCausalLM", json!({})),
        ("Gemma2ForCausalLM", gemma(json!({"attn_logit_softcapping": 40.0}))),
        ("Gemma3ForCausalLM", gemma(json!({"num_hidden_layers": 7, "rope_scaling": linear()}))),
        // With this number of layers, scores are scaled by the channels per head.
        ("Gemma2ForCausalLM", gemma(json!({"num_hidden_layers": 46, "query_pre_attn_scalar": 16}))),
    ]
}

fn gemma(others: Value) -> Value {
    let mut keys = json!({"sliding_window": 48, "query_pre_attn_scalar": 32});
    keys.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    keys
}

#[test]
fn an_exported_model_is_read_back_with_the_same_bits() {
    for (architecture, others) in families() {
        let folder = tempfile::tempdir().unwrap();
        let [model_folder, gguf, back] = ["model", "gguf", "back"].map(|name| folder.path().join(name));
        model(&model_folder, &keys(architecture, others.clone()), |_| {});
        for dtype in [GgufType::Bfloat16, GgufType::Float32] {
            let report = exported(&model_folder, dtype, &gguf).unwrap();
            convert(&gguf.join(FILE), None, &back, DType::F32).unwrap();
            assert_eq!(values(&model_folder), values(&back), "{architecture} {others}");
            assert_eq!((report.dtype, report.left.len()), (dtype, 0));
            let sizes = |folder: &Path| decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
            assert_eq!(sizes(&model_folder), sizes(&back), "{architecture} {others}");
            for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
                // The maximum length comes from the model.
                let content = |folder: &Path| {
                    let mut content = json_of(&folder.join(file));
                    content.as_object_mut().unwrap().remove("model_max_length");
                    content
                };
                assert_eq!(content(&model_folder), content(&back), "{architecture}: {file}");
            }
            let template = |folder: &Path| std::fs::read(folder.join("chat_template.jinja")).unwrap();
            assert_eq!(template(&model_folder), template(&back));
            for folder in [&gguf, &back] {
                std::fs::remove_dir_all(folder).unwrap();
            }
        }
    }
}

/// Rows of q and k of a Llama are stored in pairs, and rows of a Qwen stay in their order. A round trip alone would not show a wrong order.
#[test]
fn rows_of_heads_are_in_the_order_of_llama_cpp() {
    for (architecture, order) in [("LlamaForCausalLM", [0, 16, 1, 17]), ("Qwen3ForCausalLM", [0, 1, 2, 3])] {
        let folder = tempfile::tempdir().unwrap();
        let [model_folder, output] = ["model", "gguf"].map(|name| folder.path().join(name));
        model(&model_folder, &keys(architecture, json!({})), |_| {});
        exported(&model_folder, GgufType::Float32, &output).unwrap();
        let gguf = Gguf::open(&output.join(FILE)).unwrap();
        let weights = WeightFiles::open(&model_folder).unwrap();
        for (theirs, ours, ordered) in [("attn_k", "k_proj", true), ("attn_v", "v_proj", false)] {
            let found = gguf.values(&gguf.tensors()[&format!("blk.1.{theirs}.weight")]).unwrap();
            let name = format!("model.layers.1.self_attn.{ours}.weight");
            let expected = weights.values(&name).unwrap().to_vec::<f32>().unwrap();
            for (row, from) in (if ordered { order } else { [0, 1, 2, 3] }).into_iter().enumerate() {
                // These are rows of the second head.
                let of = |values: &[f32], row: usize| values[(32 + row) * 96..][..96].to_vec();
                assert_eq!(of(&found, row), of(&expected, from), "{architecture} {theirs} row {row}");
            }
        }
    }
}

/// llama.cpp multiplies by the weight of a norm, and Gemma by 1 plus the weight.
#[test]
fn norms_of_gemma_are_stored_with_one_added() {
    let folder = tempfile::tempdir().unwrap();
    let [model_folder, output] = ["model", "gguf"].map(|name| folder.path().join(name));
    model(&model_folder, &keys("Gemma3ForCausalLM", gemma(json!({}))), |_| {});
    exported(&model_folder, GgufType::Bfloat16, &output).unwrap();
    let (gguf, weights) = (Gguf::open(&output.join(FILE)).unwrap(), WeightFiles::open(&model_folder).unwrap());
    for (theirs, ours) in [
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
    ] {
        let found = gguf.values(&gguf.tensors()[&format!("blk.1.{theirs}.weight")]).unwrap();
        let expected = weights.values(&format!("model.layers.1.{ours}.weight")).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(found, expected.iter().map(|value| value + 1.0).collect::<Vec<_>>(), "{theirs}");
    }
    assert_eq!(gguf.count("gemma3.attention.sliding_window").unwrap(), Some(48));
}

#[test]
fn rounded_types_stay_within_half_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let [model_folder, halves, blocks, back] =
        ["model", "halves", "blocks", "back"].map(|name| folder.path().join(name));
    // Rows of 80 elements have no whole blocks.
    let others = json!({"intermediate_size": 80, "tie_word_embeddings": true});
    model(&model_folder, &keys("Qwen2ForCausalLM", others), |_| {});
    let exact = values(&model_folder);
    exported(&model_folder, GgufType::Float16, &halves).unwrap();
    convert(&halves.join(FILE), None, &back, DType::F32).unwrap();
    for ((name, exact), (_, found)) in exact.iter().zip(values(&back)) {
        let near = |(e, f): (&f32, f32)| (e - f).abs() <= e.abs() * 2f32.powi(-11) + 2f32.powi(-25);
        assert!(exact.iter().zip(found).all(near), "{name}");
    }
    std::fs::remove_dir_all(&back).unwrap();
    let report = exported(&model_folder, GgufType::Q8_0, &blocks).unwrap();
    assert_eq!(report.left, ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"]);
    convert(&blocks.join(FILE), None, &back, DType::F32).unwrap();
    let vector = |name: &str| name.contains("norm") || name.ends_with("bias");
    for ((name, exact), (_, found)) in exact.iter().zip(values(&back)) {
        for (exact, found) in exact.chunks(32).zip(found.chunks(32)) {
            let amax = exact.iter().fold(0f32, |amax, e| amax.max(e.abs()));
            // The bound is half a step, plus the rounding of the scale to 11 bits.
            let most = if vector(name) { 0.0 } else { amax / 254.0 * 1.13 };
            assert!(exact.iter().zip(found).all(|(e, f)| (e - f).abs() <= most), "{name}: {exact:?} {found:?}");
        }
    }
}

#[test]
fn models_and_tokenizers_that_llama_cpp_has_not_are_refused() {
    let none: fn(&mut Value) = |_| {};
    let words: fn(&mut Value) = |tokenizer| tokenizer["pre_tokenizer"] = json!({"type": "Whitespace"});
    let spaces: fn(&mut Value) = |tokenizer| {
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = json!(false);
    };
    let longer: fn(&mut Value) = |tokenizer| tokenizer["model"]["vocab"]["more"] = json!(20);
    for (architecture, others, change, words) in [
        (
            "Qwen3ForCausalLM",
            json!({"attention_bias": true}),
            none,
            "attention has biases; GGUF files of architecture `qwen3`",
        ),
        ("MistralForCausalLM", json!({"sliding_window": 64}), none, "the model uses sliding-window attention; GGUF"),
        ("LlamaForCausalLM", json!({"hidden_act": "gelu"}), none, "the activation is not SiLU"),
        (
            "LlamaForCausalLM",
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            none,
            "this RoPE scaling is not supported",
        ),
        ("Olmo2ForCausalLM", json!({}), none, "Olmo2ForCausalLM is not exported to GGUF; LlamaForCausalLM, Mistral"),
        (
            "Gemma2ForCausalLM",
            gemma(json!({"query_pre_attn_scalar": 16})),
            none,
            "`query_pre_attn_scalar` is not that of the published",
        ),
        ("Gemma2ForCausalLM", gemma(json!({"final_logit_softcapping": null})), none, "must both be set for gemma2"),
        ("Gemma2ForCausalLM", gemma(json!({"tie_word_embeddings": false})), none, "the output head is not tied"),
        (
            "Gemma3ForCausalLM",
            gemma(json!({"sliding_window_pattern": 2})),
            none,
            "the layers with a sliding window are not",
        ),
        (
            "Gemma3ForCausalLM",
            gemma(json!({"rope_local_base_freq": 5e3})),
            none,
            "RoPE of the sliding-window layers is not",
        ),
        ("LlamaForCausalLM", json!({}), words, "only byte-level BPE and SentencePiece BPE are supported"),
        ("LlamaForCausalLM", json!({}), spaces, "to GGUF; supported are: gpt-2, smollm, llama-bpe, qwen2"),
        ("LlamaForCausalLM", json!({}), longer, "token \"more\" has the id 20, and the model 20 embeddings"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let [model_folder, output] = ["model", "gguf"].map(|name| folder.path().join(name));
        model(&model_folder, &keys(architecture, others), change);
        let error = exported(&model_folder, GgufType::Bfloat16, &output).unwrap_err();
        assert!(matches!(error, Error::Model(_)) && error.to_string().contains(words), "{error} lacks {words:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{error}");
    }
}
