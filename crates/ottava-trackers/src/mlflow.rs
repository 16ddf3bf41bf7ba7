//! MLflow, by its REST API, version 2.0.

use crate::thread::Stop;
use crate::{Line, Opening, Outcome, Tracker};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_common::{Error, Result};
use ottava_http::{Client, Fault, Request, Secret, Url, escape};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The maximum number of metrics of a request.
const METRICS: usize = 1000;

/// The maximum number of parameters, or of tags, of a request.
const PARAMS: usize = 100;

/// The maximum length of a parameter in bytes. Older servers accept 500.
const LENGTH: usize = 500;

/// The maximum size of an answer in bytes.
const MAX_ANSWER: u64 = 8 << 20;

const TIMEOUT: Duration = Duration::from_secs(10);

/// The lowest speed in bytes per second at which an upload is waited for.
const SLOWEST: u64 = 100_000;

/// The tag with the id that Ottava has given to the run.
const TAG: &str = "ottava.run";

/// The files that are proxied by the server have an address with this scheme.
const PROXIED: &str = "mlflow-artifacts:/";

pub(crate) struct Mlflow {
    client: Client,
    /// The run, once it is open.
    run: Option<Run>,
    files: Vec<String>,
}

struct Run {
    id: String,
    /// The address of its artifacts.
    artifacts: String,
}

impl Mlflow {
    /// Reads the address and the key. Errors with [`Error::Config`] if a variable is missing or wrong.
    pub(crate) fn new(variable: &dyn Fn(&str) -> Option<String>) -> Result<Mlflow> {
        let uri = variable("MLFLOW_TRACKING_URI").ok_or_else(|| {
            let remedy = "set it to the address of an MLflow server, such as http://localhost:5000";
            Error::Config(format!("`logging.report_to` has \"mlflow\", and MLFLOW_TRACKING_URI is not set; {remedy}"))
        })?;
        let url = Url::new("MLFLOW_TRACKING_URI", uri.trim_end_matches('/'))?;
        let token = || Secret::from_text("MLFLOW_TRACKING_TOKEN", &variable("MLFLOW_TRACKING_TOKEN")?);
        let password = || {
            let (user, password) = (variable("MLFLOW_TRACKING_USERNAME")?, variable("MLFLOW_TRACKING_PASSWORD")?);
            let pair = STANDARD.encode(format!("{user}:{password}"));
            Some(Secret::from_text("MLFLOW_TRACKING_PASSWORD", &pair)?.with_scheme("Basic"))
        };
        let client = Client::new(url, token().or_else(password), MAX_ANSWER)?;
        Ok(Mlflow { client, run: None, files: Vec::new() })
    }

    fn at(&self, path: &str) -> Result<Client, Fault> {
        self.client.at(self.client.url().join(path)).map_err(|error| Fault::lasting(error.to_string()))
    }

    /// Posts `body`, and returns the answer.
    fn post(&self, path: &str, body: &Value, stop: &Stop) -> Result<Value, Fault> {
        let there = self.at(&format!("api/2.0/mlflow/{path}"))?;
        let answer = there.post_json(body.to_string().as_bytes(), stop.limit(TIMEOUT)?)?;
        serde_json::from_slice(&answer).map_err(|error| Fault::lasting(format!("{}: {error}", there.url())))
    }

    /// Returns the experiment with this name, and creates it if there is none. Some accounts may use experiments and may not create one.
    fn experiment(&self, name: &str, stop: &Stop) -> Result<String, Fault> {
        if let Some(found) = self.find_experiment(name, stop)? {
            return Ok(found);
        }
        match self.post("experiments/create", &json!({"name": name}), stop) {
            Ok(created) => text(&created["experiment_id"]),
            // Another run may have created it meanwhile.
            Err(fault) if fault.status == Some(400) => self.find_experiment(name, stop)?.ok_or(fault),
            Err(fault) => Err(fault),
        }
    }

    /// Returns the experiment with this name, if there is one.
    fn find_experiment(&self, name: &str, stop: &Stop) -> Result<Option<String>, Fault> {
        let page = format!("api/2.0/mlflow/experiments/get-by-name?experiment_name={}", escape(name, "/"));
        let there = self.at(&page)?;
        let answer = there.send(Request::get(), stop.limit(TIMEOUT)?)?;
        if answer.status() == 404 {
            return Ok(None);
        }
        let answer: Value = serde_json::from_slice(&answer.success()?.read()?)
            .map_err(|error| Fault::lasting(format!("{}: {error}", there.url())))?;
        text(&answer["experiment"]["experiment_id"]).map(Some)
    }

    fn run_id(&self) -> &str {
        &self.run.as_ref().expect("the run is open").id
    }

    fn update(&self, status: &str, end: Option<u64>, stop: &Stop) -> Result<(), Fault> {
        let mut body = json!({"run_id": self.run_id(), "status": status});
        if let Some(end) = end {
            body["end_time"] = json!(end);
        }
        self.post("runs/update", &body, stop).map(drop)
    }

    /// Sends settings as parameters. A parameter cannot change, so a setting that another start has changed is a tag.
    fn describe(&self, settings: &[(String, String)], known: &Value, stop: &Stop) -> Result<(), Fault> {
        let known = |key: &str| {
            let mut entries = known.as_array().into_iter().flatten();
            entries.find(|entry| entry["key"] == key).map(|entry| entry["value"].clone())
        };
        let (mut params, mut tags) = (Vec::new(), Vec::new());
        for (key, value) in settings {
            let end = (0..=LENGTH.min(value.len())).rev().find(|end| value.is_char_boundary(*end)).unwrap_or(0);
            let value = &value[..end];
            match known(key) {
                None => params.push(json!({"key": key, "value": value})),
                Some(before) if before != value => tags.push(json!({"key": format!("changed.{key}"), "value": value})),
                Some(_) => {}
            }
        }
        for some in params.chunks(PARAMS) {
            self.post("runs/log-batch", &json!({"run_id": self.run_id(), "params": some}), stop)?;
        }
        for some in tags.chunks(PARAMS) {
            self.post("runs/log-batch", &json!({"run_id": self.run_id(), "tags": some}), stop)?;
        }
        Ok(())
    }

    /// Uploads a file of the run. A file that does not exist is left out.
    fn upload(&self, folder: &Path, name: &str, stop: &Stop) -> Result<(), Fault> {
        let path = folder.join(name);
        let open = || -> std::io::Result<(File, u64)> {
            let file = File::open(&path)?;
            let size = file.metadata()?.len();
            Ok((file, size))
        };
        let (file, size) = match open() {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!("{}: {error}; MLflow does not get this file", path.display());
                return Ok(());
            }
        };
        let run = self.run.as_ref().expect("the run is open");
        let Some(below) = run.artifacts.strip_prefix(PROXIED) else {
            let why = format!("its artifacts are at {}, where only the server can write", run.artifacts);
            tracing::warn!("MLflow does not get {name}: {why}; start the server with --serve-artifacts");
            return Ok(());
        };
        let place =
            format!("api/2.0/mlflow-artifacts/artifacts/{}/{}", below.trim_start_matches('/'), escape(name, "/"));
        let there = self.at(&place)?;
        let timeout = stop.limit(TIMEOUT + Duration::from_secs(size / SLOWEST))?;
        let request = Request::put(file, size).header("Content-Type", "application/octet-stream");
        there.send(request, timeout)?.success().map(drop)
    }
}

impl Tracker for Mlflow {
    fn name(&self) -> &'static str {
        "MLflow"
    }

    fn open(&mut self, run: &Opening, stop: &Stop) -> Result<(), Fault> {
        let experiment = self.experiment(&run.facts.project, stop)?;
        let filter = format!("tags.`{TAG}` = '{}'", run.id);
        let search = json!({"experiment_ids": [experiment], "filter": filter, "max_results": 1});
        let found = self.post("runs/search", &search, stop)?["runs"][0].clone();
        let found = if found.is_null() {
            let tags = [
                json!({"key": TAG, "value": run.id}),
                json!({"key": "ottava.version", "value": env!("CARGO_PKG_VERSION")}),
            ];
            let body = json!({"experiment_id": experiment, "run_name": run.facts.name, "start_time": run.started * 1000, "tags": tags});
            self.post("runs/create", &body, stop)?["run"].clone()
        } else {
            found
        };
        let artifacts = found["info"]["artifact_uri"].as_str().unwrap_or_default().to_string();
        self.run = Some(Run { id: text(&found["info"]["run_id"])?, artifacts });
        self.files = run.facts.files.clone();
        self.update("RUNNING", None, stop)?;
        self.describe(&run.facts.settings, &found["data"]["params"], stop)
    }

    fn send(&mut self, lines: &[Line], stop: &Stop) -> Result<(), Fault> {
        let mut metrics = Vec::new();
        for Line { step, numbers, time, .. } in lines {
            let metric =
                |(key, value): &(String, f64)| json!({"key": key, "value": value, "step": step, "timestamp": time});
            metrics.extend(numbers.iter().map(metric));
        }
        let attempt = lines.last().map_or(0, |line| line.attempt);
        if attempt > 0 {
            // After a return to an earlier step, a step has values of several attempts.
            let tag = json!({"key": "ottava.attempt", "value": attempt.to_string()});
            self.post("runs/log-batch", &json!({"run_id": self.run_id(), "tags": [tag]}), stop)?;
        }
        for some in metrics.chunks(METRICS) {
            self.post("runs/log-batch", &json!({"run_id": self.run_id(), "metrics": some}), stop)?;
        }
        Ok(())
    }

    fn end(&mut self, outcome: Outcome, folder: &Path, stop: &Stop) -> Result<(), Fault> {
        let status = match outcome {
            Outcome::Finished => "FINISHED",
            Outcome::Stopped => "KILLED",
            Outcome::Failed => "FAILED",
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        self.update(status, Some(now), stop)?;
        while let Some(name) = self.files.last() {
            match self.upload(folder, name, stop) {
                Err(fault) if !fault.may_pass => tracing::warn!("MLflow does not get {name}: {}", fault.words),
                uploaded => uploaded?,
            }
            self.files.pop();
        }
        Ok(())
    }
}

/// Returns the text of an answer's field.
fn text(value: &Value) -> Result<String, Fault> {
    value.as_str().map(str::to_string).ok_or_else(|| Fault::lasting("the answer of MLflow lacks an id"))
}
