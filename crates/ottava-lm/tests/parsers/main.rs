//! Whatever a file holds, its parser returns: no panic, no second of time, no more memory than four times the file and 64 MiB.
//! A test binary of its own, since its allocator counts what the whole process allocates.

use ottava_lm::checkpoint::slices::SliceFiles;
use ottava_lm::checkpoint::{Manifest, ModelFiles, Verify, verify};
use ottava_lm::config::RunConfig;
use ottava_lm::data::source::documents;
use ottava_lm::data::{SourceOptions, Tokenizer};
use ottava_lm::hash::seal;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::report::Summary;
use ottava_tensor::testing::allocator::CountingAllocator;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The largest input.
const MAX_BYTES: usize = 1_000_000;

/// A change of a file.
#[derive(Clone, Debug)]
enum Change {
    /// Another byte at a place.
    Byte(usize, u8),
    /// One of [`PIECES`] at a place.
    Insert(usize, usize),
    /// Nothing from a place on, for some bytes.
    Delete(usize, usize),
    /// Some bytes from a place on, many times.
    Repeat(usize, usize, usize),
    /// The end.
    Cut(usize),
}

/// What parsers trip over.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "18446744073709551616",
    "9223372036854775807",
    "\u{0}",
    "\u{feff}",
    "\\ud800",
    "é",
    "\n",
    "\r\n",
    "../x",
    "/dev/zero",
    "{\"a\":",
    "[[[[[[[[",
    "=",
    "[a.b]",
    "'''",
    "#",
    "NaN",
    "1.5",
];

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let at = 0..1_000_000_usize;
    let change = prop_oneof![
        4 => (at.clone(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        4 => (at.clone(), 0..PIECES.len()).prop_map(|(at, piece)| Change::Insert(at, piece)),
        2 => (at.clone(), 1..40_usize).prop_map(|(at, count)| Change::Delete(at, count)),
        2 => (at.clone(), 1..60_usize, 1..100_000_usize).prop_map(|(at, count, times)| Change::Repeat(at, count, times)),
        1 => at.prop_map(Change::Cut),
    ];
    prop::collection::vec(change, 1..5)
}

fn changed(good: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for change in changes {
        let place = |at: usize, bytes: &[u8]| at % (bytes.len() + 1);
        match *change {
            Change::Byte(at, byte) => {
                let at = place(at, &bytes).min(bytes.len().saturating_sub(1));
                bytes.iter_mut().skip(at).take(1).for_each(|old| *old = byte);
            }
            Change::Insert(at, piece) => {
                let at = place(at, &bytes);
                bytes.splice(at..at, PIECES[piece].bytes());
            }
            Change::Delete(at, count) => {
                let at = place(at, &bytes);
                let end = (at + count).min(bytes.len());
                bytes.drain(at..end);
            }
            Change::Repeat(at, count, times) => {
                let at = place(at, &bytes);
                let piece = bytes[at..(at + count).min(bytes.len())].to_vec();
                let times = times.min((MAX_BYTES.saturating_sub(bytes.len())) / piece.len().max(1));
                bytes.splice(at..at, piece.repeat(times));
            }
            Change::Cut(at) => bytes.truncate(place(at, &bytes)),
        }
    }
    bytes.truncate(MAX_BYTES);
    bytes
}

/// A megabyte of nesting, of one long key and of many short ones, as JSON and as TOML, before the `good` file and within it.
fn extremes(good: &[u8]) -> Vec<Vec<u8>> {
    let free = MAX_BYTES - good.len() - 16;
    let many = |entry: &dyn Fn(usize) -> String| {
        let (mut text, mut i) = (String::new(), 0);
        while text.len() + 32 < free {
            text += &entry(i);
            i += 1;
        }
        text
    };
    let texts = [
        "[".repeat(free),
        "{\"a\":".repeat(free / 5),
        format!("{} = 1\n", "k".repeat(free)),
        format!("\"{}\":1,", "k".repeat(free)),
        many(&|i| format!("max_step_{i} = 1\n")),
        many(&|i| format!("\"key_{i}\":{i},")),
    ];
    let within = good.iter().position(|&byte| byte == b'{').map_or(0, |at| at + 1);
    let insert = |at: usize, text: &String| [&good[..at], text.as_bytes(), &good[at..]].concat();
    texts.iter().flat_map(|text| [insert(0, text), insert(within, text)]).collect()
}

/// Gives many changed versions of the `good` file at `path` to `parse`, whose result does not matter.
fn holds(name: &str, path: &Path, good: &[u8], repair: impl Fn(Vec<u8>) -> Vec<u8>, parse: impl Fn(&Path)) {
    std::fs::write(path, good).unwrap();
    parse(path);
    let worst = Cell::new((Duration::ZERO, 0));
    let check = |bytes: Vec<u8>| {
        let bytes = repair(bytes);
        std::fs::write(path, &bytes).unwrap();
        let limit = 4 * bytes.len() + (64 << 20);
        drop(bytes);
        let before = CountingAllocator::live();
        CountingAllocator::reset_peak();
        let begin = Instant::now();
        parse(path);
        let (time, memory) = (begin.elapsed(), CountingAllocator::peak().saturating_sub(before));
        worst.set((time.max(worst.get().0), memory.max(worst.get().1)));
        prop_assert!(time <= Duration::from_secs(1), "{time:?}");
        prop_assert!(memory <= limit, "{memory} bytes, at most {limit}");
        Ok(())
    };
    for (i, bytes) in extremes(good).into_iter().enumerate() {
        check(bytes).unwrap_or_else(|error| panic!("{name}, extreme {i}: {error}"));
    }
    // The same cases in each run; PROPTEST_CASES asks for more.
    let cases = std::env::var("PROPTEST_CASES").map_or(100, |cases| cases.parse().unwrap());
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&changes(), |changes| check(changed(good, &changes)));
    let (slowest, largest) = worst.get();
    eprintln!("{name}: at most {slowest:?} and {:.1} MiB", largest as f64 / f64::from(1 << 20));
    result.unwrap_or_else(|error| panic!("{name}: {error}"));
}

fn same(bytes: Vec<u8>) -> Vec<u8> {
    bytes
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

/// Held by each test, since the allocator counts for all of them.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_long_document_is_tokenized_in_pieces() {
    let _alone = ALONE.lock().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let text = "Some words, 1234 of them, of a (rather) long text's lines.\n".repeat(70_000);
    let before = CountingAllocator::live();
    CountingAllocator::reset_peak();
    let ids = tokenizer.encode(&text).unwrap();
    let peak = (CountingAllocator::peak() - before) as u64;
    eprintln!("{} bytes in {} tokens: at most {} bytes", text.len(), ids.len(), peak);
    assert!(peak < tokenizer.memory_to_encode(&text), "{peak} bytes");
    assert!(peak < 24 * text.len() as u64, "{peak} bytes for {}", text.len());
}

#[test]
fn no_file_panics_hangs_or_eats_memory() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);

    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192},
    });
    holds("config.json", &path("config.json"), config.to_string().as_bytes(), same, |path| {
        drop(ConfigFile::read(path).and_then(|file| decoder_config(&file)));
    });

    holds("safetensors", &path("x.safetensors"), &safetensors(), same, |path| {
        if let Ok(files) = ModelFiles::open_file(path) {
            files.names().for_each(|name| drop(files.read(name)));
        }
    });
    // The same with a length that fits the header, so that the header is read.
    let fit = |mut bytes: Vec<u8>| {
        let length = bytes.len().saturating_sub(8 + 32) as u64;
        bytes.splice(..bytes.len().min(8), length.to_le_bytes());
        bytes
    };
    holds("safetensors header", &path("x.safetensors"), &safetensors(), fit, |path| {
        if let Ok(files) = ModelFiles::open_file(path) {
            files.names().for_each(|name| drop(files.read(name)));
        }
    });

    std::fs::create_dir(path("model")).unwrap();
    std::fs::write(path("model/part.safetensors"), safetensors()).unwrap();
    let index = json!({"metadata": {"total_size": 32},
        "weight_map": {"a.weight": "part.safetensors", "b.weight": "part.safetensors"}});
    holds("index", &path("model/model.safetensors.index.json"), index.to_string().as_bytes(), same, |path| {
        drop(ModelFiles::open(path.parent().unwrap()));
    });

    let slices = json!({"tensors": {
        "a.weight": {"dtype": "F32", "shape": [2, 3], "slices": [{"file": "part.safetensors", "start": 0, "end": 6}]},
        "b.weight": {"dtype": "BF16", "shape": [4], "slices": [{"file": "part.safetensors", "start": 0, "end": 4}]}}});
    holds("training/index.json", &path("model/index.json"), slices.to_string().as_bytes(), same, |path| {
        if let Ok(files) = SliceFiles::open(path.parent().unwrap()) {
            files.names().for_each(|name| drop(files.read(name)));
        }
    });

    let manifest = json!({"format": 2, "ottava": "0.1.0", "step": 3, "extra": {"tokens": 5},
        "files": {"part.safetensors": {"size": 10, "sha256": "00"}, "training/x": {"size": 1, "sha256": "11"}}});
    let reseal = |bytes: Vec<u8>| match serde_json::from_slice::<serde_json::Value>(&bytes) {
        Ok(value) if value.is_object() => seal(&value).into_bytes(),
        _ => bytes,
    };
    holds("manifest.json", &path("model/manifest.json"), seal(&manifest).as_bytes(), same, |path| {
        drop(Manifest::read(path.parent().unwrap()));
    });
    holds("manifest.json resealed", &path("model/manifest.json"), manifest.to_string().as_bytes(), reseal, |path| {
        drop(verify(path.parent().unwrap(), Verify::Hashes));
    });

    let toml = include_bytes!("../../../../configs/reference.toml");
    holds("run.toml", &path("run.toml"), toml, same, |path| drop(RunConfig::load(path, &[])));

    let records = "{\"text\": \"one \\u00e9\", \"n\": [1, {\"k\": null}]}\r\n\n{\"text\": \"two\"}\n".repeat(20);
    holds("jsonl", &path("a.jsonl"), records.as_bytes(), same, |path| {
        documents(path, &SourceOptions::default()).unwrap().for_each(drop);
    });

    let metrics = "{\"step\":1,\"loss\":2.5,\"tokens\":5}\n{\"step\":2,\"loss\":null}\n".repeat(20);
    holds("metrics.jsonl", &path("metrics.jsonl"), metrics.as_bytes(), same, |path| drop(Summary::read(path)));

    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, " ": 4}, "merges": [["a", "b"]]},
    });
    holds("tokenizer.json", &path("tokenizer.json"), tokenizer.to_string().as_bytes(), same, |path| {
        if let Ok(tokenizer) = Tokenizer::load(path) {
            drop(tokenizer.encode("ab a b\tAB").and_then(|ids| tokenizer.decode(&ids)));
        }
    });
}
