//! Tests that only text is lost if the reader of the program's output closes it.

use crate::setup::{Run, steps};
use std::fs::File;
use std::process::{Command, Stdio};

/// The destination of standard output or standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sink {
    Null,
    Full,
    DeadPipe,
}

impl Sink {
    fn open(self) -> Stdio {
        match self {
            Sink::Null => Stdio::null(),
            Sink::Full => File::options().write(true).open("/dev/full").unwrap().into(),
            Sink::DeadPipe => std::io::pipe().unwrap().1.into(),
        }
    }
}

const TRAIN: [&str; 4] = ["train", "run.toml", "--set", "recipe=fp8-delayed"];

/// Returns the bytes of the weights and optimizer states of a run of two steps.
fn saved(run: &Run) -> Vec<Vec<u8>> {
    let file = |name: &str| std::fs::read(run.path("run/checkpoints/checkpoint-2").join(name)).unwrap();
    ["model.safetensors", "training/optimizer.safetensors", "training/scaling.safetensors"].map(file).into()
}

#[test]
fn a_run_whose_output_has_no_reader_trains_to_the_same_bits() {
    let normal = Run::new();
    normal.succeed(&TRAIN);
    for (out, err) in [
        (Sink::DeadPipe, Sink::DeadPipe),
        (Sink::Full, Sink::Full),
        (Sink::Null, Sink::DeadPipe),
        (Sink::DeadPipe, Sink::Null),
    ] {
        let run = Run::new();
        run.replace("run.toml", "[precision]", "[generation]\nprompts = [\"line\"]\n[precision]");
        let status = run.command(&TRAIN).stdout(out.open()).stderr(err.open()).status().unwrap();
        // A sample that a full disk rejects is a lost result. If the pipe is closed, nothing counts as lost.
        assert_eq!(status.code(), Some(i32::from(out == Sink::Full)), "{out:?} {err:?}");
        assert!(saved(&run) == saved(&normal), "{out:?} {err:?}");
        assert_eq!(steps(&run.path("run/metrics.jsonl")), [0, 1, 2]);
    }
    let closed = Run::new();
    let program = env!("CARGO_BIN_EXE_ottava");
    let script = format!("exec {program} {} <&- >&- 2>&-", TRAIN.join(" "));
    let status = Command::new("sh").args(["-c", &script]).current_dir(closed.path(".")).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(saved(&closed) == saved(&normal));
}

#[test]
fn a_signal_saves_when_nobody_reads_the_log() {
    let run = Run::new();
    run.replace("run.toml", "max_steps = 2", "max_steps = 100000");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = run.command(&["train", "run.toml"]).stderr(writer).stdout(Stdio::null()).spawn().unwrap();
    run.wait_for_steps(&mut child, 3);
    drop(reader);
    run.wait_for_steps(&mut child, 30);
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(75));
    assert_eq!(std::fs::read_dir(run.path("run/checkpoints")).unwrap().count(), 1);
}

#[test]
fn every_command_survives_a_reader_that_has_enough() {
    let run = Run::new();
    let model = run.checkpoint();
    let model = model.to_str().unwrap();
    run.replace("run.toml", "max_steps = 2", "max_steps = 3");
    let commands: [&[&str]; 9] = [
        &["plan", "run.toml"],
        &["doctor"],
        &["prepare", "run.toml"],
        &["eval", model, "--data", "text.txt", "--max-length", "8", "--device", "cpu"],
        &["generate", model, "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"],
        &["inspect", "run"],
        &["bench", "gemm", "--model", "qwen2.5-0.5b", "--tokens", "2", "--device", "cpu"],
        &["train", "run.toml", "--resume", "--json"],
        &["train", "--help"],
    ];
    for command in commands {
        let status = run.command(command).stdout(Sink::DeadPipe.open()).stderr(Sink::Full.open()).status().unwrap();
        assert_eq!(status.code(), Some(0), "{command:?}");
    }
    let lost = run.command(&["eval", model, "--data", "text.txt", "--max-length", "8", "--device", "cpu"]);
    let lost = { lost }.stdout(Sink::Full.open()).output().unwrap();
    assert_eq!(lost.status.code(), Some(1), "a result that was lost is not a success");
    assert!(String::from_utf8_lossy(&lost.stderr).contains("standard output: "), "{lost:?}");
}
