//! Tests faults among the ranks of a job: signals in each phase, ranks that end or never join, and ranks that do not belong together.

use crate::ranks::{children, end, lives, losses, signal, spawn, train};
use crate::setup::{Run, folders, steps};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Whether every combination is tested, as in `just nightly ranks`.
fn all_combinations() -> bool {
    std::env::var("OTTAVA_RANKS").is_ok_and(|value| value == "full")
}

/// Starts `rank` of `size` like torchrun, in the folder of `run`. The ranks meet at `port`.
fn launch(run: &Run, rank: usize, size: usize, port: u16, args: &[&str]) -> Child {
    let place = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        // torchrun itself listens at the port before this port.
        ("MASTER_PORT", (port - 1).to_string()),
    ];
    run.command(args).envs(place).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns a port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn log(run: &Run, rank: usize) -> String {
    fs::read_to_string(run.path(&format!("run/rank-{rank}.log"))).unwrap_or_default()
}

/// Writes lines whose evaluation takes most of a second.
fn long_validation(run: &Run) {
    let text: String = (0..1600).map(|i| format!("line {i} of a long text\n")).collect();
    run.write("text.txt", text.as_bytes());
    run.replace("run.toml", "val_set_size = 2", "val_set_size = 1000");
}

/// The receiver of a signal: one rank, or all ranks at once, as from a terminal.
#[derive(Clone, Copy, Debug)]
enum To {
    Rank(usize),
    All,
}

/// Sends SIGTERM, and expects that all ranks stop with `code` and `word`.
fn stop(run: &Run, child: Child, to: To, code: i32, word: &str) {
    let others = children(&child);
    let all = [&[child.id()], &others[..]].concat();
    match to {
        To::Rank(rank) => signal("-TERM", all[rank]),
        To::All => all.iter().for_each(|&pid| signal("-INT", pid)),
    }
    let (got, error) = end(child, &others);
    assert_eq!(got, Some(code), "{to:?}: {error}{}", log(run, 1));
    assert!(error.contains(word), "{to:?}: {error}");
    assert!(log(run, 1).contains(word), "{to:?}: {}", log(run, 1));
}

/// Stages of ZeRO, with the receiver of a signal.
fn stages_and_receivers() -> Vec<(&'static str, To)> {
    match all_combinations() {
        true => ["0", "1", "2", "3"].map(|zero| [To::Rank(0), To::Rank(1), To::All].map(|to| (zero, to))).concat(),
        false => vec![("0", To::Rank(1)), ("3", To::All)],
    }
}

#[test]
fn a_signal_during_an_evaluation_stops_all_ranks_alike() {
    for (zero, to) in stages_and_receivers() {
        let run = Run::new();
        long_validation(&run);
        let stage = format!("parallel.zero={zero}");
        let args = train(&["--set", "eval_steps=1", "--set", "max_steps=2", "--ranks", "2", "--set", &stage]);
        // The signal arrives in the evaluation of step 0, where nothing is saved.
        let child = spawn(&run, &args);
        wait_for(|| run.path("run/metrics.jsonl").exists());
        std::thread::sleep(Duration::from_millis(100));
        stop(&run, child, to, 130, "stopped by a signal while evaluating");
        // The signal arrives in the evaluation after step 1, when the evaluation of step 0 is recorded.
        let mut child = spawn(&run, &args);
        run.wait_for_steps(&mut child, 1);
        std::thread::sleep(Duration::from_millis(100));
        stop(&run, child, to, 75, "stopped by a signal after step 1");
        assert_eq!(steps(&run.path("run/metrics.jsonl")), [0]);
        run.succeed(&[&args[..], &["--resume"]].concat());
        assert_eq!(steps(&run.path("run/metrics.jsonl")), [0, 1, 2]);
    }
}

#[test]
fn a_signal_while_the_leading_rank_tokenizes_stops_all_ranks() {
    for to in [To::Rank(0), To::Rank(1), To::All] {
        let run = Run::new();
        run.write("text.txt", "a line of a text that is long\n".repeat(2_000_000).as_bytes());
        let child = spawn(&run, &train(&["--ranks", "2"]));
        wait_for(|| log(&run, 1).contains("rank 1 of 2"));
        std::thread::sleep(Duration::from_millis(300));
        stop(&run, child, to, 130, "stopped by a signal while");
        assert_eq!(folders(&run.path("tokens")), 0, "no temporary folder is left");
    }
}

#[test]
fn a_rank_that_is_lost_while_the_leading_rank_tokenizes_is_named() {
    let run = Run::new();
    run.write("text.txt", "a line of a text that is long\n".repeat(2_000_000).as_bytes());
    let child = spawn(&run, &train(&["--ranks", "2"]));
    wait_for(|| log(&run, 1).contains("rank 1 of 2"));
    std::thread::sleep(Duration::from_millis(300));
    let others = children(&child);
    signal("-KILL", others[0]);
    let (code, error) = end(child, &others);
    assert_eq!(code, Some(5), "{error}");
    assert!(error.contains("rank 1 ") && error.contains("(SIGKILL)"), "{error}");
    assert_eq!(folders(&run.path("tokens")), 0, "no temporary folder is left");
}

/// Before all ranks have joined, they cannot tell each other to stop.
#[test]
fn a_signal_while_ranks_start_stops_all_within_seconds() {
    for milliseconds in [5, 30, 60, 100, 150, 200] {
        for to in 0..2 {
            let run = Run::new();
            let child = spawn(&run, &train(&["--ranks", "2", "--set", "max_steps=100000"]));
            wait_for(|| !children(&child).is_empty());
            std::thread::sleep(Duration::from_millis(milliseconds));
            let all = [&[child.id()], &children(&child)[..]].concat();
            let sent = Instant::now();
            signal("-TERM", all[to]);
            let (code, error) = end(child, &all[1..]);
            // If a rank has joined in the meantime, it saves after its first step.
            assert!([Some(130), Some(75)].contains(&code), "rank {to} after {milliseconds} ms: {code:?}, {error}");
            assert!(sent.elapsed() < Duration::from_secs(8), "rank {to} after {milliseconds} ms: {:?}", sent.elapsed());
        }
    }
}

#[test]
fn a_signal_while_ranks_are_missing_stops_the_others() {
    for to in [0, 1] {
        let (run, port) = (Run::new(), free_port());
        let mut ranks: Vec<_> = (0..2).map(|rank| launch(&run, rank, 3, port, &train(&[]))).collect();
        std::thread::sleep(Duration::from_millis(1000));
        assert!(ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()), "they wait for rank 2");
        signal("-TERM", ranks[to].id());
        for rank in ranks {
            let (code, error) = end(rank, &[]);
            assert_eq!(code, Some(130), "{error}");
            assert!(error.contains("stopped by a signal before all ranks had joined"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_ends_before_it_joins_is_named_with_its_signal_and_log() {
    let run = Run::new();
    let child = spawn(&run, &train(&["--ranks", "2", "--set", "max_steps=100000"]));
    wait_for(|| !children(&child).is_empty());
    let others = children(&child);
    signal("-KILL", others[0]);
    let (code, error) = end(child, &others);
    assert_eq!(code, Some(5), "{error}");
    for words in ["rank 1", "killed by signal 9", "its log is run/rank-1.log"] {
        assert!(error.contains(words), "no {words:?} in: {error}");
    }
}

#[test]
fn a_rank_that_is_killed_in_training_is_named_with_its_signal_and_log() {
    let run = Run::new();
    let mut child = spawn(&run, &train(&["--ranks", "2", "--set", "max_steps=100000"]));
    run.wait_for_steps(&mut child, 3);
    let others = children(&child);
    signal("-KILL", others[0]);
    let (code, error) = end(child, &others);
    assert_eq!(code, Some(5), "{error}");
    for words in ["rank 1 (pid ", " ended during ", "killed by signal 9", "its log is run/rank-1.log"] {
        assert!(error.contains(words), "no {words:?} in: {error}");
    }
}

#[test]
fn no_rank_outlives_rank_0_whenever_that_is_killed() {
    for i in 0..if all_combinations() { 80 } else { 8 } {
        let run = Run::new();
        let mut child = spawn(&run, &train(&["--ranks", "3", "--set", "max_steps=100000"]));
        std::thread::sleep(Duration::from_millis(i % 20 * 15));
        let others = children(&child);
        child.kill().unwrap();
        child.wait().unwrap();
        let begin = Instant::now();
        while others.iter().any(|&pid| lives(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(10), "kill {i}: a rank is left");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_second_run_in_the_folder_is_refused_and_writes_into_no_log() {
    let run = Run::new();
    let mut child = spawn(&run, &train(&["--ranks", "2", "--set", "max_steps=100000"]));
    run.wait_for_steps(&mut child, 3);
    let before = log(&run, 1);
    run.fail(&train(&["--ranks", "2"]), 1, &["another process is training into this folder"]);
    // The first run continues to write its log.
    let after = log(&run, 1);
    assert!(after.starts_with(&before) && after.matches("started by").count() == 1, "{after}");
    stop(&run, child, To::Rank(0), 75, "stopped by a signal after step");
}

#[test]
fn ranks_of_a_launcher_print_into_logs_with_the_time() {
    let (run, port) = (Run::new(), free_port());
    let ranks: Vec<_> = (0..2).map(|rank| launch(&run, rank, 2, port, &train(&[]))).collect();
    let messages: Vec<_> = ranks.into_iter().map(|rank| end(rank, &[])).collect();
    assert_eq!([messages[0].0, messages[1].0], [Some(0); 2], "{messages:?}");
    assert!(messages[0].1.contains("step 2/2"), "{}", messages[0].1);
    assert_eq!(messages[1].1, "", "the other rank prints into its log");
    let log = log(&run, 1);
    assert!(log.lines().count() > 0 && log.lines().all(|line| line.starts_with("20") && line.contains("Z ")), "{log}");
}

/// Starts two ranks as if on two machines: their folders share only the run's folder.
fn on_two_machines(change: impl Fn(&Run), args: &[&str]) -> [(Option<i32>, String); 2] {
    let (here, there, port) = (Run::new(), Run::new(), free_port());
    change(&there);
    let folder = format!("output_dir={}", here.path("run").display());
    let args = [&train(&["--set", &folder])[..], args].concat();
    let ranks = [&here, &there].map(|run| run.command(&["prepare", "run.toml"]).output().unwrap());
    assert!(ranks.iter().all(|prepared| prepared.status.success()));
    let ranks: Vec<_> =
        [&here, &there].into_iter().enumerate().map(|(rank, run)| launch(run, rank, 2, port, &args)).collect();
    ranks.into_iter().map(|rank| end(rank, &[])).collect::<Vec<_>>().try_into().unwrap()
}

#[test]
fn ranks_with_other_weights_models_or_data_are_named() {
    let pretrained = ["--set", "model.init=pretrained"];
    let checkpoint = |run: &Run, seed: &str| {
        run.succeed(&["train", "run.toml", "--set", "max_steps=1", "--set", seed, "--set", "output_dir=before"]);
        for name in ["config.json", "model.safetensors"] {
            fs::copy(run.path("before/checkpoints/checkpoint-1").join(name), run.path("model").join(name)).unwrap();
        }
    };
    let (here, there, port) = (Run::new(), Run::new(), free_port());
    checkpoint(&here, "seed=1");
    checkpoint(&there, "seed=2");
    let folder = format!("output_dir={}", here.path("run").display());
    let args = [&train(&["--set", &folder])[..], &pretrained].concat();
    let ranks = [launch(&here, 0, 2, port, &args), launch(&there, 1, 2, port, &args)];
    for (code, error) in ranks.map(|rank| end(rank, &[])) {
        assert_eq!(code, Some(5), "{error}");
        assert!(error.contains("the digest of the weights that were loaded differs: "), "{error}");
    }
    for (code, error) in on_two_machines(|run| run.replace("model/config.json", "1e-5", "1e-6"), &[]) {
        assert_eq!(code, Some(5), "{error}");
        assert!(error.contains("the model differs: ") && error.contains("start all ranks with the same"), "{error}");
    }
    for (code, error) in on_two_machines(|run| run.replace("text.txt", "line 4 ", "line 5 "), &[]) {
        assert_eq!(code, Some(5), "{error}");
        assert!(error.contains("the key of the data differs: "), "{error}");
    }
}

#[test]
fn a_run_folder_that_ranks_do_not_share_is_found_at_the_start() {
    let (here, there, port) = (Run::new(), Run::new(), free_port());
    let ranks = [launch(&here, 0, 2, port, &train(&[])), launch(&there, 1, 2, port, &train(&[]))];
    for (rank, (code, error)) in ranks.into_iter().enumerate().map(|(rank, child)| (rank, end_late(child))) {
        assert_eq!(code, Some(if rank == 0 { 5 } else { 1 }), "{error}");
        assert!(error.contains("`output_dir` = run is not shared"), "{error}");
    }
    assert!(!here.path("run").exists(), "nothing has started");
}

/// Waits for the end of a process. The process first waits for a file of a network file system.
fn end_late(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn another_build_of_the_same_version_does_not_join() {
    let (run, port) = (Run::new(), free_port());
    let program = run.path("another-build");
    let mut bytes = fs::read(env!("CARGO_BIN_EXE_ottava")).unwrap();
    // The note of the build ID: the sizes of the name and of the ID, the type 3, the name, and the ID.
    let is_note = |window: &[u8]| window[..4] == [4, 0, 0, 0] && window[8..] == *b"\x03\0\0\0GNU\0";
    match bytes[..4096].windows(16).position(is_note) {
        Some(at) => bytes[at + 16] ^= 1,
        // Without a build ID, the whole file counts, and bytes after the end of an ELF file change the file, but not the program.
        None => bytes.push(b'!'),
    }
    fs::write(&program, bytes).unwrap();
    fs::set_permissions(&program, fs::metadata(env!("CARGO_BIN_EXE_ottava")).unwrap().permissions()).unwrap();
    let first = launch(&run, 0, 2, port, &train(&[]));
    let place = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
    let second = Command::new(&program)
        .args(train(&[]))
        .current_dir(run.path(""))
        .envs(place)
        .env("MASTER_PORT", (port - 1).to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for child in [first, second] {
        let (code, error) = end(child, &[]);
        assert_eq!(code, Some(5), "{error}");
        assert!(error.contains("ranks do not run the same job: the build ID of the program is"), "{error}");
    }
}

#[test]
fn one_command_line_starts_a_run_and_goes_on_with_it() {
    let run = Run::new();
    let auto = train(&["--resume=auto", "--set", "lr_scheduler.type=constant"]);
    run.succeed(&[&auto[..], &["--set", "max_steps=2"]].concat());
    run.succeed(&[&auto[..], &["--set", "max_steps=4"]].concat());
    assert_eq!(steps(&run.path("run/metrics.jsonl")), [0, 1, 2, 3, 4]);
    // If a checkpoint is damaged, the run must not start again silently.
    for step in ["2", "4"] {
        run.write(&format!("run/checkpoints/checkpoint-{step}/config.json"), b"{}");
    }
    run.fail(
        &auto,
        7,
        &["there is no complete checkpoint to resume from; all 2 are damaged; to start anew, set another `output_dir`"],
    );
    run.fail(&train(&["--resume", "absent"]), 7, &["absent: there is no such checkpoint to resume from"]);
}

#[test]
fn a_resumed_run_keeps_its_batch_on_fewer_ranks() {
    let run = Run::new();
    let default = ["train", "run.toml", "--set", "lr_scheduler.type=constant"];
    run.succeed(&[&default[..], &["--set", "max_steps=2", "--ranks", "4"]].concat());
    let output = run.ottava(&[&default[..], &["--set", "max_steps=4", "--ranks", "2", "--resume"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(
        error.contains("`training.gradient_accumulation_steps` is 2 on 2 ranks, so that a step keeps the 8"),
        "{error}"
    );
    let alone = Run::new();
    alone.succeed(&[&default[..], &["--set", "max_steps=4", "--set", "global_batch_size=8"]].concat());
    for (one, several) in losses(&alone).iter().zip(losses(&run)) {
        // Each step has the same rows, so only the sums over ranks have another order. A rounding to BF16 can enlarge the difference to 2⁻⁸ of an
        // activation. The loss is a mean, so it changes less; on the CPU it does not change.
        assert!((one - several).abs() < 1e-3 * one, "{one} alone, {several} on 4 and 2 ranks");
    }
}

/// Tests that ranks count the casts of their rows, evaluate their share, and report the sums.
#[test]
fn statistics_and_evaluations_of_ranks_are_those_of_one() {
    let settings = ["--set", "recipe=fp8-delayed", "--set", "cast_statistics_steps=1", "--set", "val_set_size=7"];
    let read = |run: &Run| -> (Vec<serde_json::Value>, f64) {
        let text = fs::read_to_string(run.path("run/casts.jsonl")).unwrap();
        let metrics = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
        let first: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
        (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), first["eval_loss"].as_f64().unwrap())
    };
    let alone = Run::new();
    alone.succeed(&train(&settings));
    let (expected, loss) = read(&alone);
    for zero in ["0", "1", "3"] {
        let run = Run::new();
        let stage = format!("parallel.zero={zero}");
        run.succeed(&train(&[&settings[..], &["--ranks", "2", "--set", &stage]].concat()));
        let (got, eval_loss) = read(&run);
        assert_eq!(eval_loss.to_bits(), loss.to_bits(), "stage {zero}: batches are added in the same order");
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            for (cast, of_one) in expected["casts"].as_object().unwrap() {
                assert_eq!(got["casts"][cast]["elements"], of_one["elements"], "stage {zero}: {cast}");
            }
        }
    }
}

/// Waits up to ten seconds for a condition.
fn wait_for(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(10), "it has not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn logs_of_ranks_are_files() {
    let run = Run::new();
    fs::create_dir_all(run.path("run")).unwrap();
    std::os::unix::fs::symlink("/dev/null", run.path("run/rank-1.log")).unwrap();
    run.fail(&train(&["--ranks", "2"]), 1, &["rank-1.log"]);
    assert!(Path::new("/dev/null").exists());
}
