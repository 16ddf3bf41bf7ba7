//! Tests that a run that is killed repeatedly at random moments ends like an uninterrupted run.

use crate::setup::{Run, steps};
use serde_json::Value;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The number of steps of the run.
const STEPS: u64 = 36;
const TRAIN: [&str; 12] = [
    "train",
    "run.toml",
    "--set",
    "recipe=fp8-delayed",
    "--set",
    "max_steps=36",
    "--set",
    "save_steps=4",
    "--set",
    "eval_steps=7",
    "--set",
    "save_total_limit=3",
];

/// Returns the lines of metrics without times and memory.
fn metrics(run: &Path) -> Vec<Value> {
    // A killed run may leave half a line at the end.
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let mut lines: Vec<Value> = whole.map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        line.as_object_mut()
            .unwrap()
            .retain(|key, _| !["tokens_per_second", "peak_memory_bytes"].contains(&key.as_str()));
    }
    lines
}

/// Returns the steps of the checkpoints that have their final names.
fn checkpoints(run: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().map(|e| e.unwrap().file_name());
    let mut steps: Vec<u64> =
        names.filter_map(|name| name.to_str()?.strip_prefix("checkpoint-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Returns the last step that a log reports as saved.
fn last_saved(log: &str) -> Option<u64> {
    log.lines().filter_map(|line| line.split_once("  saved ")?.0.strip_prefix("step ")?.parse().ok()).next_back()
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The run is killed `OTTAVA_KILLS` times (30 by default) at random moments: during its start, its first save, later saves, steps and evaluations,
/// and after it has resumed from an older checkpoint.
#[test]
fn a_run_killed_at_random_moments_ends_as_the_unbroken_one() {
    let kills: u64 = std::env::var("OTTAVA_KILLS").map_or(30, |count| count.parse().unwrap());
    let unbroken = Run::new();
    let begin = Instant::now();
    unbroken.succeed(&TRAIN);
    let whole = begin.elapsed();
    let expected = metrics(&unbroken.path("run"));
    let end = |run: &Run| {
        let folder = run.path(&format!("run/checkpoints/checkpoint-{STEPS}"));
        let files = ["model.safetensors", "training/optimizer.safetensors", "training/scaling.safetensors"];
        files.map(|name| std::fs::read(folder.join(name)).unwrap())
    };
    let (mut random, mut run, mut killed, mut finished, mut went_back) = (Random(7), Run::new(), 0, 0, 0);
    while killed < kills {
        let folder = run.path("run");
        let saved = checkpoints(&folder);
        let back =
            saved.first().filter(|_| random.below(5) == 0).map(|step| format!("run/checkpoints/checkpoint-{step}"));
        let resume: &[&str] = match (&back, saved.is_empty()) {
            (_, true) => &[],
            (Some(path), _) => &["--resume", path],
            (None, _) => &["--resume"],
        };
        went_back += u64::from(back.is_some());
        let mut child =
            run.command(&[&TRAIN, resume].concat()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.below(whole.as_micros() as u64 * 2 / 3)));
        let over = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let mut log = String::new();
        child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        if let Some(status) = over {
            assert!(status.success(), "{log}");
        } else {
            killed += 1;
        }
        let found = metrics(&folder);
        assert_eq!(found, expected[..found.len()], "{log}");
        let saved = checkpoints(&folder);
        assert!(saved.last().copied() >= last_saved(&log), "{saved:?} after {log}");
        assert!(!log.contains("damaged"), "{log}");
        if over.is_some() {
            assert_eq!(found.len(), expected.len());
            assert!(end(&run) == end(&unbroken), "the weights differ after {killed} kills");
            finished += 1;
            run = Run::new();
        }
    }
    // The last killed run is resumed to its end.
    let resume: &[&str] = if checkpoints(&run.path("run")).is_empty() { &[] } else { &["--resume"] };
    run.succeed(&[&TRAIN, resume].concat());
    assert_eq!(steps(&run.path("run/metrics.jsonl")).len(), expected.len());
    assert!(end(&run) == end(&unbroken));
    eprintln!("{killed} kills, {finished} runs finished in spite of them, {went_back} went back");
}
