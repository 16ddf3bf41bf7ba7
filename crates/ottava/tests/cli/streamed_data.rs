//! Training on files that are fetched while the run trains, with stand-ins for the servers.

use crate::ranks::signal;
use crate::setup::Run;
use ottava_http::testing::{Server, reply};
use ottava_hub::testing::FakeHub;
use ottava_store::testing::FakeStore;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const FILES: usize = 5;

/// Writes the files of the data, and returns their contents.
fn files(run: &Run) -> Vec<String> {
    let content =
        |file: usize| (0..8).map(|line| format!("file {file} has line {}\n", line * line)).collect::<String>();
    let files: Vec<String> = (0..FILES).map(content).collect();
    for (number, content) in files.iter().enumerate() {
        run.write(&format!("parts/{number}.txt"), content.as_bytes());
    }
    files
}

/// Returns the command that trains on `files` with more settings.
fn command(run: &Run, files: &[String], output: &str, more: &[&str]) -> Command {
    let names: Vec<String> = files.iter().map(|file| format!("\"{file}\"")).collect();
    let mut settings = vec![
        format!("train_files=[{}]", names.join(", ")),
        format!("output_dir={output}"),
        format!("cache_dir={output}-tokens"),
    ];
    settings.extend(["streaming=true", "shuffle_shards=1", "val_set_size=0.0", "max_steps=30"].map(String::from));
    settings.extend(more.iter().map(|setting| setting.to_string()));
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    run.command(&["train", "run.toml"].into_iter().chain(settings).collect::<Vec<_>>())
}

/// Trains on `files` with more settings.
fn train(run: &Run, files: &[String], output: &str, more: &[&str], variables: &[(&str, &str)]) -> Output {
    command(run, files, output, more).envs(variables.iter().copied()).output().unwrap()
}

fn succeed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    error
}

fn weights(run: &Run, output: &str) -> Vec<u8> {
    std::fs::read(run.path(&format!("{output}/checkpoints/checkpoint-30/model.safetensors"))).unwrap()
}

/// Returns whether the run in `output` has recorded a step.
fn has_trained(metrics: &std::path::Path) -> bool {
    std::fs::read_to_string(metrics).is_ok_and(|text| text.lines().any(|line| line.contains("\"tokens\"")))
}

#[test]
fn a_run_starts_when_its_first_file_is_there_and_survives_lost_connections() {
    let run = Run::new();
    let contents = files(&run);
    let local: Vec<String> = (0..FILES).map(|number| format!("parts/{number}.txt")).collect();
    succeed(&train(&run, &local, "local", &[], &[]));
    let (metrics, asked) = (run.path("remote/metrics.jsonl"), Mutex::new(Vec::new()));
    let server = Server::start(move |_, request| {
        let target = request.target().1.to_string();
        let (is_new, is_first) = {
            let mut asked = asked.lock().unwrap();
            let is_new = !asked.contains(&target);
            asked.extend(is_new.then(|| target.clone()));
            (is_new, asked.first() == Some(&target))
        };
        let name = target.trim_start_matches('/').split(".txt").next().unwrap_or_default();
        let Some(content) = name.parse::<usize>().ok().and_then(|number| contents.get(number)) else {
            return reply(404, "", "none");
        };
        if is_new {
            // The first connection for each file is lost after some bytes.
            let length = content.len();
            return format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{}", &content[..10]).into_bytes();
        }
        // All files but the first one come after the first step.
        let end = Instant::now() + Duration::from_secs(60);
        while !is_first && !has_trained(&metrics) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        reply(200, "", content)
    });
    let remote: Vec<String> =
        (0..FILES).map(|number| server.url(&format!("/{number}.txt?key=secret-of-the-server"))).collect();
    let output = train(&run, &remote, "remote", &["cached_shards=2"], &[]);
    let error = succeed(&output);
    assert!(weights(&run, "remote") == weights(&run, "local"), "the files decide the bits, not their place: {error}");
    let saved = std::fs::read_to_string(run.path("remote/config.toml")).unwrap();
    assert!(saved.contains("/0.txt") && !saved.contains("secret-of"), "{saved}");
    let copies = std::fs::read_dir(run.path("remote-tokens/objects")).unwrap().count();
    assert!(copies <= 3, "{copies} copies");
}

#[test]
fn streamed_objects_of_a_store_are_fetched_once_and_named_if_they_are_gone() {
    let (run, store) = (Run::new(), FakeStore::start());
    for (number, content) in files(&run).iter().enumerate() {
        store.set(&format!("corpus/parts/{number}.txt"), Some(content.as_bytes()));
    }
    let url = store.url();
    let variables =
        [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_ENDPOINT_URL", url.as_str())];
    let of = |files: &str, output: &str, more: &[&str]| train(&run, &[files.to_string()], output, more, &variables);
    store.slow(Some(Duration::from_millis(3)));
    succeed(&of("s3://corpus/parts/*.txt", "remote", &[]));
    succeed(&of("parts/*.txt", "local", &[]));
    assert!(weights(&run, "remote") == weights(&run, "local"));
    let gets = |number: usize| {
        let name = format!("/corpus/parts/{number}.txt");
        store.received().iter().filter(|request| request.target() == ("GET", &name)).count()
    };
    assert!((0..FILES).all(|number| gets(number) == 1), "each object is fetched once, in more than an epoch");
    let mut on_ranks = command(&run, &["s3://corpus/parts/*.txt".into()], "ranks", &["per_device_train_batch_size=1"]);
    succeed(&on_ranks.args(["--ranks", "2"]).envs(variables).output().unwrap());
    assert!((0..FILES).all(|number| gets(number) == 2), "the ranks of a host share copies and tokens");
    // A mixture of streamed sets.
    let text = std::fs::read_to_string(run.path("run.toml")).unwrap();
    let set = |name: &str, files: &str| {
        format!("[[data.datasets]]\nname = \"{name}\"\ntrain_files = [\"{files}\"]\nweight = 0.5\n")
    };
    let streamed = ["--set", "streaming=true", "--set", "val_set_size=0.0", "--set", "max_steps=30"];
    for (output, place) in [("mixed-remote", "s3://corpus/parts"), ("mixed-local", "parts")] {
        let sets = set("one", &format!("{place}/0.txt")) + &set("all", &format!("{place}/*.txt"));
        run.write("mixed.toml", (text.replace("train_files = [\"text.txt\"]", "") + &sets).as_bytes());
        let output = format!("output_dir={output}");
        let mut mixed = run.command(&[&["train", "mixed.toml", "--set", &output][..], &streamed].concat());
        succeed(&mixed.envs(variables).output().unwrap());
    }
    assert!(weights(&run, "mixed-remote") == weights(&run, "mixed-local"));
    let fails = |output: Output, code: i32, words: &[&str]| {
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "no {word:?} in {error}"));
    };
    fails(of("s3://corpus/parts", "folder", &[]), 1, &["is a folder of a store", "s3://corpus/parts/*.jsonl"]);
    fails(of("s3://corpus/parts/*.txt", "x", &["val_set_size=0.1"]), 1, &["name files in `val_files`"]);
    fails(of("s3://corpus/parts/*.txt", "x", &["cached_shards=1"]), 1, &["at least twice `data.shuffle_shards`"]);
    let prepare = ["prepare", "run.toml", "--set", "streaming=true", "--set", "val_set_size=0.0"];
    fails(run.command(&prepare).output().unwrap(), 1, &["--set data.streaming=false"]);
    let plan = [
        "plan",
        "run.toml",
        "--set",
        "streaming=true",
        "--set",
        "val_set_size=0.0",
        "--set",
        "train_files=[\"parts/*.txt\"]",
    ];
    let plan = run.command(&[&plan[..], &["--show-data", "1"]].concat()).output().unwrap();
    let shown = String::from_utf8_lossy(&plan.stdout);
    assert!(
        shown.contains("5 files that are fetched while the run trains") && shown.contains("a sample of the files"),
        "{shown}"
    );
}

#[test]
fn files_of_the_hub_are_streamed_at_one_commit() {
    let (run, hub) = (Run::new(), FakeHub::start());
    let contents = files(&run);
    let names: Vec<String> = (0..FILES).map(|number| format!("data/train-0000{number}-of-00005.txt")).collect();
    let of_hub: Vec<(&str, &[u8])> =
        names.iter().map(String::as_str).zip(contents.iter().map(String::as_bytes)).collect();
    hub.add("datasets/otter/parts", &of_hub);
    let url = hub.url();
    let variables = [("HF_HUB_OFFLINE", "0"), ("HF_ENDPOINT", url.as_str())];
    succeed(&train(&run, &["otter/parts".into()], "remote", &[], &variables));
    succeed(&train(&run, &["parts/*.txt".into()], "local", &[], &[]));
    assert!(weights(&run, "remote") == weights(&run, "local"));
    let pins = std::fs::read_to_string(run.path("remote/hub.json")).unwrap();
    assert!(pins.contains("otter/parts"), "{pins}");
    // A later commit has other files; the run goes on with its own.
    let other: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"another text\n"[..])).collect();
    hub.add("datasets/otter/parts", &other);
    std::fs::remove_dir_all(run.path("remote-tokens")).unwrap();
    for (files, output) in [("otter/parts", "remote"), ("parts/*.txt", "local")] {
        let mut resumed = command(&run, &[files.into()], output, &["max_steps=40"]);
        succeed(&resumed.arg("--resume").envs(variables).output().unwrap());
    }
    let last = |output: &str| {
        std::fs::read(run.path(&format!("{output}/checkpoints/checkpoint-40/model.safetensors"))).unwrap()
    };
    assert!(last("remote") == last("local"));
}

#[test]
fn a_signal_while_a_run_waits_for_a_file_saves_a_checkpoint() {
    let run = Run::new();
    let contents = files(&run);
    let local: Vec<String> = (0..FILES).map(|number| format!("parts/{number}.txt")).collect();
    succeed(&train(&run, &local, "local", &[], &[]));
    let (is_open, first) = (Arc::new(AtomicBool::new(false)), Mutex::new(None));
    let opened = is_open.clone();
    let server = Server::start(move |_, request| {
        let target = request.target().1.to_string();
        let is_first = *first.lock().unwrap().get_or_insert_with(|| target.clone()) == target;
        let end = Instant::now() + Duration::from_secs(60);
        while !is_first && !opened.load(Ordering::Relaxed) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let number: usize = target.trim_matches('/').trim_end_matches(".txt").parse().unwrap();
        reply(200, "", &contents[number])
    });
    let remote: Vec<String> = (0..FILES).map(|number| server.url(&format!("/{number}.txt"))).collect();
    let log = run.path("log");
    let mut waiting = command(&run, &remote, "remote", &[]);
    let mut child = waiting.stderr(std::fs::File::create(&log).unwrap()).stdout(Stdio::null()).spawn().unwrap();
    while !std::fs::read_to_string(&log).unwrap().contains("waiting for http") {
        assert!(child.try_wait().unwrap().is_none(), "{}", std::fs::read_to_string(&log).unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
    signal("-TERM", child.id());
    let code = child.wait().unwrap().code();
    let shown = std::fs::read_to_string(&log).unwrap();
    assert_eq!(code, Some(75), "{shown}");
    assert_eq!(crate::setup::folders(&run.path("remote/checkpoints")), 1, "{shown}");
    is_open.store(true, Ordering::Relaxed);
    let mut resumed = command(&run, &remote, "remote", &[]);
    succeed(&resumed.arg("--resume").output().unwrap());
    assert!(weights(&run, "remote") == weights(&run, "local"), "{shown}");
}
