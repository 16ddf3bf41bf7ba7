//! Tests processes that prepare parts of the tokens.

use crate::ranks::signal;
use crate::setup::Run;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

/// Creates a run with enough text for several units, in two files.
fn inputs() -> Run {
    let run = Run::new();
    for (name, lines) in [("text.txt", 60_000), ("more.txt", 30_000)] {
        run.write(name, (0..lines).map(|i| format!("line {i} of a long text\n")).collect::<String>().as_bytes());
    }
    run.replace("run.toml", "[\"text.txt\"]", "[\"text.txt\", \"more.txt\"]");
    run
}

/// Returns the folders in the cache.
fn folders(run: &Run) -> Vec<PathBuf> {
    let entries = fs::read_dir(run.path("tokens")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

/// Returns the prepared files.
fn tokens(run: &Run) -> BTreeMap<String, Vec<u8>> {
    let folders = folders(run);
    assert_eq!(folders.len(), 1, "{folders:?}");
    let entries = fs::read_dir(&folders[0]).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
    // Excludes the stamps of files, and statistics of a run.
    entries.map(read).filter(|(name, _)| name != "checked.json" && !name.starts_with("rows-")).collect()
}

#[test]
fn processes_that_share_the_work_leave_what_one_leaves() {
    let (alone, run) = (inputs(), inputs());
    alone.succeed(&["prepare", "run.toml"]);
    let spawn = |part: &str| {
        let mut command = run.command(&["prepare", "run.toml", "--part", part]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // Two processes prepare the same part, and one process is killed.
    let killed = spawn("3/3");
    while !run.path("tokens").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    signal("-KILL", killed.id());
    killed.wait_with_output().unwrap();
    for process in ["1/3", "2/3", "2/3"].map(spawn) {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with("part ") && text.contains("missing: ") && text.contains('3'), "{text}");
    }
    let words = ["part 3 of 3 missing; prepare each with `ottava prepare RUN.toml --part 3/3`", "or delete the folder"];
    run.fail(&["train", "run.toml"], 2, &words);
    run.fail(&["prepare", "run.toml"], 2, &words);
    let text = run.succeed(&["prepare", "run.toml", "--part", "3/3"]);
    assert!(text.starts_with("part 3/3: ") && text.contains("; all parts are joined"), "{text}");
    assert!(tokens(&run) == tokens(&alone));
    let output = run.ottava(&["train", "run.toml"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !error.contains("tokenizing"), "prepared tokens are used: {error}");
}

#[test]
fn a_start_joins_the_parts_that_it_finds() {
    let (alone, run) = (inputs(), inputs());
    alone.succeed(&["prepare", "run.toml"]);
    run.succeed(&["prepare", "run.toml", "--part", "2/2"]);
    // Another machine has left this part, because its process was killed before it joined the parts.
    let other = inputs();
    other.succeed(&["prepare", "run.toml", "--part", "1/2"]);
    let part = |run: &Run| folders(run)[0].clone();
    let (from, to) = (part(&other).join("part-00001"), part(&run).join("part-00001"));
    assert!(std::process::Command::new("cp").arg("-r").args([&from, &to]).status().unwrap().success());
    let output = run.ottava(&["train", "run.toml"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && error.contains("joining the 2 parts") && !error.contains("tokenizing"),
        "{error}"
    );
    assert!(tokens(&run) == tokens(&alone));
}

#[test]
fn parts_are_reported_as_json_and_a_changed_file_is_named() {
    let run = inputs();
    let report: serde_json::Value =
        serde_json::from_str(&run.succeed(&["prepare", "run.toml", "--part", "1/2", "--json"])).unwrap();
    assert_eq!((&report["part"], &report["parts"]), (&1.into(), &2.into()));
    assert_eq!(report["datasets"][0]["missing"], serde_json::json!([2]));
    assert!(report["datasets"][0]["documents"].as_u64().unwrap() > 0);
    run.replace("more.txt", "line 7 ", "line seven ");
    let output = run.ottava(&["prepare", "run.toml", "--part", "2/2"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("more.txt has changed since part 1/2 was prepared; prepare that part again"), "{error}");
    run.succeed(&["prepare", "run.toml", "--part", "1/2"]);
    run.fail(&["prepare", "run.toml", "--part", "3/2"], 1, &["3/2", "part I of N parts", "such as 1/4"]);
    run.fail(&["prepare", "run.toml", "--part", "1/2", "--megatron", "x"], 1, &["--part", "--megatron"]);
}
