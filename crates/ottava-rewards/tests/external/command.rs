//! The reward `command`. Its programs are scripts of a shell, each run as `sh -c SCRIPT`.

use crate::{score, with_samples};
use ottava_common::Error;
use ottava_rewards::{CommandConfig, Deadline, RewardSpec, Scored};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Answers the request in `line` with the rewards 1 and null, by its id.
const ANSWER: &str = r#"id=${line#*:}; id=${id%%,*}; echo "{\"id\":$id,\"rewards\":[1,null]}""#;

/// A script that answers each request.
fn good() -> String {
    format!("while read -r line; do {ANSWER}; done")
}

/// The settings of a command that runs `script`, with other settings after it.
fn settings(script: &str, more: &str) -> String {
    let command = toml::Value::try_from(["sh", "-c", script]).unwrap();
    format!("type = 'command'\ncommand = {command}\nbatch_size = 2\n{more}")
}

fn run(script: &str, more: &str) -> Result<Scored, Error> {
    score(&settings(script, more), 2, Deadline::never())
}

/// The error of a script with one attempt of so many seconds.
fn error(script: &str, timeout: f64) -> String {
    let error = run(script, &format!("attempts = 1\ntimeout = {timeout:?}")).unwrap_err();
    assert!(matches!(error, Error::External(_)), "{error:?}");
    error.to_string()
}

/// A new file name in the folder of this test run.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("{name}-{}", std::process::id()));
    fs::remove_file(&path).ok();
    path
}

#[test]
fn a_command_scores_batches_in_several_processes() {
    let scored = score(&settings(&good(), "processes = 3"), 20, Deadline::never()).unwrap();
    let expected: Vec<_> = (0..20).map(|index| (index % 2 == 0).then_some(1.0)).collect();
    assert_eq!(scored.totals, expected);
    assert_eq!(scored.metrics["rewards/command/metrics/failed"], 0.0);
}

#[test]
fn a_request_has_every_part_of_a_sample() {
    let file = scratch("request");
    let script = format!(
        "read -r line; printf %s \"$line\" > {}; echo '{{\"id\":0,\"rewards\":[0.5],\"metrics\":{{\"depth\":3}}}}'",
        file.display()
    );
    let scored = score(&settings(&script, ""), 1, Deadline::never()).unwrap();
    assert_eq!((scored.totals, scored.metrics["rewards/command/metrics/depth"]), (vec![Some(0.5)], 3.0));
    let expected = r#"{"id":0,"type":"score","samples":[{"prompt":[{"role":"user","content":"two?"}],"completion":"c0","completion_ids":[1,2],"truncated":false,"group":7,"index":0,"step":3,"record":{"answer":2,"rubric":"be {brief}"}}]}"#;
    assert_eq!(fs::read_to_string(file).unwrap(), expected);
}

#[test]
fn wrong_answers_are_named() {
    let answer = |answer: &str| format!("read -r line; echo '{answer}'; sleep 60");
    for (script, words) in [
        (answer("debug"), "print other texts to stderr: debug"),
        (answer(""), "the answer is none"),
        (answer("[1, 2]"), "the answer is none"),
        (answer(r#"{"id":0,"rewards":[NaN,1]}"#), "write null for a completion that is not scored"),
        (answer(r#"{"id":0,"rewards":[1e999,1]}"#), "the answer is none"),
        (answer(r#"{"id":1,"rewards":[1,1]}"#), "the answer has the id 1, and the request has 0"),
        (answer(r#"{"rewards":[1,1]}"#), "missing field `id`"),
        (answer(r#"{"id":0,"rewards":[1]}"#), "the answer has 1 rewards for 2 samples"),
        (answer(r#"{"id":0,"rewards":[1,2,3]}"#), "the answer has 3 rewards for 2 samples"),
        (
            answer(r#"{"id":0,"rewards":[1,"high"]}"#),
            r#"the reward of completion 1 of prompt 7 is "high", and no number"#,
        ),
        (answer(r#"{"id":0,"reward":[1,1]}"#), "unknown field `reward`"),
        (answer(r#"{"id":0}"#), "the answer has no `rewards`"),
        (answer(r#"{"id":0,"error":"no such key"}"#), "it answered with the error: no such key"),
        (answer(&format!("{{\"id\":0,\"rewards\":{}", "[".repeat(10_000))), "recursion limit"),
        ("exit 3".into(), "it ended with exit code 3"),
        ("read -r line; kill -9 $$".into(), "signal 9 killed it"),
        ("read -r line; printf '{\"id\":0'; exit 0".into(), "its output ended after 7 bytes without a line end"),
        ("read -r line; printf '{\"id\":0'; sleep 60".into(), "it did not answer in time"),
        ("sleep 60".into(), "it did not answer in time"),
        ("exec <&-; sleep 60".into(), "it did not answer in time"),
        ("exec >&-; sleep 60".into(), "it closed its output"),
        ("echo 'Traceback: boom' >&2; exit 1".into(), "The last lines of its stderr:\nTraceback: boom"),
    ] {
        let is_slow = words == "it did not answer in time";
        let (began, error) = (Instant::now(), error(&script, if is_slow { 0.3 } else { 20.0 }));
        let script = &script[..script.len().min(100)];
        assert!(error.contains(words), "{script}: {error}");
        assert!(error.starts_with("reward `command`: the command `sh -c") && error.len() < 1000, "{error}");
        assert!(began.elapsed() < Duration::from_secs(10), "{script}: {:?}", began.elapsed());
    }
}

#[test]
fn endless_output_costs_neither_memory_nor_time() {
    let line = "read -r line; ";
    let long = error(&format!("{line} head -c 1000000000 /dev/zero"), 30.0);
    assert!(long.ends_with("it wrote a line of more than 8388608 bytes"), "{long}");
    let many = error(&format!("{line} yes"), 30.0);
    assert!(many.contains("print other texts to stderr: y"), "{many}");
    let stderr = error("seq 1000000 >&2; exit 1", 30.0);
    assert!(stderr.ends_with("\n999999\n1000000") && stderr.lines().count() == 22, "{stderr}");
    // Answers before they are asked for have other ids.
    let early = r#"for i in $(seq 1000); do echo '{"id":0,"rewards":[1,1]}'; done; cat > /dev/null"#;
    let early = score(&settings(early, "attempts = 1"), 4, Deadline::never()).unwrap_err().to_string();
    assert!(early.contains("the answer has the id 0, and the request has 1"), "{early}");
    let memory = fs::read_to_string("/proc/self/status").unwrap();
    let peak: u64 =
        memory.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok()).unwrap();
    assert!(peak < 300_000, "{peak} kB");
}

#[test]
fn a_crash_is_followed_by_a_new_process() {
    let file = scratch("crash");
    let script = format!("[ -e {0} ] || {{ touch {0}; exit 1; }}\n{1}", file.display(), good());
    // The ids of a process go on after a crash, so that no answer of the old one is taken.
    let scored = score(&settings(&script, ""), 4, Deadline::never()).unwrap();
    assert_eq!(scored.totals, [Some(1.0), None, Some(1.0), None]);
}

#[test]
fn attempts_end_and_the_policy_decides() {
    let file = scratch("attempts");
    let script = format!("echo x >> {}; exit 1", file.display());
    let error = run(&script, "attempts = 3").unwrap_err().to_string();
    assert!(error.contains("(attempt 3 of 3)"), "{error}");
    assert_eq!(fs::read_to_string(file).unwrap().lines().count(), 3);
    for (policy, expected) in [("zero", Some(0.0)), ("skip", None)] {
        // The first request of each process succeeds, the second one fails.
        let script = format!("read -r line; {ANSWER}; exit 1");
        let more = format!("attempts = 1\non_error = '{policy}'");
        let scored = score(&settings(&script, &more), 4, Deadline::never()).unwrap();
        assert_eq!(scored.totals, [Some(1.0), None, expected, expected], "{policy}");
        assert_eq!(scored.metrics["rewards/command/metrics/failed"], 0.5);
    }
}

#[test]
fn a_deadline_ends_all_attempts() {
    let began = Instant::now();
    for attempts in [1, 9] {
        let script = settings("sleep 60", &format!("attempts = {attempts}\non_error = 'skip'"));
        let error = score(&script, 2, Deadline::after(Duration::from_millis(100))).unwrap_err();
        assert!(error.to_string().contains("took longer"), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_one() {
    let file = scratch("late");
    let script = format!("[ -e {0} ] || {{ touch {0}; sleep 60; }}\n{1}", file.display(), good());
    let mut rewards = RewardSpec::build(&[toml::from_str(&settings(&script, "attempts = 1")).unwrap()]).unwrap();
    with_samples(2, |samples| {
        while !file.exists() {
            sleep(Duration::from_millis(5));
        }
        rewards.score(samples, Deadline::after(Duration::from_millis(100))).unwrap_err();
        let scored = rewards.score(samples, Deadline::after(Duration::from_secs(20))).unwrap();
        assert_eq!(scored.totals, [Some(1.0), None]);
    });
}

/// Whether the process whose number `file` holds lives.
fn lives(file: &Path) -> bool {
    let pid = fs::read_to_string(file).unwrap();
    Path::new("/proc").join(pid.trim()).join("exe").read_link().is_ok()
}

#[test]
fn dropping_a_command_kills_its_whole_group() {
    let file = scratch("group");
    // The child of the shell ignores that its input is closed.
    let script = format!("sleep 60 & echo $! > {}\n{}", file.display(), good());
    let mut rewards = RewardSpec::build(&[toml::from_str(&settings(&script, "")).unwrap()]).unwrap();
    with_samples(2, |samples| rewards.score(samples, Deadline::never())).unwrap();
    assert!(lives(&file));
    drop(rewards);
    let end = Deadline::after(Duration::from_secs(10));
    while lives(&file) && !end.left().is_zero() {
        sleep(Duration::from_millis(5));
    }
    assert!(!lives(&file));
}

#[test]
fn a_command_gets_time_to_end_by_itself() {
    let file = scratch("end");
    let script = format!("{}; echo end > {}", good(), file.display());
    run(&script, "").unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), "end\n");
}

#[test]
fn a_request_to_stop_ends_scoring() {
    const NAME: &str = "command::a_request_to_stop_ends_scoring";
    if std::env::var("OTTAVA_TEST_STOP").is_err() {
        // A request to stop is for a whole process, so the test has one of its own.
        let program = std::env::current_exe().unwrap();
        let run = Command::new(program).args(["--exact", NAME]).env("OTTAVA_TEST_STOP", "1").output().unwrap();
        return assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    }
    std::thread::spawn(|| {
        sleep(Duration::from_millis(100));
        ottava_common::interrupt::request();
    });
    let began = Instant::now();
    let error = run("sleep 60", "on_error = 'skip'").unwrap_err();
    assert!(matches!(error, Error::Cancelled(_)) && began.elapsed() < Duration::from_secs(10), "{error:?}");
}

#[test]
fn the_programs_of_the_documentation_work() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rewards.md")).unwrap();
    let block = |language: &str| {
        page.split(&format!("```{language}\n")).nth(1).unwrap().split("```").next().unwrap().to_string()
    };
    let (python, shell) = (scratch("example.py"), scratch("example.sh"));
    fs::write(&python, block("python")).unwrap();
    fs::write(&shell, block("sh")).unwrap();
    for (needed, command, expected) in [("python3", ["python3".into(), python], 0.0), ("jq", ["sh".into(), shell], 1.0)]
    {
        if Command::new(needed).arg("--version").output().is_err() {
            println!("skipped: there is no {needed}");
            continue;
        }
        let command = command.map(|word| word.display().to_string());
        let config = CommandConfig::new(&command.each_ref().map(String::as_str));
        let settings = format!("type = 'command'\n{}", toml::to_string(&config).unwrap());
        let scored = score(&settings, 2, Deadline::never()).unwrap();
        assert_eq!(scored.totals, [Some(expected); 2], "{command:?}");
    }
}
