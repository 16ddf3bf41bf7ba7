//! `tests/data/README.md` describes the source of the checkpoints.

use super::ranks::FILE;
use crate::convert;
use ottava_checkpoint::ModelFiles;
use ottava_common::hash::sha256;
use ottava_models::{ConfigFile, RopeKind, Uniform, decoder_config};
use ottava_tensor::DType;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

pub(super) fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/megatron").join(name)
}

/// Copies a recorded checkpoint.
pub(super) fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(recorded(name).join("iter_0000005")).unwrap() {
        let entry = entry.unwrap();
        let to = folder.path().join(entry.file_name());
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to).unwrap();
            continue;
        }
        std::fs::create_dir(&to).unwrap();
        std::fs::copy(entry.path().join(FILE), to.join(FILE)).unwrap();
    }
    folder
}

/// Returns a file of `torch.save` with this pickle.
pub(super) fn archive(pickle: &[u8], method: CompressionMethod) -> Vec<u8> {
    let mut writer = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    writer.start_file("archive/data.pkl", SimpleFileOptions::default().compression_method(method)).unwrap();
    writer.write_all(pickle).unwrap();
    writer.finish().unwrap().into_inner()
}

/// Removes the arguments of the run from the files of ranks.
fn without_args(folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path().join(FILE);
        let mut before = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
        let mut after = ZipWriter::new(std::io::Cursor::new(Vec::new()));
        for at in 0..before.len() {
            let mut entry = before.by_index(at).unwrap();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
            let name = entry.name().unwrap().into_owned();
            if name.ends_with("data.pkl") {
                let at = bytes.windows(4).position(|window| window == b"args").unwrap();
                bytes[at] = b'_';
            }
            let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
            after.start_file(name, stored).unwrap();
            after.write_all(&bytes).unwrap();
        }
        std::fs::write(&path, after.finish().unwrap().into_inner()).unwrap();
    }
}

/// Replaces the beginning of the pickles in a file of chunks.
fn with_pickle(chunks: &[u8], pickle: &[u8]) -> Vec<u8> {
    let mut bytes = chunks.to_vec();
    let starts = b"data.pklFB";
    for at in (0..chunks.len()).filter(|at| chunks[*at..].starts_with(starts)) {
        let start = at + chunks[at..].windows(2).position(|window| window == b"\x80\x02").unwrap();
        bytes[start..start + pickle.len()].copy_from_slice(pickle);
    }
    assert_ne!(bytes, chunks);
    bytes
}

fn error(source: &Path) -> String {
    let output = tempfile::tempdir().unwrap();
    let error = convert(source, None, &output.path().join("model"), DType::F32).unwrap_err().to_string();
    assert_eq!(std::fs::read_dir(output.path()).unwrap().count(), 0, "{error}");
    error
}

/// One checkpoint is from tensor and pipeline parallel ranks, with QK-norm and a head; the other is from tensor parallel ranks, with biases and a
/// tied head. In the format `torch_dist`, the first one has one tensor for all blocks and `common.pt`; the second one has numbered blocks and an
/// object.
#[test]
fn merged_weights_are_those_that_were_divided() {
    for (name, format, tensors, architecture) in [
        ("tp2-pp2", "", 70, "Qwen3ForCausalLM"),
        ("tp2-pp2", "-dist", 11, "Qwen3ForCausalLM"),
        ("tp2", "", 32, "Qwen2ForCausalLM"),
        ("tp2", "-dist", 18, "Qwen2ForCausalLM"),
    ] {
        let source = recorded(&format!("{name}{format}"));
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("model");
        let converted = convert(&source, None, &output, DType::F32).unwrap();
        let expected: Value =
            serde_json::from_slice(&std::fs::read(recorded(name).join("expected.json")).unwrap()).unwrap();
        let files = ModelFiles::open(&output).unwrap();
        let expected = expected.as_object().unwrap();
        assert_eq!(files.names().collect::<Vec<_>>().len(), expected.len());
        for (weight, expected) in expected {
            let (info, bytes) = (files.info(weight).unwrap(), files.read(weight).unwrap());
            assert_eq!(json!(info.shape), expected["shape"], "{name}: {weight}");
            let first: Vec<f32> = bytes.chunks(4).take(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(
                expected["sha256"],
                sha256(&bytes),
                "{name}: {weight}: {first:?}, expected {}",
                expected["first"]
            );
        }
        assert_eq!(converted.stored, [("bfloat16", tensors)].into(), "{name}");
        let config = ConfigFile::read(&output).unwrap();
        assert_eq!(config.architecture().unwrap().as_deref(), Some(architecture));
        let sizes = decoder_config(&config).unwrap();
        let Uniform { heads, mlp, rope } = Uniform::of(&sizes).unwrap();
        assert_eq!((sizes.stream.channels, mlp.hidden, sizes.vocabulary, sizes.max_positions), (16, 24, 30, 64));
        let expected = if name == "tp2" { (4, 2, 4) } else { (8, 4, 4) };
        assert_eq!((heads.heads, heads.kv_heads, heads.head_dim), expected);
        assert_eq!((sizes.stream.norm.eps, rope.theta, sizes.head.tied), (1e-6, 10_000.0, name == "tp2"));
        assert!(matches!(rope.kind, RopeKind::Default));

        // The folder of one checkpoint also gives the files for another checkpoint.
        std::fs::write(output.join("tokenizer_config.json"), "{\"kept\": true}").unwrap();
        let again = folder.path().join("again");
        convert(&source.join("iter_0000005"), Some(&output), &again, DType::F32).unwrap();
        for file in ["model.safetensors", "tokenizer_config.json"] {
            assert!(std::fs::read(again.join(file)).unwrap() == std::fs::read(output.join(file)).unwrap(), "{file}");
        }
    }
}

#[test]
fn checkpoints_that_are_not_whole_are_refused() {
    let folder = copy("tp2-pp2");
    std::fs::remove_dir_all(folder.path().join("mp_rank_01_001")).unwrap();
    assert!(error(folder.path()).contains("the file of rank 1 of 2 in stage 1 of 2 is missing"));
    let folder = copy("tp2-pp2");
    for rank in ["mp_rank_00_001", "mp_rank_01_001"] {
        std::fs::remove_dir_all(folder.path().join(rank)).unwrap();
    }
    assert!(error(folder.path()).contains("it has 2 blocks, and config.json 4"));
    let empty = tempfile::tempdir().unwrap();
    assert!(
        error(empty.path()).contains("there are no folders mp_rank_00, mp_rank_01 and so on with model_optim_rng.pt")
    );
    // The sizes are the sizes of another model.
    let (folder, output) = (copy("tp2"), tempfile::tempdir().unwrap());
    let like = output.path().join("like");
    convert(&recorded("tp2"), None, &like, DType::F32).unwrap();
    without_args(folder.path());
    let config = std::fs::read_to_string(like.join("config.json")).unwrap();
    for (from, to, words) in [
        (
            "\"intermediate_size\": 24",
            "\"intermediate_size\": 32",
            "`decoder.layers.0.mlp.linear_fc1.weight` has shape [24, 16], and config.json makes it [32, 16]",
        ),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "it has 2 blocks, and config.json 3"),
        (
            "\"model_type\": \"qwen2\"",
            "\"model_type\": \"llama\"",
            "`decoder.layers.0.self_attention.linear_qkv.bias` has no place in a model of this config.json",
        ),
        (
            "\"model_type\": \"qwen2\"",
            "\"model_type\": \"qwen3\"",
            "decoder.layers.0.self_attention.q_layernorm.weight is missing in stage 0",
        ),
    ] {
        assert!(config.contains(from));
        std::fs::write(like.join("config.json"), config.replace(from, to)).unwrap();
        let found = convert(folder.path(), Some(&like), &output.path().join("x"), DType::F32).unwrap_err().to_string();
        assert!(found.contains(words), "{found} lacks {words:?}");
    }
}

#[test]
fn distributed_checkpoints_that_are_not_whole_are_refused() {
    let changed = |name: &str, file: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>, words: &str| {
        let folder = copy(name);
        let path = folder.path().join(file);
        std::fs::write(&path, change(std::fs::read(&path).unwrap_or_default())).unwrap();
        let found = error(folder.path());
        assert!(found.contains(words), "{found} lacks {words:?}");
    };
    let cut = |bytes: Vec<u8>| bytes[..bytes.len() - 1].to_vec();
    changed(
        "tp2-dist",
        "__1_0.distcp",
        &cut,
        "`decoder.layers.1.mlp.linear_fc2.weight` has a chunk at [0, 12] that has",
    );
    changed("tp2-dist", ".metadata", &cut, ".metadata: its pickle is cut off");
    changed(
        "tp2-dist",
        "metadata.json",
        &|_| b"{\"sharded_backend\": \"zarr\"}".to_vec(),
        "its `sharded_backend` is \"zarr\"; only \"torch_dist\"",
    );
    changed("tp2-dist", "metadata.json", &|_| Vec::new(), "its `sharded_backend` is null");
    changed("tp2-pp2-dist", "common.pt", &cut, "common.pt: this is not a file of torch.save");
    // The new name has the same length, so that positions in the file stay the same.
    let renamed = |from: &'static str, to: &'static str| {
        assert_eq!(from.len(), to.len());
        move |bytes: Vec<u8>| {
            let mut bytes = bytes;
            let at: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
            assert!(!at.is_empty());
            at.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to.as_bytes()));
            bytes
        }
    };
    for (name, from, to, words) in [
        ("tp2-dist", "embedding.word", "embedding.wort", "the weight embedding.word_embeddings.weight is missing"),
        ("tp2-dist", "layers.1.", "layers.2.", "it has 3 blocks, and config.json 2"),
        (
            "tp2-dist",
            "layers.0.mlp.linear_fc2",
            "layers.0.mlp.linear_fcX",
            "the weight decoder.layers.mlp.linear_fc2.weight or decoder.layers.0.mlp.linear_fc2.weight is missing",
        ),
        (
            "tp2-dist",
            "optimizer.state.exp_avg",
            "decorator.state.exp_avg",
            "`decorator.state.exp_avg.decoder.final_layernorm.weight` has no place",
        ),
        ("tp2-dist", "common_state", "common_stats", "it has no arguments of its run; name a Hugging Face folder"),
        ("tp2-dist", "__1_0.distcp", "__9_0.distcp", "lies in \"__9_0.distcp\", which the folder does not have"),
        (
            "tp2-pp2-dist",
            "_StorageInfo",
            "_StorageCode",
            "it refers to `torch.distributed.checkpoint.filesystem._StorageCode`",
        ),
    ] {
        changed(name, ".metadata", &renamed(from, to), words);
    }
    let folder = copy("tp2-dist");
    std::fs::remove_file(folder.path().join("metadata.json")).unwrap();
    assert!(
        error(folder.path()).contains("it has no metadata.json: it is not whole, or its format is not `torch_dist`")
    );
    let folder = copy("tp2-dist");
    std::fs::remove_file(folder.path().join("__0_0.distcp")).unwrap();
    assert!(error(folder.path()).contains("lies in \"__0_0.distcp\", which the folder does not have"));
    // The sizes are the sizes of another model.
    let (source, output) = (recorded("nemo"), tempfile::tempdir().unwrap());
    let like = output.path().join("like");
    convert(&recorded("halves"), None, &like, DType::F32).unwrap();
    let config = std::fs::read_to_string(like.join("config.json")).unwrap();
    for (from, to, words) in [
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "it has 2 blocks, and config.json 3"),
        (
            "\"intermediate_size\": 24",
            "\"intermediate_size\": 32",
            "`decoder.layers.mlp.linear_fc1.weight` has shape [2, 48, 16], and config.json makes it [2, 64, 16]",
        ),
        (
            "\"vocab_size\": 30",
            "\"vocab_size\": 33",
            "`embedding.word_embeddings.weight` has shape [32, 16], and config.json makes it [33, 16]",
        ),
    ] {
        assert!(config.contains(from));
        std::fs::write(like.join("config.json"), config.replace(from, to)).unwrap();
        let found = convert(&source, Some(&like), &output.path().join("x"), DType::F32).unwrap_err().to_string();
        assert!(found.contains(words), "{found} lacks {words:?}");
    }
}

/// The pickle has `os.system("touch FILE")`, which `pickle` would run when it reads.
#[test]
fn pickles_with_code_are_refused_and_not_run() {
    let folder = copy("tp2");
    let (file, touched) = (folder.path().join("mp_rank_01").join(FILE), folder.path().join("touched"));
    let command = format!("touch {}", touched.display());
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let old = [&b"\x80\x02cposix\nsystem\n"[..], &text(&command), b"\x85R."].concat();
    let new = [&b"\x80\x04"[..], &text("builtins"), &text("eval"), b"\x93", &text("1"), b"\x85R."].concat();
    // The call is hidden in an object that a checkpoint may have.
    let hidden =
        [&b"\x80\x02}"[..], &text("args"), b"cargparse\nNamespace\n)\x81}", &text("x"), b"cos\npopen\n)Rsbs."].concat();
    for (pickle, name) in [(old, "posix.system"), (new, "builtins.eval"), (hidden, "os.popen")] {
        std::fs::write(&file, archive(&pickle, CompressionMethod::Stored)).unwrap();
        let found = error(folder.path());
        let expected =
            format!("it refers to `{name}`, which has no place in a checkpoint and may be code; nothing of it was run");
        assert!(found.contains("mp_rank_01") && found.contains(&expected), "{found}");
        assert!(!touched.exists());
        // The code is in the metadata, in the arguments, or in the chunk of a tensor.
        let folder = copy("tp2-pp2-dist");
        let chunk = "__0_0.distcp";
        let whole = std::fs::read(folder.path().join(chunk)).unwrap();
        for (file, bytes) in [
            (".metadata", pickle.clone()),
            ("common.pt", archive(&pickle, CompressionMethod::Stored)),
            (chunk, with_pickle(&whole, &pickle)),
        ] {
            let before = std::fs::read(folder.path().join(file)).unwrap();
            std::fs::write(folder.path().join(file), bytes).unwrap();
            let found = error(folder.path());
            assert!(found.contains(file) && found.contains(&expected), "{found}");
            assert!(!touched.exists());
            std::fs::write(folder.path().join(file), before).unwrap();
        }
    }
    for (bytes, words) in [
        (
            archive(b"\x80\x02}.", CompressionMethod::Stored),
            "it has no `model`; this is not a checkpoint of Megatron-LM",
        ),
        (archive(b"\x80\x02N", CompressionMethod::Stored), "its pickle is cut off"),
        (archive(b"\x80\x06N.", CompressionMethod::Stored), "byte 0: protocol 6 is not read; 2 to 5 are"),
        (b"\x80\x02}.".to_vec(), "this is not a file of torch.save (PyTorch 1.6 or later)"),
        (Vec::new(), "this is not a file of torch.save"),
    ] {
        std::fs::write(&file, bytes).unwrap();
        let found = error(folder.path());
        assert!(found.contains(words), "{found} lacks {words:?}");
    }
}
