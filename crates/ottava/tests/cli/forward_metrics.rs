//! Tests `scripts/forward_metrics.py` with a stand-in for the packages of the services.

use crate::setup::Run;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// A package that writes each call as a line of JSON to the file CALLS.
const STAND_IN: &str = r#"
import json, os
def call(name):
    def write(*args, **named):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps([name, list(args), named]) + "\n")
    return write
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return call(name)
"#;

/// Returns the calls of the service `service` while the metrics of `run` are sent to it.
fn calls(run: &Run, service: &str) -> Vec<Value> {
    run.write(&format!("stand-in/{service}.py"), STAND_IN.as_bytes());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/forward_metrics.py");
    // The script waits for the end of a run, which this run does not record.
    let mut command = Command::new("timeout");
    command
        .args(["60", "python3"])
        .arg(script)
        .args(["run", "--to", service, "--project", "words"])
        .current_dir(run.path("."));
    command.env("PYTHONPATH", run.path("stand-in")).env("CALLS", run.path(service));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("3 steps were sent"), "{said}");
    let text = std::fs::read_to_string(run.path(service)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn metrics_reach_each_service_once_and_in_the_order_of_steps() {
    let version = Command::new("python3").args(["-c", "import tomllib"]).output();
    if !version.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no Python 3.11");
        return;
    }
    let run = Run::new();
    run.succeed(&["train", "run.toml"]);
    // The file has repeated steps, and an incomplete last line.
    let path = run.path("run/metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap() + "{\"step\":1,\"loss\":9.0}\n{\"step\":7,\"lo";
    std::fs::write(&path, text).unwrap();
    for service in ["wandb", "trackio"] {
        let calls = calls(&run, service);
        let names: Vec<_> = calls.iter().map(|call| call[0].as_str().unwrap()).collect();
        assert_eq!(names, ["init", "log", "log", "log", "finish"]);
        assert_eq!(calls[0][2]["project"], "words");
        assert_eq!((&calls[0][2]["name"], &calls[0][2]["config"]["precision.recipe"]), (&json!("run"), &json!("bf16")));
        let steps: Vec<_> = calls[1..4].iter().map(|call| call[2]["step"].as_u64().unwrap()).collect();
        assert!(steps == [0, 1, 2] && calls[2][1][0]["loss"].as_f64() < Some(9.0), "{calls:?}");
    }
    let calls = calls(&run, "mlflow");
    let names: Vec<_> = calls.iter().map(|call| call[0].as_str().unwrap()).collect();
    let expected =
        ["set_experiment", "start_run", "log_params", "log_metrics", "log_metrics", "log_metrics", "end_run"];
    assert_eq!(names, expected);
    assert!(calls[4][1][0]["loss"].is_number() && calls[4][2]["step"] == 1, "{calls:?}");
}
