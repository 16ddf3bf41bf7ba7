//! Tests that a signal stops the program soon and without loss in every phase.

use crate::setup::{Run, folders, steps};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The maximum time for which a process may run after a signal.
const SOON: Duration = Duration::from_secs(10);

fn spawn(run: &Run, args: &[&str]) -> Child {
    run.command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends SIGTERM. Expects that the process ends within [`SOON`] with `code`, and that its messages include `word`.
fn terminate(child: Child, code: i32, word: &str) {
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let begin = Instant::now();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(begin.elapsed() < SOON, "{:?}: {error}", begin.elapsed());
    assert!(error.contains(word), "{error}");
}

/// Returns the metrics of a run without times.
fn metrics(run: &Run) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let mut lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        line.as_object_mut()
            .unwrap()
            .retain(|key, _| !["tokens_per_second", "peak_memory_bytes"].contains(&key.as_str()));
    }
    lines
}

/// Writes lines whose evaluation takes much longer than a step.
fn long_validation(run: &Run) {
    let text: String = (0..2000).map(|i| format!("line {i} of a long text\n")).collect();
    run.write("text.txt", text.as_bytes());
    run.replace("run.toml", "val_set_size = 2", "val_set_size = 1600");
}

#[test]
fn evaluating_stops_and_the_resumed_run_has_the_same_metrics() {
    let train = ["train", "run.toml", "--set", "eval_steps=1", "--set", "max_steps=2"];
    let unbroken = Run::new();
    long_validation(&unbroken);
    unbroken.succeed(&train);
    let run = Run::new();
    long_validation(&run);
    let mut first = spawn(&run, &train);
    while !run.path("run/metrics.jsonl").exists() {
        assert!(first.try_wait().unwrap().is_none(), "the run goes on until it is told to stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    terminate(first, 130, "stopped by a signal while evaluating");
    // Each evaluation after a step is interrupted, including the evaluation after the last step.
    for step in 1..=2 {
        let args = if step == 1 { train.to_vec() } else { [&train[..], &["--resume"]].concat() };
        let mut child = spawn(&run, &args);
        run.wait_for_steps(&mut child, step);
        std::thread::sleep(Duration::from_millis(100));
        terminate(child, 75, &format!("stopped by a signal after step {step}"));
        assert_eq!(steps(&run.path("run/metrics.jsonl")).len(), step);
    }
    run.succeed(&[&train[..], &["--resume"]].concat());
    assert_eq!(metrics(&run), metrics(&unbroken));
}

#[test]
fn tokenizing_stops_and_leaves_nothing() {
    let run = Run::new();
    run.write("text.txt", "a line of a text that is long\n".repeat(2_000_000).as_bytes());
    for command in [&["prepare", "run.toml"][..], &["train", "run.toml"]] {
        let child = spawn(&run, command);
        std::thread::sleep(Duration::from_millis(500));
        terminate(child, 130, "stopped by a signal while");
        assert_eq!(folders(&run.path("tokens")), 0, "no temporary folder is left");
    }
}

#[test]
fn samples_stop() {
    let run = Run::new();
    let prompts = vec!["\"line\""; 100_000].join(", ");
    run.replace("run.toml", "[precision]", &format!("[generation]\nprompts = [{prompts}]\n[precision]"));
    let mut child = spawn(&run, &["train", "run.toml"]);
    run.wait_for_steps(&mut child, 3);
    std::thread::sleep(Duration::from_millis(500));
    terminate(child, 75, "the run is complete and saved");
}
