//! Tests copies of checkpoints in a store, and reports to trackers, with stand-ins for the servers.

use crate::ranks::{children, signal};
use crate::setup::{Run, json};
use ottava_http::testing::{Server, reply};
use ottava_store::testing::FakeStore;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The settings of a run whose checkpoints are copied.
const COPIED: &[&str] = &[
    "train",
    "run.toml",
    "--set",
    "checkpoint.upload_to=s3://runs/first",
    "--set",
    "max_steps=6",
    "--set",
    "save_steps=1",
    "--set",
    "save_total_limit=2",
];

/// A run, and a store.
struct Stored {
    run: Run,
    store: FakeStore,
}

impl Stored {
    fn new() -> Stored {
        Stored { run: Run::new(), store: FakeStore::start() }
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = self.run.command(&[COPIED, more].concat());
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.env("AWS_ENDPOINT_URL", self.store.url()).env_remove("AWS_REGION");
        command
    }

    fn succeed(&self, more: &[&str]) {
        let output = self.command(more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Returns the steps of all complete copies.
    fn steps(&self) -> Vec<u64> {
        let step =
            |name: &String| name.strip_prefix("runs/first/checkpoint-")?.strip_suffix("/manifest.json")?.parse().ok();
        self.store.objects().keys().filter_map(step).collect()
    }

    /// Returns the weights of the newest copy, and the steps of all copies.
    fn newest(&self) -> (Vec<u8>, Vec<u64>) {
        let (objects, steps) = (self.store.objects(), self.steps());
        let newest = steps.iter().max().expect("a complete copy");
        (objects[&format!("runs/first/checkpoint-{newest}/model.safetensors")].clone(), steps)
    }
}

/// The number of kills: `OTTAVA_KILLS`, or 4.
fn kills() -> u64 {
    std::env::var("OTTAVA_KILLS").map_or(4, |count| count.parse().unwrap())
}

#[test]
fn a_machine_that_is_lost_at_random_moments_loses_no_copy() {
    let undisturbed = Stored::new();
    let begin = Instant::now();
    undisturbed.succeed(&[]);
    let whole = begin.elapsed() * 2;
    let (expected, steps) = undisturbed.newest();
    assert_eq!(steps, [5, 6], "two copies are kept");
    let stored = Stored::new();
    // Uploads take most of the time of the run.
    stored.store.slow(Some(Duration::from_millis(4)));
    let (mut killed, mut random, mut before) = (0, 11u64, 0);
    while killed < kills() {
        let mut child = stored.command(&["--resume=auto"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 33) % (whole.as_micros() as u64)));
        let is_over = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
        let copies = stored.store.objects().keys().filter(|name| name.ends_with("/manifest.json")).count();
        let newest = if copies == 0 { 0 } else { stored.newest().1.into_iter().max().unwrap() };
        assert!(newest >= before, "the copy of step {before} is lost");
        before = newest;
        // The disk of the machine is lost too; after the end of the run, another run begins.
        std::fs::remove_dir_all(stored.run.path("run")).ok();
        if is_over.is_some_and(|status| status.success()) {
            assert_eq!(stored.newest().0, expected);
            stored.store.objects().keys().for_each(|name| stored.store.set(name, None));
            before = 0;
        }
    }
    stored.store.slow(None);
    stored.succeed(&["--resume=auto"]);
    assert_eq!(stored.newest().0, expected, "the resumed run has the bits of the undisturbed one");
    assert_eq!(stored.store.open_uploads(), 0);
}

#[test]
fn data_are_read_from_a_store() {
    let stored = Stored::new();
    let text = std::fs::read(stored.run.path("text.txt")).unwrap();
    let half = text.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    stored.store.set("corpus/texts/0.txt", Some(&text[..half]));
    stored.store.set("corpus/texts/1.txt", Some(&text[half..]));
    stored.store.set("corpus/other.txt", Some(b"not read"));
    let train = |files: &str, output: &str| {
        let (files, output) = (format!("train_files=[\"{files}\"]"), format!("output_dir={output}"));
        let args = ["train", "run.toml", "--set", &files, "--set", &output];
        let mut command = stored.run.command(&args);
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "secret");
        let output = command.env("AWS_ENDPOINT_URL", stored.store.url()).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let gets = || {
        stored
            .store
            .received()
            .iter()
            .filter(|request| request.target().1.ends_with(".txt") && !request.target().1.contains("list-type"))
            .count()
    };
    for (files, output, count) in
        [("s3://corpus/texts/*.txt", "a", 2), ("s3://corpus/texts", "b", 2), ("s3://corpus/texts/1.txt", "c", 2)]
    {
        let (success, error) = train(files, output);
        assert!(success, "{error}");
        assert_eq!(gets(), count, "an object is downloaded once");
    }
    let metrics = |output: &str| std::fs::read_to_string(stored.run.path(&format!("{output}/config.toml"))).unwrap();
    assert!(metrics("a").contains("/objects/") && metrics("a").contains("0.txt"));
    for (files, word) in
        [("gs://corpus/x.txt", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://corpus/x.txt", "AZURE_STORAGE_ACCOUNT")]
    {
        let (success, error) = train(files, "d");
        assert!(!success && error.contains(word), "{error}");
    }
    // A single file of a web server.
    let content = String::from_utf8(text.clone()).unwrap();
    let server = Server::start(move |_, request| match request.target().1 {
        "/text.txt" => reply(200, "", &content),
        _ => reply(404, "", "none"),
    });
    let (success, error) = train(&server.url("/text.txt"), "f");
    assert!(success && error.contains("text.txt: downloaded"), "{error}");
    let (success, error) = train(&server.url("/absent.txt"), "d");
    assert!(!success && error.contains("status 404"), "{error}");
    // A folder is read as a local folder is: its split for training, and no file that describes it.
    for (name, content) in [
        ("train/0.txt", &text[..]),
        ("validation/0.txt", &[0xff; 9][..]),
        ("test/0.txt", &[0xff; 9][..]),
        ("_SUCCESS", &[]),
    ] {
        stored.store.set(&format!("corpus/splits/{name}"), Some(content));
    }
    let (success, error) = train("s3://corpus/splits", "e");
    assert!(success, "{error}");
    let (success, error) = train("s3://corpus/none*", "d");
    assert!(!success && error.contains("no object has a name of this pattern"), "{error}");
}

/// The last checkpoint takes longer to upload than the job gives a process whose other rank is lost.
#[test]
fn a_lost_rank_does_not_cut_off_the_last_upload() {
    let stored = Stored::new();
    stored.store.slow(Some(Duration::from_millis(500)));
    let ranks = ["--ranks", "2", "--set", "per_device_train_batch_size=1", "--set", "global_batch_size=4"];
    let saves = ["--set", "max_steps=1000000", "--set", "save_steps=50", "--set", "save_total_limit=1"];
    let mut command = stored.command(&[ranks, saves].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    stored.run.wait_for_steps(&mut child, 110);
    signal("-KILL", children(&child)[0]);
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{error}");
    let folders = std::fs::read_dir(stored.run.path("run/checkpoints")).unwrap();
    let step = |name: String| name.strip_prefix("checkpoint-")?.parse::<u64>().ok();
    let local = folders.filter_map(|entry| step(entry.unwrap().file_name().into_string().unwrap())).max();
    // On a slow machine the rank may be lost before the first checkpoint is complete.
    assert_eq!(stored.steps().into_iter().max(), local, "{error}");
}

#[test]
fn a_store_without_keys_or_with_another_run_ends_the_run_before_it_starts() {
    let stored = Stored::new();
    let fails = |mut command: Command, words: &[&str]| {
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "no {word:?} in {error}"));
    };
    let mut command = stored.command(&[]);
    command.env_remove("AWS_SECRET_ACCESS_KEY");
    fails(command, &["AWS_SECRET_ACCESS_KEY is not set"]);
    fails(stored.run.command(&["train", "run.toml", "--set", "upload_to=/backup"]), &["s3://BUCKET/PREFIX"]);
    stored.succeed(&["--set", "max_steps=2"]);
    std::fs::remove_dir_all(stored.run.path("run")).unwrap();
    fails(stored.command(&[]), &["checkpoint-2 exists", "--resume"]);
    assert!(!stored.run.path("run").exists());
    // The commits and the settings of the run are with the copies.
    assert!(stored.store.objects().contains_key("runs/first/config.toml"));
}

#[test]
fn a_run_reports_to_a_tracker_and_survives_its_outage() {
    let run = Run::new();
    let server = Server::start(|number, _| if number == 0 { reply(503, "", "busy") } else { reply(200, "", "{}") });
    let args = ["train", "run.toml", "--json", "--set", "report_to=[\"trackio\",\"wandb\"]", "--set", "project=words"];
    let report = |more: &[&str]| {
        let output =
            run.command(&[&args[..], more].concat()).env("TRACKIO_SERVER_URL", server.url("/")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        json(&String::from_utf8(output.stdout).unwrap());
    };
    report(&[]);
    report(&["--resume", "--set", "max_steps=3"]);
    let bodies: Vec<serde_json::Value> =
        server.received().iter().map(|request| serde_json::from_slice(&request.bytes).unwrap()).collect();
    // The first request has failed, and its lines were sent again.
    let sent = bodies[1..].iter().flat_map(|body| body["logs"].as_array().unwrap());
    let sent: Vec<_> = sent.map(|entry| (entry["step"].as_u64().unwrap(), entry["run_id"].clone())).collect();
    let steps: Vec<u64> = sent.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [0, 1, 2, 3]);
    assert!(sent.iter().all(|(_, id)| *id == sent[0].1), "a resumed run keeps its id");
    let entry = &bodies[1]["logs"][1];
    assert_eq!((&entry["project"], &entry["run"]), (&"words".into(), &"run".into()));
    assert_eq!(entry["config"]["training.max_steps"], "2");
    assert!(entry["metrics"]["loss"].is_number());
    let folder = run.path("");
    let texts: String = bodies.iter().map(ToString::to_string).collect();
    assert!(
        !texts.contains(folder.to_str().unwrap()) && !texts.contains("line 4"),
        "neither folders nor data are sent"
    );
    assert_eq!(std::fs::read_dir(run.path("run/wandb")).unwrap().count(), 1);
}
