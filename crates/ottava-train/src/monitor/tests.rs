//! Tests the answers of a monitor, with folders of runs that the tests write.

use super::*;
use crate::report::{RunEnd, RunOutcome};
use crate::trainer::RunLock;
use serde_json::{Value, json};
use std::io::Write;

/// The folder of a run.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn append(&self, file: &str, text: &str) {
        let path = self.path().join(file);
        let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn lines(&self, file: &str, lines: &[Value]) {
        self.append(file, &lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    }
}

/// A reader that holds what it has received about each run, as the page does.
struct Reader {
    monitor: Monitor,
    since: BTreeMap<usize, u64>,
}

impl Reader {
    fn of(paths: &[&Path]) -> Reader {
        let monitor = Monitor::new(paths.iter().map(|path| path.to_path_buf()).collect()).unwrap();
        Reader { monitor, since: BTreeMap::from([(0, 0)]) }
    }

    /// Returns the next answer as JSON.
    fn next(&mut self) -> Value {
        self.monitor.refreshed = None;
        self.monitor.refresh();
        let answer = self.monitor.answer(&self.since);
        for run in &answer.runs {
            self.since.insert(run.id, run.revision);
        }
        serde_json::to_value(answer).unwrap()
    }
}

fn metrics(step: u64, loss: f64) -> Value {
    json!({"step": step, "loss": loss, "grad_norm": 1.0, "tokens_per_second": 100.0, "note": "text", "more": {"a": 1}})
}

#[test]
fn only_what_is_new_is_sent() {
    let folder = Folder::new();
    folder.lines("metrics.jsonl", &[json!({"step": 0, "eval_loss": 4.0}), metrics(1, 3.0), metrics(2, 2.5)]);
    let mut reader = Reader::of(&[folder.path()]);
    let first = reader.next();
    let series = &first["changes"]["0"]["series"];
    assert_eq!(series["loss"], json!({"from": 0, "steps": [1, 2], "means": [3.0, 2.5], "width": 1, "not_finite": 0}));
    assert_eq!(series["eval_loss"]["steps"], json!([0]));
    assert!(series["note"].is_null() && series["more"].is_null() && series["step"].is_null());
    assert_eq!((&first["runs"][0]["step"], &first["runs"][0]["latest"]["loss"]), (&json!(2), &json!(2.5)));
    assert_eq!(
        reader.next()["changes"]["0"],
        json!({"series": {}, "casts": null, "events": null, "completions": null})
    );
    // A line is written in two parts.
    folder.append("metrics.jsonl", "{\"step\":3,\"loss\":");
    assert_eq!(reader.next()["changes"]["0"]["series"], json!({}));
    folder.append("metrics.jsonl", "2.0}\n");
    let loss = &reader.next()["changes"]["0"]["series"]["loss"];
    assert_eq!((&loss["from"], &loss["steps"], &loss["means"]), (&json!(2), &json!([3]), &json!([2.0])));
    assert_eq!(reader.next()["runs"][0]["problems"], json!([]));
}

#[test]
fn a_resumed_run_replaces_the_steps_that_it_trains_again() {
    let folder = Folder::new();
    folder.lines("metrics.jsonl", &[metrics(1, 3.0), metrics(2, 2.0), metrics(3, 9.0), metrics(4, 9.0)]);
    let mut reader = Reader::of(&[folder.path()]);
    reader.next();
    // The file changes as when `MetricsWriter` resumes: it is cut, and grows beyond its old length before the next read.
    let path = folder.path().join("metrics.jsonl");
    let kept: String =
        std::fs::read_to_string(&path).unwrap().lines().take(2).map(|line| format!("{line}\n")).collect();
    std::fs::write(&path, kept).unwrap();
    folder.lines("metrics.jsonl", &[metrics(3, 1.5), metrics(4, 1.25), metrics(5, 1.0)]);
    let loss = &reader.next()["changes"]["0"]["series"]["loss"];
    assert_eq!(loss["from"], 0);
    assert_eq!((&loss["steps"], &loss["means"]), (&json!([1, 2, 3, 4, 5]), &json!([3.0, 2.0, 1.5, 1.25, 1.0])));
    // Steps repeat within the file, and the last values count.
    folder.lines("metrics.jsonl", &[metrics(4, 0.5), metrics(5, 0.25)]);
    let answer = reader.next();
    let loss = &answer["changes"]["0"]["series"]["loss"];
    assert_eq!((&loss["steps"], &loss["means"]), (&json!([1, 2, 3, 4, 5]), &json!([3.0, 2.0, 1.5, 0.5, 0.25])));
    assert_eq!(answer["runs"][0]["problems"], json!([]));
}

#[test]
fn what_is_missing_or_unreadable_is_said_and_is_no_error() {
    let folder = Folder::new();
    let gone = folder.path().join("gone");
    let mut reader = Reader::of(&[folder.path(), &gone]);
    assert_eq!(
        reader.next()["runs"][0]["state"],
        "missing",
        "the empty folder has no run, the other one does not exist"
    );
    folder.append("metrics.jsonl", "{\"step\":1,\"loss\":null}\nhello\n{\"loss\":1}\n{\"step\":2,\"loss\":1.5}\n{\"st");
    folder.append("run.json", "{\"ranks\": \"two\"}");
    let mut reader = Reader::of(&[folder.path()]);
    let answer = reader.next();
    let problems = answer["runs"][0]["problems"].to_string();
    assert!(problems.contains("metrics.jsonl: 2 lines") && problems.contains("run.json: not the record"), "{problems}");
    let loss = &answer["changes"]["0"]["series"]["loss"];
    assert_eq!((&loss["steps"], &loss["not_finite"]), (&json!([2]), &json!(1)));
    assert_eq!((&answer["changes"]["0"]["casts"], &answer["runs"][0]["state"]), (&Value::Null, &json!("ended")));
    drop(folder);
    let answer = reader.next();
    assert_eq!(answer["runs"][0]["state"], "missing");
    assert_eq!(answer["changes"]["0"]["series"]["loss"]["steps"], json!([]), "the page forgets what is gone");
    assert!(Monitor::new(vec!["/dev/null".into()]).is_ok() && Monitor::new(vec!["Cargo.toml".into()]).is_err());
}

#[test]
fn events_and_casts_and_comparisons_are_shown() {
    let folder = Folder::new();
    let cast = |saturated: u64| json!({"amax": 1.0, "scale": null, "largest": 448.0, "elements": 100, "saturated": saturated, "underflowed": 1, "non_finite": 0});
    let casts = |step: u64, saturated: u64| json!({"step": step, "since": 0, "casts": {"model.layers.0.q.input": cast(saturated), "model.layers.1.q.input": cast(0)}});
    folder.lines("metrics.jsonl", &[metrics(1, 3.0)]);
    folder.lines("casts.jsonl", &[casts(10, 50)]);
    folder.lines("alarms.jsonl", &[json!({"step": 7, "alarm": "loss_spike", "tensors": [], "value": 9.0, "policy": "warn", "text": "the loss is 9"})]);
    folder.lines("rollbacks.jsonl", &[json!({"from": 8, "to": 4, "reason": "a spike", "data": {"x": 1}})]);
    folder.lines(
        "sentinel.jsonl",
        &[json!({"step": 5, "loss_gap": 0.5, "gradient_cosine": 0.9, "gradient_norm_ratio": 1.1, "decision": "none",
        "findings": [{"tensor": "x", "measure": "error", "value": 1.0, "bound": 0.1, "text": "x is off"}]})],
    );
    let completion = |step: u64| json!({"step": step, "prompt": "1 + 1", "completion": "é".repeat(4000), "reward": 0.5, "rewards": {"math": 0.5}, "tokens": 3, "truncated": false});
    folder.lines("completions.jsonl", &[completion(1), completion(3)]);
    let mut reader = Reader::of(&[folder.path()]);
    let answer = reader.next();
    let changes = &answer["changes"]["0"];
    let shown = json!({"step": 1, "prompt": "1 + 1", "completion": "é".repeat(2048), "reward": 0.5});
    assert_eq!((&changes["completions"][0], &changes["completions"][1]["step"]), (&shown, &json!(3)));
    let texts: Vec<_> =
        changes["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["x is off", "loss_spike (warn): the loss is 9", "back to step 4: a spike"]);
    assert_eq!(answer["runs"][0]["events"], json!([1, 1, 1]));
    assert_eq!(changes["series"]["sentinel/gradient_cosine"]["means"], json!([0.9f32]));
    assert_eq!(changes["casts"]["layers"], json!(["layer 0", "layer 1"]));
    assert_eq!(changes["casts"]["saturated"], json!([[0.5, 0.0]]));
    folder.append("completions.jsonl", &(completion(2).to_string() + "\n"));
    let changes = &reader.next()["changes"]["0"];
    assert_eq!(changes["completions"].as_array().unwrap().len(), 2, "a run that resumed draws step 3 again");
    assert_eq!(changes["completions"][1]["step"], 2);
    folder.lines("casts.jsonl", &[casts(20, 25)]);
    let casts = &reader.next()["changes"]["0"]["casts"];
    assert_eq!(
        (&casts["from"], &casts["steps"], &casts["saturated"]),
        (&json!(1), &json!([20]), &json!([[0.25, 0.0]]))
    );
}

#[test]
fn a_run_that_holds_its_lock_runs_and_its_end_is_told() {
    let folder = Folder::new();
    let lock = RunLock::take(folder.path()).unwrap();
    let mut record = RunRecord { started: RunRecord::now(), max_steps: 2, ranks: 2, ..RunRecord::default() };
    record.write(folder.path()).unwrap();
    let mut reader = Reader::of(&[folder.path()]);
    assert_eq!(reader.next()["runs"][0]["state"], "starting");
    folder.lines("metrics.jsonl", &[metrics(1, 3.0)]);
    let answer = reader.next();
    assert_eq!((&answer["runs"][0]["state"], &answer["runs"][0]["record"]["ranks"]), (&json!("running"), &json!(2)));
    // A check does not take the lock, and several checks can run at once.
    assert!(RunLock::is_held(folder.path()).unwrap() && RunLock::is_held(folder.path()).unwrap());
    drop(lock);
    assert_eq!(reader.next()["runs"][0]["state"], "killed");
    record.end = Some(RunEnd { time: 9, step: 2, outcome: RunOutcome::Finished, message: String::new() });
    record.write(folder.path()).unwrap();
    assert_eq!(reader.next()["runs"][0]["state"], "finished");
    assert!(RunLock::take(folder.path()).is_ok(), "looking has left no lock");
}

#[test]
fn runs_in_a_folder_are_found_also_later_and_logs_are_shown() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path().join("b")).unwrap();
    folder.lines("b/metrics.jsonl", &[metrics(1, 3.0)]);
    let mut reader = Reader::of(&[folder.path()]);
    assert_eq!(reader.next()["runs"].as_array().unwrap().len(), 1);
    std::fs::create_dir(folder.path().join("a")).unwrap();
    folder.lines("a/metrics.jsonl", &[metrics(1, 2.0)]);
    folder.append("a/rank-1.log", &("first\n".to_string() + &"x".repeat(5000) + "\nlast\n"));
    let runs = reader.next();
    let names: Vec<_> = runs["runs"].as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert!(names == ["b", "a"], "{names:?}");
    // Runs with equal names are named by their folders.
    std::fs::create_dir_all(folder.path().join("c/a")).unwrap();
    folder.lines("c/a/metrics.jsonl", &[metrics(1, 2.0)]);
    let both = Reader::of(&[&folder.path().join("a"), &folder.path().join("c/a")]).next();
    assert!(both["runs"][1]["name"].as_str().unwrap().ends_with("/c/a"), "{both}");
    assert_eq!(reader.monitor.logs(1).unwrap(), [RankLog { rank: 1, text: "last\n".into() }]);
    assert_eq!((reader.monitor.logs(0), reader.monitor.logs(2)), (Some(Vec::new()), None));
}

#[test]
fn a_look_at_the_lock_keeps_no_run_from_starting() {
    let folder = Folder::new();
    drop(RunLock::take(folder.path()).unwrap());
    let looked_at = std::fs::File::open(folder.path().join(".lock")).unwrap();
    looked_at.lock_shared().unwrap();
    let look = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(10));
        drop(looked_at);
    });
    assert!(RunLock::take(folder.path()).is_ok());
    look.join().unwrap();
}

#[test]
fn folders_of_any_name_are_shown() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    for name in [&b"run-\xff"[..], b"run-\xfe", "läuft \n\u{1b}[1m".as_bytes()] {
        let run = folder.path().join(std::ffi::OsStr::from_bytes(name));
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("metrics.jsonl"), format!("{}\n", metrics(1, 3.0))).unwrap();
    }
    let answer = Reader::of(&[folder.path()]).next();
    let runs = answer["runs"].as_array().unwrap();
    let named = |run: &Value| run["folder"].as_str().unwrap().contains(&*folder.path().to_string_lossy());
    assert!(runs.len() == 3 && runs.iter().all(|run| run["latest"]["loss"] == 3.0 && named(run)), "{answer}");
    assert!(runs[1]["name"].as_str().unwrap().contains("run-\u{fffd}"), "{answer}");
}

#[test]
fn only_regular_files_of_the_runs_are_read() {
    use std::os::unix::fs::symlink;
    let secret = Folder::new();
    secret.lines("secret", &[metrics(1, 987_654.0)]);
    secret.append("run.json", "{\"ranks\": 987654}");
    secret.lines("metrics.jsonl", &[metrics(1, 987_654.0)]);
    let root = Folder::new();
    let run = root.path().join("run");
    std::fs::create_dir(&run).unwrap();
    root.append("run/.lock", "");
    for file in
        ["metrics.jsonl", "casts.jsonl", "sentinel.jsonl", "alarms.jsonl", "rollbacks.jsonl", "run.json", "rank-1.log"]
    {
        symlink(secret.path().join("secret"), run.join(file)).unwrap();
    }
    let fifo = std::process::Command::new("mkfifo").arg(run.join("rank-2.log")).status().unwrap();
    assert!(fifo.success());
    symlink("/dev/zero", run.join("rank-3.log")).unwrap();
    root.append("run/rank-4.log", "hello\n");
    // One link leads out of the root, and one stays within it.
    symlink(secret.path(), root.path().join("out")).unwrap();
    symlink(&run, root.path().join("within")).unwrap();
    let mut reader = Reader::of(&[root.path()]);
    let answer = reader.next();
    let names: Vec<_> = answer["runs"].as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["run", "within"]);
    let problems = answer["runs"][0]["problems"].to_string();
    assert_eq!(problems.matches("this is a link").count(), 6, "{problems}");
    assert!(!answer.to_string().contains("987654"), "{answer}");
    let logs = reader.monitor.logs(0).unwrap();
    let found: Vec<_> = logs.iter().map(|log| (log.rank, log.text.as_str())).collect();
    let [(1, link), (2, fifo), (3, device), (4, "hello\n")] = found[..] else { panic!("{found:?}") };
    assert!(link.contains("this is a link") && fifo.contains("pipe") && device.contains("link"), "{found:?}");
    // A folder that becomes a link is not followed.
    std::fs::rename(&run, root.path().join("moved")).unwrap();
    symlink(secret.path(), &run).unwrap();
    assert_eq!(reader.monitor.logs(0), Some(Vec::new()));
    assert!(!reader.next()["runs"][0].to_string().contains("987654"));
    // A link that is named on the command line is followed, since the user wants it.
    let named = Reader::of(&[&root.path().join("out")]).next();
    assert_eq!(named["runs"][0]["latest"]["loss"], 987_654.0);
}
