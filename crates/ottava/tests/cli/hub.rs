//! Tests names of the Hub in commands and settings, with a server that speaks the protocol of the Hub.

use crate::setup::{Run, json};
use ottava_hub::testing::FakeHub;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The arguments of a short run that starts from the model on the server.
const TRAIN: [&str; 6] = ["train", "run.toml", "--set", "model.path=otter/tiny", "--set", "init=pretrained"];

/// A run, and a server that has its model and its data.
struct Remote {
    run: Run,
    fake: FakeHub,
}

impl Remote {
    fn new() -> Remote {
        let remote = Remote { run: Run::new(), fake: FakeHub::start() };
        let data: String = (0..30).map(|i| format!("{{\"text\": \"line {} of the text\"}}\n", i * i)).collect();
        remote.fake.add("datasets/otter/lines", &[("data/train-00000-of-00001.jsonl", data.as_bytes())]);
        remote
    }

    /// Adds a model to the server: the checkpoint of a short run, with the files `more`.
    fn publish(&self, more: &[(&str, &[u8])]) -> String {
        let folder = self.run.path(self.run.checkpoint().to_str().unwrap());
        let names = ["config.json", "tokenizer.json", "model.safetensors"];
        let files = names.map(|name| std::fs::read(folder.join(name)).unwrap());
        let mut files: Vec<(&str, &[u8])> = names.into_iter().zip(files.iter().map(Vec::as_slice)).collect();
        files.extend(more);
        self.fake.add("models/otter/tiny", &files)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.run.command(args);
        command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", self.fake.url());
        command
    }

    /// Runs a command that must succeed, and returns its standard output and standard error.
    fn succeed(&self, args: &[&str]) -> (String, String) {
        let output = self.command(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (out, error) = (text(output.stdout), text(output.stderr));
        assert!(output.status.success(), "{args:?}: {error}");
        (out, error)
    }

    fn weights_in_cache(&self) -> bool {
        let links = self.run.path("huggingface/hub/models--otter--tiny/snapshots");
        let folders = std::fs::read_dir(links).into_iter().flatten().flatten();
        folders.map(|folder| folder.path().join("model.safetensors")).any(|path| path.exists())
    }
}

#[test]
fn models_and_data_are_named_by_their_ids() {
    let remote = Remote::new();
    remote.publish(&[("pytorch_model.bin", b"pickle")]);
    let settings = ["--set", "model.path=otter/tiny", "--set", "init=pretrained", "--set", "output_dir=second"];
    let data =
        ["--set", "train_files=[\"otter/lines?split=train\"]", "--set", "val_files=[]", "--set", "text_documents=file"];
    let of = |command: &'static str| [&[command, "run.toml"][..], &settings, &data].concat();
    // A plan downloads no weights.
    remote.succeed(&of("plan"));
    assert!(!remote.weights_in_cache());
    let (_, log) = remote.succeed(&of("train"));
    assert!(log.contains("otter/tiny: downloaded") && remote.weights_in_cache(), "{log}");
    let (out, _) = remote.succeed(&[
        "generate",
        "otter/tiny@main",
        "--prompt",
        "line",
        "--max-new-tokens",
        "3",
        "--device",
        "cpu",
    ]);
    assert!(out.starts_with("line"), "{out}");
    remote.succeed(&[
        "eval",
        "otter/tiny",
        "--data",
        "hf://datasets/otter/lines/data",
        "--max-length",
        "16",
        "--device",
        "cpu",
    ]);
    remote.succeed(&["export", "otter/tiny", "exported", "--format", "bf16"]);
    // The starter keeps the names.
    remote.succeed(&["init", "otter/tiny", "otter/lines", "--output", "new.toml"]);
    let text = std::fs::read_to_string(remote.run.path("new.toml")).unwrap();
    for line in [
        "path = \"otter/tiny\"",
        "train_files = [\"otter/lines\"]",
        "init = \"pretrained\"",
        "output_dir = \"runs/tiny\"",
    ] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    let text = std::fs::read_to_string(remote.run.path("second/hub.json")).unwrap();
    let pins: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(pins["models/otter/tiny@main"].is_string() && pins["datasets/otter/lines@main"].is_string(), "{pins}");
    // A new commit does not change a run that goes on.
    let before = remote.fake.received().0.len();
    remote.fake.add("models/otter/tiny", &[("model.safetensors", b"other weights"), ("README.md", b"new")]);
    remote.succeed(&[&of("train")[..], &["--set", "max_steps=3", "--resume"]].concat());
    assert_eq!(remote.fake.received().0.len(), before, "the commits of the run are in the cache");
    // Neither does a machine without a network stop it.
    let output = remote
        .run
        .command(&["--offline", "generate", "otter/tiny", "--prompt", "line", "--max-new-tokens", "1"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A folder with the name is preferred.
    std::fs::create_dir(remote.run.path("otter")).unwrap();
    remote.run.fail(&["generate", "otter/tiny", "--prompt", "x"], 1, &["otter/tiny: No such file or directory"]);
}

#[test]
fn a_path_that_does_not_exist_may_be_meant_by_a_name() {
    let remote = Remote::new();
    let output = remote.command(&["train", "run.toml", "--set", "model.tokenizer=data/tokenizer"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let folder = remote.run.path("").canonicalize().unwrap();
    let expected = format!("if data/tokenizer is meant as a path: it does not exist in {}", folder.display());
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn ranks_read_the_commit_of_rank_0() {
    let remote = Remote::new();
    let commit = remote.publish(&[]);
    remote.succeed(&[&TRAIN[..], &["--set", "output_dir=two", "--ranks", "2"]].concat());
    let config = std::fs::read_to_string(remote.run.path("two/config.toml")).unwrap();
    assert!(config.contains(&commit), "{config}");
    let asked = |target: &str| target.contains("/models/otter/tiny/revision/");
    let count = remote.fake.received().0.iter().filter(|request| asked(request.target().1)).count();
    assert_eq!(count, 1, "only rank 0 asks for the commit");
}

#[test]
fn a_resumed_run_keeps_each_revision_apart() {
    let remote = Remote::new();
    remote.fake.add_branch(
        "datasets/otter/lines",
        "v2",
        &[("data/train-00000-of-00001.jsonl", b"{\"text\": \"other lines\"}\n")],
    );
    let data = "train_files=[\"otter/lines\",\"otter/lines@v2\"]";
    let args = ["train", "run.toml", "--set", data, "--set", "text_documents=file", "--set", "output_dir=both"];
    remote.succeed(&args);
    remote.fake.add_branch(
        "datasets/otter/lines",
        "v2",
        &[("data/train-00000-of-00001.jsonl", b"{\"text\": \"changed\"}\n")],
    );
    remote.succeed(&[&args[..], &["--set", "max_steps=3", "--resume"]].concat());
    let config = std::fs::read_to_string(remote.run.path("both/config.toml")).unwrap();
    let commits: std::collections::BTreeSet<&str> =
        config.split("snapshots/").skip(1).map(|rest| &rest[..40]).collect();
    assert_eq!(commits.len(), 2, "{config}");
}

#[test]
fn an_id_that_cannot_be_read_says_what_to_do() {
    let remote = Remote::new();
    let fails = |args: &[&str], words: &[&str]| {
        let output = remote.command(args).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "no {word:?} in {error}"));
    };
    fails(&["generate", "otter/absent", "--prompt", "x"], &["has no model otter/absent", "HF_TOKEN"]);
    fails(&["download", "a/b/c"], &["write OWNER/NAME"]);
    // Data where a model is expected, as in `init` with swapped arguments.
    let hint = "has a data set of this name";
    fails(&["download", "otter/lines"], &[hint, "`ottava download --dataset otter/lines`"]);
    fails(&["init", "otter/lines", "text.txt", "--output", "x.toml"], &[hint, "`ottava init MODEL otter/lines`"]);
    let output = remote.command(&["download", "otter/absent"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!error.contains("of this name") && !error.contains("meant as a path"), "{error}");
    fails(&["push", "run", "otter"], &["write OWNER/NAME"]);
    // Old models of the Hub have a single word as their name.
    fails(
        &["generate", "otter-2", "--prompt", "x"],
        &["has no model otter-2, or it is private", "if otter-2 is meant as a path: it does not exist in"],
    );
    // The weights of a model are not downloaded where an adapter is expected.
    remote.publish(&[]);
    let base = remote.run.checkpoint();
    let serve = ["serve", base.to_str().unwrap(), "--port", "0", "--device", "cpu", "--lora-modules", "a=otter/tiny"];
    fails(&serve, &["there is no adapter_config.json"]);
    assert!(!remote.weights_in_cache());
    fails(
        &["download", "--dataset", "otter/lines", "--include", "*.csv"],
        &["no file has a name of the pattern *.csv"],
    );
    let args = ["train", "run.toml", "--set", "train_files=[\"hf://otter/lines\"]"];
    fails(&args, &["hf://datasets/OWNER/NAME@REVISION/PATTERN"]);
    fails(&["--offline", "download", "otter/tiny"], &["--offline is set", "where there is a network"]);
}

#[test]
fn a_checkpoint_is_pushed_with_a_card_of_its_run() {
    let remote = Remote::new();
    remote.run.succeed(&["train", "run.toml", "--set", "recipe=fp8-delayed"]);
    let push = |args: &[&str]| {
        let mut command = remote.command(&[&["push", "run", "otter/pushed"], args].concat());
        let output = command.env("HF_TOKEN", "write").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let dry = push(&["--dry-run"]);
    assert!(dry.contains("# pushed") && dry.contains("model.safetensors"), "{dry}");
    assert!(remote.fake.received().0.is_empty());
    let pushed = json(&push(&["--json", "--private"]));
    assert_eq!(pushed["url"], format!("{}/otter/pushed", remote.fake.url()));
    let files = remote.fake.files("models/otter/pushed");
    let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    assert!(
        ["README.md", "config.json", "model.safetensors", "tokenizer.json"].iter().all(|name| paths.contains(name))
    );
    assert!(!paths.iter().any(|path| path.starts_with("training") || *path == "manifest.json"), "{paths:?}");
    let card =
        String::from_utf8(files[paths.iter().position(|path| *path == "README.md").unwrap()].bytes.clone()).unwrap();
    for part in [
        "library_name: transformers",
        "- fp8-delayed",
        "| Steps | 2 |",
        "| Data | text.txt |",
        "max_steps = 2",
        "trained with Ottava",
    ] {
        assert!(card.contains(part), "no {part} in {card}");
    }
    let folder = remote.run.path("");
    assert!(!card.contains(folder.to_str().unwrap()), "no path of the machine: {card}");
    // What was pushed is read by its name.
    remote.succeed(&["generate", "otter/pushed", "--prompt", "line", "--max-new-tokens", "1", "--device", "cpu"]);
    let output = remote.command(&["push", "run", "otter/pushed"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("set HF_TOKEN"), "{output:?}");
}

#[test]
fn an_adapter_of_a_named_model_names_it() {
    let remote = Remote::new();
    let commit = remote.publish(&[]);
    remote.succeed(&[&TRAIN[..], &["--set", "output_dir=adapter", "--set", "lora.r=2"]].concat());
    let config =
        std::fs::read_to_string(remote.run.path("adapter/checkpoints/checkpoint-2/adapter_config.json")).unwrap();
    assert!(config.contains("\"base_model_name_or_path\": \"otter/tiny\"") && config.contains(&commit), "{config}");
    // The base is found by this name, in the cache.
    let more = [
        "train",
        "run.toml",
        "--set",
        "model.path=adapter/checkpoints/checkpoint-2",
        "--set",
        "init=pretrained",
        "--set",
        "output_dir=more",
    ];
    let output = remote.run.command(&more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The number of kills: `OTTAVA_KILLS`, or 3.
fn kills() -> u64 {
    std::env::var("OTTAVA_KILLS").map_or(3, |count| count.parse().unwrap())
}

/// Returns the folder that `download` prints, and whether it has the files of the server.
fn is_whole(folder: &Path, files: &[(&str, &[u8])]) -> bool {
    files.iter().all(|(name, bytes)| std::fs::read(folder.join(name)).is_ok_and(|found| found == *bytes))
}

#[test]
fn a_download_that_is_killed_at_random_moments_resumes() {
    let remote = Remote::new();
    let weights: Vec<u8> = (0..9_000_000u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let halves = weights.split_at(4_000_000);
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: [(&str, &[u8]); 4] = [
        ("config.json", b"{}"),
        ("model-1.safetensors", halves.0),
        ("model-2.safetensors", halves.1),
        ("model.safetensors.index.json", index),
    ];
    remote.fake.add("models/otter/large", &files);
    let args = ["download", "otter/large", "--json"];
    let folder = |out: &str| PathBuf::from(json(out)["folder"].as_str().unwrap());
    let cache = remote.run.path("huggingface");
    let begin = Instant::now();
    assert!(is_whole(&folder(&remote.succeed(&args).0), &files));
    let whole = begin.elapsed();
    let (mut killed, mut random) = (0, 7u64);
    while killed < kills() {
        std::fs::remove_dir_all(&cache).unwrap();
        loop {
            let mut child = remote.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(Duration::from_micros((random >> 33) % (whole.as_micros() as u64)));
            let is_over = child.try_wait().unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            // No file of the cache has its name before it is whole.
            for blob in std::fs::read_dir(cache.join("hub/models--otter--large/blobs")).into_iter().flatten().flatten()
            {
                let (name, size) = (blob.file_name().into_string().unwrap(), blob.metadata().unwrap().len());
                let sizes = files.map(|(_, bytes)| bytes.len() as u64);
                assert!(name.contains('.') || sizes.contains(&size), "{name} has {size} bytes");
            }
            if let Some(status) = is_over {
                assert!(status.success());
                break;
            }
            killed += 1;
            if killed >= kills() {
                break;
            }
        }
        assert!(is_whole(&folder(&remote.succeed(&args).0), &files), "after {killed} kills");
    }
}
