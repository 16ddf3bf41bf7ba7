//! Tests trackers with stand-ins for their servers.

use ottava_http::testing::{Received, Server, reply};
use ottava_settings::{LoggingConfig, TrackerKind};
use ottava_trackers::{Facts, Outcome, Trackers};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The folder of a run with two lines of metrics.
fn run() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[(1, 3.5), (2, 3.25)]);
    folder
}

fn write(folder: &Path, steps: &[(u64, f64)]) {
    let lines = steps.iter().map(|(step, loss)| format!("{{\"step\":{step},\"loss\":{loss},\"grad_norm\":null}}\n"));
    fs::write(folder.join("metrics.jsonl"), lines.collect::<String>()).unwrap();
}

fn facts() -> Facts {
    let settings = [("training.max_steps", "2"), ("model.path", "\"tiny\"")];
    Facts {
        project: "words".into(),
        name: "first".into(),
        settings: settings.map(|(key, value)| (key.to_string(), value.to_string())).to_vec(),
        files: vec!["completions.jsonl".into()],
    }
}

/// Follows the run until it ends.
fn follow(kind: TrackerKind, variables: &[(&str, &str)], folder: &Path, outcome: Outcome) {
    let settings = LoggingConfig { report_to: vec![kind], ..LoggingConfig::default() };
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
    let trackers = Trackers::with_variables(&settings, &variable).unwrap().with_grace(Duration::from_millis(1500));
    trackers.start(folder, facts()).unwrap().finish(outcome);
}

fn body(request: &Received) -> Value {
    serde_json::from_slice(&request.bytes).unwrap_or_default()
}

/// A stand-in for MLflow, with at most one experiment and at most one run. It refuses the file `refused.txt`. The first `faults` requests fail.
fn mlflow(faults: usize) -> (Server, Arc<AtomicUsize>) {
    let (run, experiment, left) = (Mutex::new(Value::Null), AtomicBool::new(false), Arc::new(AtomicUsize::new(faults)));
    let faults = left.clone();
    let server = Server::start(move |_, request| {
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return reply(503, "", "busy");
        }
        let (mut run, asked) = (run.lock().unwrap(), body(request));
        let answer = match request.target().1.trim_start_matches("/api/2.0/") {
            "mlflow/experiments/get-by-name?experiment_name=words" if experiment.load(Ordering::SeqCst) => {
                json!({"experiment": {"experiment_id": "7"}})
            }
            "mlflow/experiments/create" => {
                experiment.store(true, Ordering::SeqCst);
                json!({"experiment_id": "7"})
            }
            "mlflow/runs/search" if run.is_null() => json!({}),
            "mlflow/runs/search" => json!({"runs": [*run]}),
            "mlflow/runs/create" => {
                let info = json!({"run_id": "abc", "artifact_uri": "mlflow-artifacts:/7/abc/artifacts"});
                *run = json!({"info": info, "data": {"params": []}});
                json!({"run": *run})
            }
            "mlflow/runs/log-batch" => {
                let params = asked["params"].as_array().cloned().unwrap_or_default();
                run["data"]["params"].as_array_mut().unwrap().extend(params);
                json!({})
            }
            "mlflow/runs/update" => json!({}),
            path if path.ends_with("/refused.txt") => return reply(403, "", "no files"),
            path if path.starts_with("mlflow-artifacts/artifacts/7/abc/artifacts/") => json!({}),
            path => return reply(404, "", path),
        };
        reply(200, "", &answer.to_string())
    });
    (server, faults)
}

/// Returns the steps and values of all metrics that a server has got, in order.
fn metrics(server: &Server) -> Vec<(u64, f64)> {
    let bodies = server.received().iter().map(body).collect::<Vec<_>>();
    let lists = bodies.iter().filter_map(|body| body["metrics"].as_array());
    lists
        .flatten()
        .map(|metric| {
            assert_eq!(metric["key"], "loss");
            (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap())
        })
        .collect()
}

fn requests(server: &Server, path: &str) -> Vec<Value> {
    server.received().iter().filter(|request| request.target().1.ends_with(path)).map(body).collect()
}

#[test]
fn mlflow_gets_metrics_settings_and_files_once_and_resumes_in_the_same_run() {
    let (server, faults) = mlflow(2);
    let folder = run();
    fs::write(folder.path().join("completions.jsonl"), "texts").unwrap();
    let url = server.url("/");
    let variables = [
        ("MLFLOW_TRACKING_URI", url.as_str()),
        ("MLFLOW_TRACKING_USERNAME", "me"),
        ("MLFLOW_TRACKING_PASSWORD", "x:y"),
    ];
    let follow = |outcome| follow(TrackerKind::Mlflow, &variables, folder.path(), outcome);
    follow(Outcome::Stopped);
    assert_eq!(metrics(&server), [(1, 3.5), (2, 3.25)]);
    let states = |server: &Server| -> Vec<Value> {
        requests(server, "runs/update").iter().map(|body| body["status"].clone()).collect()
    };
    assert_eq!(states(&server), ["RUNNING", "KILLED"]);
    let created = &requests(&server, "runs/create")[0];
    assert_eq!((&created["run_name"], &created["experiment_id"]), (&json!("first"), &json!("7")));
    let uploads: Vec<Received> = server.received().into_iter().filter(|request| request.target().0 == "PUT").collect();
    assert_eq!((uploads.len(), uploads[0].body.as_str()), (1, "texts"));
    assert!(server.received().iter().all(|request| request.header("authorization") == Some("Basic bWU6eDp5")));
    // The resumed run has gone back to step 1, and has lost the server for some requests.
    write(folder.path(), &[(1, 3.5)]);
    faults.store(1, Ordering::SeqCst);
    let sent = metrics(&server).len();
    write(folder.path(), &[(1, 3.5), (2, 3.0), (3, 2.5)]);
    follow(Outcome::Finished);
    assert_eq!(requests(&server, "runs/create").len(), 1);
    assert_eq!(requests(&server, "experiments/create"), [json!({"name": "words"})]);
    let params: Vec<Value> =
        requests(&server, "runs/log-batch").into_iter().filter(|body| body["params"].is_array()).collect();
    assert_eq!(params.len(), 1, "settings are sent once");
    assert_eq!(states(&server).last().unwrap(), "FINISHED");
    let state: Value = serde_json::from_str(&fs::read_to_string(folder.path().join("trackers.json")).unwrap()).unwrap();
    assert_eq!(state["seen"]["mlflow"]["lines"], 3);
    // The two lines of steps 1 and 2 were sent before; line 2 has changed, which a start cannot notice by the number of lines.
    assert_eq!(metrics(&server)[sent..], [(3, 2.5)]);
}

#[test]
fn a_refused_file_does_not_keep_the_run_from_its_end() {
    let (server, _) = mlflow(0);
    let (folder, url) = (run(), server.url("/"));
    for name in ["completions.jsonl", "refused.txt"] {
        fs::write(folder.path().join(name), name).unwrap();
    }
    let settings = LoggingConfig { report_to: vec![TrackerKind::Mlflow], ..LoggingConfig::default() };
    let variable = |name: &str| (name == "MLFLOW_TRACKING_URI").then(|| url.clone());
    let trackers = Trackers::with_variables(&settings, &variable).unwrap().with_grace(Duration::from_millis(1500));
    // The last file is uploaded first.
    let facts = Facts { files: vec!["completions.jsonl".into(), "refused.txt".into()], ..facts() };
    trackers.start(folder.path(), facts).unwrap().finish(Outcome::Finished);
    let statuses: Vec<Value> = requests(&server, "runs/update").iter().map(|body| body["status"].clone()).collect();
    assert_eq!(statuses, ["RUNNING", "FINISHED"]);
    let puts: Vec<String> = server.received().into_iter().filter(|r| r.target().0 == "PUT").map(|r| r.body).collect();
    assert_eq!(puts, ["refused.txt", "completions.jsonl"]);
}

/// A server that does not answer keeps a process at its end for the grace, and not for the usual limit of each request.
#[test]
fn requests_after_the_end_have_the_time_that_is_left() {
    let server = Server::start(|number, _| {
        // The first request begins before the end of the run is known, at the latest.
        std::thread::sleep(Duration::from_millis(if number == 0 { 0 } else { 4000 }));
        reply(200, "", "{}")
    });
    let folder = run();
    let (settings, url) =
        (LoggingConfig { report_to: vec![TrackerKind::Trackio], ..LoggingConfig::default() }, server.url("/"));
    let variable = |name: &str| (name == "TRACKIO_SERVER_URL").then(|| url.clone());
    let trackers = Trackers::with_variables(&settings, &variable).unwrap().with_grace(Duration::from_millis(300));
    let following = trackers.start(folder.path(), facts()).unwrap();
    while server.received().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    write(folder.path(), &[(1, 3.5), (2, 3.25), (3, 3.0)]);
    following.finish(Outcome::Finished);
    let state: Value = serde_json::from_str(&fs::read_to_string(folder.path().join("trackers.json")).unwrap()).unwrap();
    assert_eq!(state["seen"]["trackio"]["lines"], 2, "the answer came after the end");
}

#[test]
fn an_outage_keeps_the_lines_for_a_later_start() {
    let folder = run();
    // Nothing listens at this port.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{closed}");
    follow(TrackerKind::Mlflow, &[("MLFLOW_TRACKING_URI", &url)], folder.path(), Outcome::Finished);
    let id = |folder: &Path| -> Value {
        let text = fs::read_to_string(folder.join("trackers.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["id"].clone()
    };
    let before = id(folder.path());
    let (server, _) = mlflow(0);
    let url = server.url("");
    follow(TrackerKind::Mlflow, &[("MLFLOW_TRACKING_URI", &url)], folder.path(), Outcome::Finished);
    assert_eq!(metrics(&server), [(1, 3.5), (2, 3.25)]);
    assert_eq!(id(folder.path()), before);
    // A run without metrics is new.
    write(folder.path(), &[]);
    follow(TrackerKind::Mlflow, &[("MLFLOW_TRACKING_URI", &url)], folder.path(), Outcome::Finished);
    assert_ne!(id(folder.path()), before);
}

#[test]
fn a_server_that_refuses_gets_nothing_more() {
    let server = Server::start(|_, _| reply(401, "", "who are you?"));
    let folder = run();
    follow(TrackerKind::Mlflow, &[("MLFLOW_TRACKING_URI", &server.url(""))], folder.path(), Outcome::Finished);
    assert_eq!(server.received().len(), 1);
}

#[test]
fn trackio_gets_each_step_with_an_id() {
    let server = Server::start(|_, _| reply(200, "", "{}"));
    let folder = run();
    let url = server.url("/?write_token=key");
    follow(TrackerKind::Trackio, &[("TRACKIO_SERVER_URL", &url)], folder.path(), Outcome::Finished);
    let request = server.received().remove(0);
    assert_eq!((request.target().1, request.header("x-trackio-write-token")), ("/api/bulk_log", Some("key")));
    let logs = body(&request)["logs"].clone();
    assert_eq!((&logs[1]["step"], &logs[1]["metrics"]), (&json!(2), &json!({"loss": 3.25})));
    assert_eq!((&logs[0]["project"], &logs[0]["run"]), (&json!("words"), &json!("first")));
    assert_eq!(logs[0]["config"]["training.max_steps"], "2");
    // The same lines are sent again only after a return to an earlier step, and then have other ids.
    follow(TrackerKind::Trackio, &[("TRACKIO_SERVER_URL", &url)], folder.path(), Outcome::Finished);
    assert_eq!(server.received().len(), 1);
    write(folder.path(), &[(1, 3.5)]);
    follow(TrackerKind::Trackio, &[("TRACKIO_SERVER_URL", &url)], folder.path(), Outcome::Finished);
    write(folder.path(), &[(1, 3.5), (2, 3.0)]);
    follow(TrackerKind::Trackio, &[("TRACKIO_SERVER_URL", &url)], folder.path(), Outcome::Finished);
    let again = body(&server.received()[1])["logs"].clone();
    assert_eq!((&again[0]["step"], &again[0]["metrics"]["attempt"]), (&json!(2), &json!(1)));
    assert_ne!(again[0]["log_id"], logs[1]["log_id"]);
    // The files of the run were restored from a time before step 2, so the number of attempts is the same.
    let other = run();
    let state =
        |lines: u64| json!({"id": "restored", "started": 1, "seen": {"trackio": {"lines": lines, "attempt": 0}}});
    let ids: Vec<Value> = [3.0, 2.5, 2.5]
        .into_iter()
        .map(|loss| {
            write(other.path(), &[(1, 3.5), (2, loss)]);
            fs::write(other.path().join("trackers.json"), state(1).to_string()).unwrap();
            follow(TrackerKind::Trackio, &[("TRACKIO_SERVER_URL", &url)], other.path(), Outcome::Finished);
            body(server.received().last().unwrap())["logs"][0]["log_id"].clone()
        })
        .collect();
    assert!(ids[0] != ids[1] && ids[1] == ids[2], "{ids:?}");
}

#[test]
fn the_file_of_wandb_has_the_lines_of_the_run_and_no_others() {
    let folder = run();
    let file = || -> Vec<u8> {
        let runs = fs::read_dir(folder.path().join("wandb")).unwrap().map(|entry| entry.unwrap().path());
        let runs: Vec<_> = runs.collect();
        assert_eq!(runs.len(), 1, "a resumed run keeps its folder");
        let mut files = fs::read_dir(&runs[0]).unwrap().map(|entry| entry.unwrap().path());
        let file = files.find(|path| path.extension().is_some_and(|extension| extension == "wandb")).unwrap();
        fs::write(file.with_extension("wandb.synced"), "").unwrap();
        fs::read(file).unwrap()
    };
    let has = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    follow(TrackerKind::Wandb, &[], folder.path(), Outcome::Stopped);
    let first = file();
    assert!(first.starts_with(b":W&B\xe1\xbe\0"));
    for text in ["words", "first", "training.max_steps", "loss", "3.25"] {
        assert!(has(&first, text), "no {text}");
    }
    write(folder.path(), &[(1, 3.5), (2, 2.75)]);
    follow(TrackerKind::Wandb, &[], folder.path(), Outcome::Finished);
    let second = file();
    assert!(has(&second, "2.75") && !has(&second, "3.25"));
}

#[test]
fn a_missing_address_is_an_error_that_names_its_variable() {
    for (kind, name) in [(TrackerKind::Mlflow, "MLFLOW_TRACKING_URI"), (TrackerKind::Trackio, "TRACKIO_SERVER_URL")] {
        let settings = LoggingConfig { report_to: vec![kind], ..LoggingConfig::default() };
        let error = Trackers::with_variables(&settings, &|_| None).err().unwrap().to_string();
        assert!(error.contains(name) && error.contains("logging.report_to"), "{error}");
    }
}
