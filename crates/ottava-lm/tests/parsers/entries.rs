//! The parsers of files that may come from anywhere, each with a good file. The property test and the targets in `fuzz/` share them.

use ottava_lm::checkpoint::slices::SliceFiles;
use ottava_lm::checkpoint::{Manifest, ModelFiles, Verify, verify};
use ottava_lm::config::{RunConfig, import};
use ottava_lm::convert::convert;
use ottava_lm::data::source::documents;
use ottava_lm::data::{SourceOptions, Tokenizer};
use ottava_lm::hash::seal;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::report::Summary;
use ottava_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

/// A parser of one kind of file.
pub struct Parser {
    /// The kind.
    pub name: &'static str,
    /// Where the file lies in the folder of [`parsers`].
    pub file: &'static str,
    /// A file without faults.
    pub good: Vec<u8>,
    /// Corrects a length or checksum, so that the parser reads beyond it.
    pub repair: fn(Vec<u8>) -> Vec<u8>,
    /// Reads the file. The result does not matter.
    pub parse: fn(&Path),
}

/// A configuration of another trainer.
const FOREIGN: &str = "base_model: m\ndatasets:\n  - path: a.jsonl\n    type: alpaca\nlearning_rate: 2e-4\nbf16: auto\nlora_r: 8\nadapter: lora\n\
                       zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\nspecial_tokens:\n  pad_token: '<pad>'\n";

fn read_records(path: &Path) {
    if let Ok(reader) = documents(path, &SourceOptions::default()) {
        reader.for_each(drop);
    }
}

/// All of them. The files that some refer to are written into `folder`.
pub fn parsers(folder: &Path) -> Vec<Parser> {
    std::fs::create_dir(folder.join("model")).unwrap();
    std::fs::create_dir_all(folder.join("megatron/mp_rank_00")).unwrap();
    std::fs::write(folder.join("model/part.safetensors"), safetensors()).unwrap();
    std::fs::write(folder.join("ids.bin"), include_bytes!("../data/formats/ids.bin")).unwrap();
    for kind in ["metadata", "chunks"] {
        std::fs::create_dir(folder.join(kind)).unwrap();
        for (name, bytes) in DISTRIBUTED {
            std::fs::write(folder.join(kind).join(name), bytes).unwrap();
        }
    }
    let same: fn(Vec<u8>) -> Vec<u8> = |bytes| bytes;
    let parser =
        |name, file, good: Value, parse| Parser { name, file, good: good.to_string().into(), repair: same, parse };
    let text = |name, file, good: &[u8], parse| Parser { name, file, good: good.to_vec(), repair: same, parse };

    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192},
    });
    let index = json!({"metadata": {"total_size": 32},
        "weight_map": {"a.weight": "part.safetensors", "b.weight": "part.safetensors"}});
    let slices = json!({"tensors": {
        "a.weight": {"dtype": "F32", "shape": [2, 3], "slices": [{"file": "part.safetensors", "start": 0, "end": 6}]},
        "b.weight": {"dtype": "BF16", "shape": [4], "slices": [{"file": "part.safetensors", "start": 0, "end": 4}]}}});
    let manifest = json!({"format": 2, "ottava": "0.1.0", "step": 3, "extra": {"tokens": 5},
        "files": {"part.safetensors": {"size": 10, "sha256": "00"}, "training/x": {"size": 1, "sha256": "11"}}});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, " ": 4}, "merges": [["a", "b"]]},
    });
    let records = "{\"text\": \"one \\u00e9\", \"n\": [1, {\"k\": null}]}\r\n\n{\"text\": \"two\"}\n".repeat(20);
    let chat = json!({"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": null, "tool_calls": [{}]}],
        "tools": "[{\"name\": \"x\"}]"});
    let pairs =
        json!({"prompt": [{"role": "user", "content": ""}], "completion": [{"role": "assistant", "content": "x"}]});
    let chats = |record: &Value| format!("{record}\n").repeat(20);
    let metrics = "{\"step\":1,\"loss\":2.5,\"tokens\":5}\n{\"step\":2,\"loss\":null}\n".repeat(20);
    let run = include_bytes!("../../../../configs/reference.toml");
    vec![
        parser("config.json", "config.json", config, |path| {
            drop(ConfigFile::read(path).and_then(|file| decoder_config(&file)));
        }),
        text("safetensors", "x.safetensors", &safetensors(), read_tensors),
        Parser { repair: fit, ..text("safetensors header", "x.safetensors", &safetensors(), read_tensors) },
        parser("index", "model/model.safetensors.index.json", index, |path| {
            drop(ModelFiles::open(path.parent().unwrap()));
        }),
        parser("training/index.json", "model/index.json", slices, |path| {
            if let Ok(files) = SliceFiles::open(path.parent().unwrap()) {
                files.names().for_each(|name| drop(files.read(name)));
            }
        }),
        text("manifest.json", "model/manifest.json", seal(&manifest).as_bytes(), |path| {
            drop(Manifest::read(path.parent().unwrap()));
        }),
        Parser {
            repair: reseal,
            ..parser("manifest.json resealed", "model/manifest.json", manifest, |path| {
                drop(verify(path.parent().unwrap(), Verify::Hashes));
            })
        },
        text("run.toml", "run.toml", run, |path| drop(RunConfig::load(path, &[]))),
        text("jsonl", "a.jsonl", records.as_bytes(), |path| {
            documents(path, &SourceOptions::default()).unwrap().for_each(drop);
        }),
        text("gguf", "x.gguf", include_bytes!("../data/llama.gguf"), |path| {
            let output = path.with_extension("folder");
            if convert(path, None, &output, DType::BF16).is_ok() {
                std::fs::remove_dir_all(output).unwrap();
            }
        }),
        text("torch", "megatron/mp_rank_00/model_optim_rng.pt", torch_file(), |path| {
            let (folder, output) = (path.parent().unwrap().parent().unwrap(), path.with_extension("folder"));
            if convert(folder, None, &output, DType::BF16).is_ok() {
                std::fs::remove_dir_all(output).unwrap();
            }
        }),
        text("torch metadata", "metadata/.metadata", DISTRIBUTED[0].1, read_distributed),
        text("torch chunks", "chunks/__0_0.distcp", DISTRIBUTED[2].1, read_distributed),
        text("chats", "chats.jsonl", chats(&chat).as_bytes(), |path| {
            documents(path, &SourceOptions::default()).unwrap().for_each(drop);
        }),
        text("pairs of messages", "pairs.jsonl", chats(&pairs).as_bytes(), |path| {
            documents(path, &SourceOptions::default()).unwrap().for_each(drop);
        }),
        text("json", "a.json", include_bytes!("../data/formats/chats.json"), read_records),
        text("csv", "a.csv", include_bytes!("../data/formats/chats.csv"), read_records),
        text("zstd", "a.jsonl.zst", include_bytes!("../data/formats/texts.jsonl.zst"), read_records),
        text("parquet", "a.parquet", include_bytes!("../data/formats/chats-snappy.parquet"), read_records),
        text("parquet of texts", "b.parquet", include_bytes!("../data/formats/texts-gzip.parquet"), read_records),
        text("arrow file", "a.arrow", include_bytes!("../data/formats/chats-file.arrow"), read_records),
        text("arrow stream", "b.arrow", include_bytes!("../data/formats/texts-stream.arrow"), read_records),
        text("megatron index", "ids.idx", include_bytes!("../data/formats/ids.idx"), |path| {
            read_records(&path.with_extension("bin"));
        }),
        text("foreign yaml", "x.yaml", FOREIGN.as_bytes(), |path| drop(import(path))),
        text("metrics.jsonl", "metrics.jsonl", metrics.as_bytes(), |path| drop(Summary::read(path))),
        parser("tokenizer.json", "tokenizer.json", tokenizer, |path| {
            if let Ok(tokenizer) = Tokenizer::load(path) {
                drop(tokenizer.encode("ab a b\tAB").and_then(|ids| tokenizer.decode(&ids)));
            }
        }),
    ]
}

/// The file of the first of two ranks; without the second its tensors have other shapes than its arguments say, which is found last.
fn torch_file() -> &'static [u8] {
    include_bytes!("../data/megatron/tp2/iter_0000005/mp_rank_00/model_optim_rng.pt")
}

/// The files of a checkpoint of torch.distributed.checkpoint.
const DISTRIBUTED: [(&str, &[u8]); 4] = [
    (".metadata", include_bytes!("../data/megatron/tp2-dist/iter_0000005/.metadata")),
    ("metadata.json", include_bytes!("../data/megatron/tp2-dist/iter_0000005/metadata.json")),
    ("__0_0.distcp", include_bytes!("../data/megatron/tp2-dist/iter_0000005/__0_0.distcp")),
    ("__1_0.distcp", include_bytes!("../data/megatron/tp2-dist/iter_0000005/__1_0.distcp")),
];

fn read_distributed(path: &Path) {
    let (folder, output) = (path.parent().unwrap(), path.with_extension("folder"));
    if convert(folder, None, &output, DType::BF16).is_ok() {
        std::fs::remove_dir_all(output).unwrap();
    }
}

/// A safetensors file of two tensors.
fn safetensors() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    });
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7; 32]].concat()
}

fn read_tensors(path: &Path) {
    if let Ok(files) = ModelFiles::open_file(path) {
        files.names().for_each(|name| drop(files.read(name)));
    }
}

/// A length that fits the header, so that the header is read.
fn fit(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len().saturating_sub(8 + 32) as u64;
    bytes.splice(..bytes.len().min(8), length.to_le_bytes());
    bytes
}

/// The checksum that belongs to the rest of a manifest.
fn reseal(bytes: Vec<u8>) -> Vec<u8> {
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) if value.is_object() => seal(&value).into_bytes(),
        _ => bytes,
    }
}
