//! `tests/data/README.md` describes the source of the file.

use crate::*;
use ottava_checkpoint::ModelFiles;
use ottava_common::hash::sha256;
use ottava_data::Tokenizer;
use ottava_models::{ConfigFile, RopeKind, Uniform, decoder_config};
use serde_json::Value;

const FILE: &[u8] = include_bytes!("../tests/data/llama.gguf");
const EXPECTED: &str = include_str!("../tests/data/llama_gguf.json");

/// Writes the file to a folder, with the first `from` replaced by `to`, which has the same length.
fn file(from: &str, to: &str) -> tempfile::TempDir {
    let (folder, mut bytes) = (tempfile::tempdir().unwrap(), FILE.to_vec());
    let at = bytes.windows(from.len().max(1)).position(|part| part.starts_with(from.as_bytes())).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    std::fs::write(folder.path().join("a.gguf"), bytes).unwrap();
    folder
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn weights_are_those_of_the_gguf_package_in_the_row_order_of_hugging_face() {
    let folder = file("", "");
    let output = folder.path().join("new/model");
    let converted = convert(&folder.path().join("a.gguf"), None, &output, DType::F32).unwrap();
    let expected: Value = serde_json::from_str(EXPECTED).unwrap();
    let expected = expected.as_object().unwrap();
    let files = ModelFiles::open(&output).unwrap();
    assert_eq!(files.names().count(), expected.len());
    for (name, expected) in expected {
        let (info, bytes) = (files.info(name).unwrap(), files.read(name).unwrap());
        assert_eq!(serde_json::json!(info.shape), expected["shape"], "{name}");
        let first: Vec<f32> = bytes.chunks(4).take(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(expected["sha256"], sha256(&bytes), "{name}: {first:?}, expected {}", expected["first"]);
    }
    assert_eq!(converted.parameters, files.names().map(|name| files.info(name).unwrap().elements()).sum::<usize>());
    let stored = ["Q4_K", "Q5_K", "Q6_K", "F32"].map(|kind| converted.stored[kind]);
    assert_eq!((stored, converted.stored.len()), ([1, 1, 1, 9], 10));
    let rounded = folder.path().join("rounded");
    convert(&folder.path().join("a.gguf"), None, &rounded, DType::BF16).unwrap();
    let (exact, rounded) = (files.read("model.norm.weight"), ModelFiles::open(&rounded).unwrap());
    let exact: Vec<_> = exact.unwrap().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let expected: Vec<_> = exact.into_iter().flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect();
    assert_eq!(rounded.read("model.norm.weight").unwrap(), expected);
    assert_eq!(json(&folder.path().join("rounded/config.json"))["dtype"], "bfloat16");
}

#[test]
fn config_and_tokenizer_are_rebuilt_from_the_metadata() {
    let folder = file("", "");
    let output = folder.path().join("model");
    convert(&folder.path().join("a.gguf"), None, &output, DType::F32).unwrap();
    let config = decoder_config(&ConfigFile::read(&output).unwrap()).unwrap();
    let Uniform { heads, mlp, rope } = Uniform::of(&config).unwrap();
    assert_eq!((config.stream.channels, mlp.hidden, config.layers.len(), config.vocabulary), (32, 256, 3, 16));
    assert_eq!((heads.heads, heads.kv_heads, heads.head_dim, config.max_positions), (4, 2, 8, 131_072));
    assert_eq!((config.stream.norm.eps, rope.theta, config.head.tied), (1e-5, 500_000.0, true));
    assert!(matches!(rope.kind, RopeKind::Llama3 { factor: 8.0, .. }), "{rope:?}");

    let tokenizer = Tokenizer::load(&output).unwrap();
    let ids = |names: &[&str]| names.iter().map(|name| tokenizer.token_id(name).unwrap()).collect::<Vec<_>>();
    // Each digit is a token, although there is a merge of 1 and 2.
    let text = "ab ab12<|im_end|>\n<tool>";
    let tokens = ids(&["ab", "Ġab", "1", "2", "<|im_end|>", "Ċ", "<tool>"]);
    assert_eq!(tokenizer.encode(text).unwrap(), tokens);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    // The first id is the end of text, which ends documents. The second id is the end of a turn, which the file names.
    assert_eq!((tokenizer.eos_ids(), tokenizer.token_id("[PAD15]")), (&[0, 2][..], None));
    let settings = json(&output.join("tokenizer_config.json"));
    assert_eq!((&settings["bos_token"], &settings["add_bos_token"]), (&json!("<|im_start|>"), &json!(true)));
    let file = json(&output.join("tokenizer.json"));
    assert_eq!(file["post_processor"]["special_tokens"]["<|im_start|>"]["ids"], json!([1]));
    assert_eq!(file["added_tokens"].as_array().unwrap().len(), 4);
    assert_eq!(
        (&file["added_tokens"][2]["special"], &file["added_tokens"][3]["special"]),
        (&json!(true), &json!(false))
    );
    let template = std::fs::read_to_string(output.join("chat_template.jinja")).unwrap();
    assert_eq!(template, "{% for message in messages %}{{ message['content'] }}\n{% endfor %}");
}

#[test]
fn what_cannot_be_converted_is_refused_and_leaves_nothing() {
    for (from, to, words) in [
        (
            "llama",
            "gemma",
            "models of the architecture `gemma` are not converted; those of llama, qwen2, qwen3, gemma2, gemma3 are",
        ),
        ("gpt2", "bert", "`tokenizer.ggml.model` is `bert`; supported are"),
        ("smollm", "tekken", "`tokenizer.ggml.pre` is `tekken`; supported pre-tokenizers are gpt-2, smollm, llama-bpe"),
        ("blk.1.attn_k", "blk.1.attn_x", "the tensor \"blk.1.attn_k.weight\" is missing"),
        ("rope_freqs", "rope_freqx", "the tensor \"rope_freqx.weight\" has no place in a model of these sizes"),
        (
            "llama.block_count",
            "llama.block_xxxxx",
            "`llama.block_xxxxx` is 3, which is not read for models of the architecture `llama`",
        ),
        ("a b", "a  ", "\"a  \", which is not two tokens"),
        ("a b", "a x", "\"a x\", and \"x\" is no token"),
    ] {
        let folder = file(from, to);
        let error =
            convert(&folder.path().join("a.gguf"), None, &folder.path().join("model"), DType::BF16).unwrap_err();
        assert!(error.to_string().contains(words), "{error} lacks {words:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{error}");
    }
    let folder = file("", "");
    let error = convert(&folder.path().join("a.gguf"), None, folder.path(), DType::BF16).unwrap_err().to_string();
    assert!(error.contains("this exists already; name a new folder"), "{error}");
}

/// The known pre-tokenizers are recognized in files, even if a single step is not in a sequence.
#[test]
fn pre_tokenizers_are_found_by_what_they_do() {
    use tokenizer::{PRE_TOKENIZERS, PreTokenizer};
    let file = |known: &PreTokenizer| {
        let steps = serde_json::json!({"type": "Sequence", "pretokenizers": known.steps()});
        let model = serde_json::json!({"type": "BPE", "ignore_merges": known.ignore_merges});
        serde_json::json!({"pre_tokenizer": steps, "normalizer": known.normalizer(), "model": model})
    };
    for known in PRE_TOKENIZERS {
        assert_eq!(PreTokenizer::of(&file(known)).unwrap().name, known.name);
    }
    let mut single = file(&PRE_TOKENIZERS[0]);
    single["pre_tokenizer"] = single["pre_tokenizer"]["pretokenizers"][0].take();
    assert_eq!(PreTokenizer::of(&single).unwrap().name, "gpt-2");
    single["model"]["ignore_merges"] = true.into();
    assert!(PreTokenizer::of(&single).err().unwrap().contains("the pre-tokenizer cannot be exported to GGUF"));
}
