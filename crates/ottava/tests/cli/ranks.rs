//! Tests several ranks of one run, as processes on the CPU.

use crate::setup::{Run, steps};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The maximum time for which the ranks of a job may run after a fault. The documents promise 10 s.
const SOON: Duration = Duration::from_secs(10);

/// Returns the arguments of a run with four sequences per step for any number of ranks.
pub fn train<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let common = ["train", "run.toml", "--set", "per_device_train_batch_size=1", "--set", "global_batch_size=4"];
    [&common[..], more].concat()
}

pub fn losses(run: &Run) -> Vec<f64> {
    let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64()).collect()
}

pub fn spawn(run: &Run, args: &[&str]) -> Child {
    run.command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

/// Returns the processes that `parent` has started.
pub fn children(parent: &Child) -> Vec<u32> {
    children_of(parent.id())
}

/// Returns the processes that the threads of `pid` have started.
pub fn children_of(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let text = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    text.collect::<Vec<_>>().concat().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

pub fn lives(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

/// Waits for the end of `child` and returns its exit code and messages. Expects that it ends within [`SOON`] and leaves no process.
pub fn end(child: Child, others: &[u32]) -> (Option<i32>, String) {
    let begin = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    while others.iter().any(|&pid| lives(pid)) {
        assert!(begin.elapsed() < SOON, "a rank is left");
        std::thread::sleep(Duration::from_millis(20));
    }
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Expects that a signal to one of four ranks, or its death, ends all ranks of `ottava args`, and that one process can resume with `settings`.
pub fn expect_ends_of_all_ranks(inputs: impl Fn() -> Run, args: &[&str], settings: &[&str]) {
    for (name, victim) in [("-TERM", 2), ("-KILL", 1)] {
        let run = inputs();
        let mut child = spawn(&run, args);
        // By now, the checkpoint after step 5 is complete.
        run.wait_for_steps(&mut child, 8);
        let others = children(&child);
        signal(name, others[victim - 1]);
        let (code, error) = end(child, &others);
        let expected = if name == "-TERM" { (75, "stopped by a signal after step") } else { (5, "rank 1") };
        assert_eq!(code, Some(expected.0), "{error}");
        assert!(error.contains(expected.1), "{error}");
        let more = format!("max_steps={}", losses(&run).len() + 1);
        run.succeed(&train(&[settings, &["--set", &more, "--resume"]].concat()));
    }
}

#[test]
fn ranks_train_as_one_process_does() {
    let alone = Run::new();
    alone.succeed(&train(&["--set", "max_steps=6"]));
    for ranks in ["2", "4"] {
        let run = Run::new();
        run.succeed(&train(&["--set", "max_steps=6", "--ranks", ranks]));
        assert_eq!(steps(&run.path("run/metrics.jsonl")), steps(&alone.path("run/metrics.jsonl")));
        for (step, (one, several)) in losses(&alone).iter().zip(losses(&run)).enumerate() {
            // Gradients are sums of the same terms in another order.
            assert!((one - several).abs() < 1e-3 * one, "step {}: {one} alone, {several} on {ranks} ranks", step + 1);
        }
    }
}

/// Tests that the division among ranks changes no bit, and that a checkpoint of one division can be read by any other division.
#[test]
fn a_run_goes_on_with_other_ranks_and_another_division() {
    // With a constant learning rate, the schedule does not depend on the number of steps.
    const RATE: [&str; 2] = ["--set", "lr_scheduler.type=constant"];
    let unbroken = Run::new();
    unbroken.succeed(&train(&[&RATE[..], &["--set", "max_steps=6", "--ranks", "2"]].concat()));
    let run = Run::new();
    let go = |to: &str, ranks: &str, zero: &str, more: &[&str]| {
        let (to, zero) = (format!("max_steps={to}"), format!("parallel.zero={zero}"));
        run.succeed(&train(&[&RATE[..], &["--set", &to, "--set", &zero, "--ranks", ranks], more].concat()));
    };
    go("2", "2", "1", &[]);
    go("4", "2", "0", &["--resume"]);
    go("6", "2", "1", &["--resume"]);
    assert_eq!(losses(&unbroken), losses(&run), "the same ranks give the same bits");
    go("8", "4", "2", &["--resume", "--set", "offload_parameters=1", "--set", "eval_steps=1"]);
    let prompts = ["--resume", "--set", "offload_parameters=1", "--set", "generation.prompts=[\"a\"]"];
    go("10", "2", "3", &prompts);
    // Two shard groups, and then all ranks.
    go("11", "4", "3", &["--resume", "--set", "parallel.zero_shard_size=2"]);
    go("12", "4", "3", &["--resume"]);
    go("13", "1", "0", &["--resume"]);
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=13).collect::<Vec<_>>());
}

/// Scales of whole matrices are written once, by the rank with the first element, and every division can read them.
#[test]
fn a_run_at_level_o2_goes_on_with_another_division() {
    // Each rank has one micro-batch of four per step, so all ZeRO stages are bit-identical.
    let common = ["recipe=fp8-delayed", "storage=msamp-o2", "gradient_dtype=float32", "lr_scheduler.type=constant"];
    let common: Vec<&str> = common.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let go = |run: &Run, more: &[&str]| run.succeed(&train(&[&common[..], more].concat()));
    let unbroken = Run::new();
    go(&unbroken, &["--set", "max_steps=4", "--ranks", "4"]);
    let run = Run::new();
    go(&run, &["--set", "max_steps=1", "--ranks", "4", "--set", "parallel.zero=1"]);
    go(&run, &["--set", "max_steps=2", "--ranks", "4", "--set", "parallel.zero=0", "--resume"]);
    go(&run, &["--set", "max_steps=3", "--ranks", "4", "--set", "parallel.zero=3", "--resume"]);
    go(&run, &["--set", "max_steps=4", "--ranks", "4", "--set", "parallel.zero=2", "--resume"]);
    assert_eq!(losses(&unbroken), losses(&run), "the same ranks give the same bits");
    go(&run, &["--set", "max_steps=5", "--ranks", "2", "--set", "parallel.zero=1", "--resume"]);
    go(&run, &["--set", "max_steps=6", "--ranks", "1", "--set", "parallel.zero=0", "--resume"]);
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=6).collect::<Vec<_>>());
}

/// Optimizer states of another storage are converted, and the losses continue without a jump.
#[test]
fn a_run_goes_on_at_another_level() {
    let common = ["recipe=fp8-delayed", "lr_scheduler.type=constant", "learning_rate=1e-4", "warmup_steps=0"];
    let common: Vec<&str> = common.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let go = |run: &Run, steps: &str, storage: &str, more: &[&str]| {
        let [steps, storage] = [format!("max_steps={steps}"), format!("storage={storage}")];
        let output = run.ottava(&train(&[&common[..], &["--set", &steps, "--set", &storage], more].concat()));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{error}");
        error
    };
    let (unbroken, run) = (Run::new(), Run::new());
    go(&unbroken, "8", "float32", &[]);
    go(&run, "2", "float32", &[]);
    let ranks = ["--resume", "--ranks", "2", "--set", "parallel.zero=1"];
    let storages = [("4", "msamp-o2", &ranks[..]), ("6", "bfloat16", &["--resume"]), ("8", "float32", &ranks)];
    for (steps, storage, more) in storages {
        let error = go(&run, steps, storage, more);
        assert!(error.contains("optimizer.storage"), "the change is logged: {error}");
    }
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=8).collect::<Vec<_>>());
    for (unbroken, converted) in losses(&unbroken).iter().zip(losses(&run)) {
        // The states of four steps are rounded to FP8 and BF16, each update being 1e-4. Differences of up to 9e-4 were observed.
        assert!((unbroken - converted).abs() < 0.01, "{converted} instead of {unbroken}");
    }
    let lion = train(&[&common[..], &["--set", "max_steps=9", "--set", "optimizer.name=lion", "--resume"]].concat());
    run.fail(&lion, 1, &["`optimizer.name` was \"adamw\""]);
}

#[test]
fn a_rank_that_dies_is_named_and_all_end() {
    for victim in [0, 1, 2] {
        let run = Run::new();
        let long = ["--set", "max_steps=100000", "--set", "save_steps=5", "--ranks", "4"];
        let mut child = spawn(&run, &train(&[&long[..], &["--set", "parallel.zero=1"]].concat()));
        // The checkpoint after step 10 waits for the checkpoint after step 5.
        run.wait_for_steps(&mut child, 12);
        let others = children(&child);
        assert_eq!(others.len(), 3);
        match victim {
            0 => child.kill().unwrap(),
            rank => signal("-KILL", others[rank - 1]),
        }
        let (code, error) = end(child, &others);
        let log = |rank: usize| std::fs::read_to_string(run.path(&format!("run/rank-{rank}.log"))).unwrap();
        match victim {
            0 => assert!(log(3).contains("rank 0"), "{}", log(3)),
            rank => {
                assert_eq!(code, Some(5), "{error}");
                assert!(error.contains(&format!("rank {rank}")), "{error}");
                assert!(log(3).contains(&format!("rank {rank}")), "{}", log(3));
            }
        }
        // The checkpoints are complete.
        run.succeed(&train(&["--set", "max_steps=20", "--ranks", "2", "--resume"]));
    }
}

#[test]
fn a_stopped_rank_does_not_outlive_the_one_that_started_it() {
    let run = Run::new();
    let mut child = spawn(&run, &train(&["--set", "max_steps=100000", "--ranks", "2"]));
    run.wait_for_steps(&mut child, 3);
    let others = children(&child);
    signal("-STOP", others[0]);
    child.kill().unwrap();
    end(child, &others);
    let log = std::fs::read_to_string(run.path("run/rank-1.log")).unwrap();
    assert!(log.contains("error: rank 0"), "{log}");
}

#[test]
fn a_signal_to_any_rank_saves_the_same_step_on_all() {
    for to in [0, 1] {
        let run = Run::new();
        let mut child = spawn(&run, &train(&["--set", "max_steps=100000", "--ranks", "2"]));
        run.wait_for_steps(&mut child, 3);
        let others = children(&child);
        signal("-TERM", if to == 0 { child.id() } else { others[to - 1] });
        let (code, error) = end(child, &others);
        assert_eq!(code, Some(75), "{error}");
        assert!(error.contains("stopped by a signal after step"), "{error}");
        let log = std::fs::read_to_string(run.path("run/rank-1.log")).unwrap();
        assert!(log.contains("stopped by a signal after step"), "{log}");
    }
}

#[test]
fn ranks_with_other_settings_are_found_at_the_start() {
    let run = Run::new();
    let start = |rank: &str, rate: &str| {
        let place = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29713")];
        let settings = format!("learning_rate={rate}");
        let mut command = run.command(&train(&["--set", &settings]));
        command.envs(place).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (start("0", "1e-3"), start("1", "2e-3"));
    for child in [first, second] {
        let (code, error) = end(child, &[]);
        assert_eq!(code, Some(5), "{error}");
        assert!(error.contains("optimizer.learning_rate"), "{error}");
    }
}

#[test]
fn a_batch_that_ranks_cannot_share_is_an_error() {
    let run = Run::new();
    run.fail(&train(&["--ranks", "3"]), 1, &["`training.global_batch_size`: 4 sequences", "3 ranks"]);
}

#[test]
fn ranks_and_gpus_that_do_not_fit_the_device_are_errors() {
    let run = Run::new();
    run.fail(&train(&["--gpus", "2"]), 1, &["--gpus 2 uses GPUs, and the device is the CPU", "use --ranks 2"]);
    run.fail(&train(&["--ranks", "2", "--device", "cuda"]), 1, &["--ranks 2 starts ranks on the CPU", "use --gpus 2"]);
    run.fail(&train(&["--ranks", "2", "--gpus", "2"]), 1, &["--ranks", "--gpus"]);
    run.fail(&["bench", "train", "--device", "cpu", "--gpus", "2"], 1, &["--gpus 2 uses GPUs"]);
    assert!(!run.path("run").exists(), "nothing was started");
}

#[test]
fn gradients_are_sent_in_fp8_where_they_have_that_format_or_it_is_asked_for() {
    let run = Run::new();
    run.succeed(&train(&["--set", "reduce_dtype=float8", "--set", "error_feedback=true", "--ranks", "2"]));
    let metrics = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"reduce_error\":0.0"), "{metrics}");
    let level_o1 = ["--set", "recipe=fp8-delayed", "--set", "storage=msamp-o1", "--set", "output_dir=o1"];
    run.succeed(&train(&[&level_o1[..], &["--ranks", "2"]].concat()));
    assert!(std::fs::read_to_string(run.path("o1/metrics.jsonl")).unwrap().contains("\"reduce_error\":0.0"));
    run.fail(
        &train(&["--set", "reduce_dtype=bfloat16", "--ranks", "2"]),
        1,
        &["`parallel.communication.reduce_dtype` is bfloat16"],
    );
}
