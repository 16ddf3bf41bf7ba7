//! The parsers of untrusted files, each with a good file. The property test and the targets in `fuzz/` share them.

use ottava_checkpoint::slices::SliceFiles;
use ottava_checkpoint::{AdapterFolder, Manifest, ModelFiles, Verify, verify};
use ottava_common::hash::seal;
use ottava_convert::convert;
use ottava_data::source::documents;
use ottava_data::{Chat, ChatTemplate, Clock, SourceOptions, SplitUse, Tokenizer, expand};
use ottava_models::{ConfigFile, Quantization, decoder_config};
use ottava_settings::{RunConfig, import};
use ottava_tensor::DType;
use ottava_train::report::Summary;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// The time and the memory that a parser may take.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// The maximum time.
    pub time: Duration,
    /// The maximum memory in bytes, in addition to four times the size of the file.
    pub memory: usize,
}

/// The bounds of a file with data, in a build without optimization.
const OF_DATA: Bounds = Bounds { time: Duration::from_secs(2), memory: 64 << 20 };

/// The bounds of a file with a program. The memory is twice the limit of the interpreter.
const OF_PROGRAMS: Bounds = Bounds { time: Duration::from_secs(5), memory: 1 << 30 };

/// A parser of one kind of file.
pub struct Parser {
    /// The name of the kind of file.
    pub name: &'static str,
    /// The path of the file in the folder of [`parsers`].
    pub file: &'static str,
    /// A file without faults.
    pub good: Vec<u8>,
    /// A function that corrects a length or checksum, so that the parser reads beyond it.
    pub repair: fn(Vec<u8>) -> Vec<u8>,
    /// A function that reads the file. Its result does not matter.
    pub parse: fn(&Path),
    /// The time and the memory that it may take for a file.
    pub bounds: Bounds,
}

/// A configuration of another trainer.
const FOREIGN: &str = "base_model: m\ndatasets:\n  - path: a.jsonl\n    type: alpaca\nlearning_rate: 2e-4\nbf16: auto\nlora_r: 8\nadapter: lora\n\
                       zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\nspecial_tokens:\n  pad_token: '<pad>'\n";

fn read_records(path: &Path) {
    if let Ok(reader) = documents(path, &SourceOptions::default()) {
        reader.for_each(drop);
    }
}

/// Returns all parsers. Files that some parsers refer to are written into `folder`.
pub fn parsers(folder: &Path) -> Vec<Parser> {
    std::fs::create_dir(folder.join("model")).unwrap();
    std::fs::create_dir_all(folder.join("megatron/mp_rank_00")).unwrap();
    std::fs::write(folder.join("model/part.safetensors"), safetensors()).unwrap();
    std::fs::write(folder.join("ids.bin"), include_bytes!("../../../ottava-data/tests/data/formats/ids.bin")).unwrap();
    for kind in ["metadata", "chunks"] {
        std::fs::create_dir(folder.join(kind)).unwrap();
        for (name, bytes) in DISTRIBUTED {
            std::fs::write(folder.join(kind).join(name), bytes).unwrap();
        }
    }
    let same: fn(Vec<u8>) -> Vec<u8> = |bytes| bytes;
    let parser = |name, file, good: Value, parse| Parser {
        name,
        file,
        good: good.to_string().into(),
        repair: same,
        parse,
        bounds: OF_DATA,
    };
    let text = |name, file, good: &[u8], parse| Parser {
        name,
        file,
        good: good.to_vec(),
        repair: same,
        parse,
        bounds: OF_DATA,
    };

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
    let of_folders = of_model_folders(folder, &tokenizer);
    let mut parsers = vec![
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
        text("gguf", "x.gguf", include_bytes!("../../../ottava-convert/tests/data/llama.gguf"), |path| {
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
        text("json", "a.json", include_bytes!("../../../ottava-data/tests/data/formats/chats.json"), read_records),
        text("csv", "a.csv", include_bytes!("../../../ottava-data/tests/data/formats/chats.csv"), read_records),
        text(
            "zstd",
            "a.jsonl.zst",
            include_bytes!("../../../ottava-data/tests/data/formats/texts.jsonl.zst"),
            read_records,
        ),
        text(
            "parquet",
            "a.parquet",
            include_bytes!("../../../ottava-data/tests/data/formats/chats-snappy.parquet"),
            read_records,
        ),
        text(
            "parquet of texts",
            "b.parquet",
            include_bytes!("../../../ottava-data/tests/data/formats/texts-gzip.parquet"),
            read_records,
        ),
        text(
            "arrow file",
            "a.arrow",
            include_bytes!("../../../ottava-data/tests/data/formats/chats-file.arrow"),
            read_records,
        ),
        text(
            "arrow stream",
            "b.arrow",
            include_bytes!("../../../ottava-data/tests/data/formats/texts-stream.arrow"),
            read_records,
        ),
        text("megatron index", "ids.idx", include_bytes!("../../../ottava-data/tests/data/formats/ids.idx"), |path| {
            read_records(&path.with_extension("bin"));
        }),
        text("foreign yaml", "x.yaml", FOREIGN.as_bytes(), |path| drop(import(path))),
        text("metrics.jsonl", "metrics.jsonl", metrics.as_bytes(), |path| drop(Summary::read(path))),
        parser("tokenizer.json", "tokenizer.json", tokenizer, |path| {
            if let Ok(tokenizer) = Tokenizer::load(path) {
                drop(tokenizer.encode("ab a b\tAB").and_then(|ids| tokenizer.decode(&ids)));
            }
        }),
    ];
    parsers.extend(of_folders);
    parsers
}

/// Returns the parsers of the files next to weights. Folders that some parsers need are made in `folder`.
fn of_model_folders(folder: &Path, tokenizer: &Value) -> Vec<Parser> {
    for name in ["chat", "adapter", "dataset", "tiktoken"] {
        std::fs::create_dir(folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("adapter/adapter_model.safetensors"), safetensors()).unwrap();
    std::fs::write(folder.join("dataset/a.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    std::fs::write(folder.join("chat/tokenizer.json"), tokenizer.to_string()).unwrap();
    let recorded: Value = serde_json::from_str(include_str!("../../../ottava-data/tests/data/tiktoken.json")).unwrap();
    std::fs::write(folder.join("tiktoken/tokenizer_config.json"), recorded["config"].to_string()).unwrap();
    let vocabulary = recorded["model"].as_str().unwrap().to_string();
    let tokens = json!({
        "chat_template": "{% for message in messages %}{{ message.role ~ ': ' ~ message['content']|trim }}\n{% endfor %}",
        "bos_token": null, "eos_token": "<|endoftext|>", "extra_special_tokens": {"tool": "<|tool|>"},
        "added_tokens_decoder": {"5": {"content": "<|tool|>", "special": true, "lstrip": false}},
    });
    let adapter = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m", "r": 8, "lora_alpha": 16,
        "target_modules": "model\\.layers\\.(0|1)\\..*(q|v)_proj", "rank_pattern": {"q_proj": 4}, "use_rslora": true,
        "modules_to_save": null, "lora_dropout": 0.05, "bias": "none", "init_lora_weights": true,
    });
    let quantized = json!({"model_type": "llama", "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false}}}}});
    let card = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: \"*.jsonl\"\n---\n# Data\n";
    let data = |name, file, good: Vec<u8>, parse: fn(&Path)| Parser {
        name,
        file,
        good,
        repair: |bytes| bytes,
        parse,
        bounds: OF_DATA,
    };
    vec![
        Parser {
            bounds: OF_PROGRAMS,
            ..data(
                "chat template",
                "chat/chat_template.jinja",
                include_bytes!("../../../ottava-data/src/templates/qwen3.jinja").to_vec(),
                |path| {
                    render(path.parent().unwrap());
                    std::fs::remove_file(path).unwrap();
                },
            )
        },
        Parser {
            bounds: OF_PROGRAMS,
            ..data("tokenizer_config.json", "chat/tokenizer_config.json", tokens.to_string().into(), |path| {
                let folder = path.parent().unwrap();
                drop(Tokenizer::load(folder));
                render(folder);
            })
        },
        data("tiktoken.model", "tiktoken/tiktoken.model", vocabulary.into_bytes(), |path| {
            if let Ok(tokenizer) = Tokenizer::load(path.parent().unwrap()) {
                drop(tokenizer.encode("ab é\tAB").and_then(|ids| tokenizer.decode(&ids)));
            }
        }),
        data("adapter_config.json", "adapter/adapter_config.json", adapter.to_string().into(), |path| {
            drop(AdapterFolder::open(path.parent().unwrap()));
        }),
        data("quantization_config", "quantized.json", quantized.to_string().into(), |path| {
            drop(ConfigFile::read(path).and_then(|file| Quantization::read(&file)));
        }),
        data("data card", "dataset/README.md", card.into(), |path| {
            drop(expand(&[path.parent().unwrap().to_path_buf()], SplitUse::Training));
        }),
    ]
}

/// Renders a conversation with tools by the template of `folder`, as training and the server do.
fn render(folder: &Path) {
    let Ok(Some(template)) = ChatTemplate::load(folder, None, Clock::Fixed) else { return };
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, null, "é"]}}});
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": "What is it?"}),
        json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}),
        json!({"role": "tool", "content": "4"}),
        json!({"role": "assistant", "content": "It is 4."}),
    ];
    let tools =
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]);
    let chat = Chat { messages: messages.to_vec(), tools, ..Chat::default() };
    for prompt in [false, true] {
        drop(template.render(&chat, prompt));
    }
}

/// Returns the file of the first of two ranks. Without the second file, tensors have other shapes than the arguments say, which is the last fault to
/// be found.
fn torch_file() -> &'static [u8] {
    include_bytes!("../../../ottava-convert/tests/data/megatron/tp2/iter_0000005/mp_rank_00/model_optim_rng.pt")
}

/// The files of a checkpoint of torch.distributed.checkpoint.
const DISTRIBUTED: [(&str, &[u8]); 4] = [
    (".metadata", include_bytes!("../../../ottava-convert/tests/data/megatron/tp2-dist/iter_0000005/.metadata")),
    (
        "metadata.json",
        include_bytes!("../../../ottava-convert/tests/data/megatron/tp2-dist/iter_0000005/metadata.json"),
    ),
    ("__0_0.distcp", include_bytes!("../../../ottava-convert/tests/data/megatron/tp2-dist/iter_0000005/__0_0.distcp")),
    ("__1_0.distcp", include_bytes!("../../../ottava-convert/tests/data/megatron/tp2-dist/iter_0000005/__1_0.distcp")),
];

fn read_distributed(path: &Path) {
    let (folder, output) = (path.parent().unwrap(), path.with_extension("folder"));
    if convert(folder, None, &output, DType::BF16).is_ok() {
        std::fs::remove_dir_all(output).unwrap();
    }
}

/// Returns a safetensors file of two tensors.
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

/// Writes a length that fits the header, so that the header is read.
fn fit(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len().saturating_sub(8 + 32) as u64;
    bytes.splice(..bytes.len().min(8), length.to_le_bytes());
    bytes
}

/// Writes the checksum of the rest of a manifest.
fn reseal(bytes: Vec<u8>) -> Vec<u8> {
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(value) if value.is_object() => seal(&value).into_bytes(),
        _ => bytes,
    }
}
