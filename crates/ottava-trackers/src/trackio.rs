//! Trackio, by the API of its server.

use crate::thread::Stop;
use crate::{Line, Opening, Outcome, Tracker};
use ottava_common::{Error, Result};
use ottava_http::{Client, Fault, Secret, Url};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;

/// The maximum number of lines of a request.
const LINES: usize = 500;

/// The maximum size of an answer in bytes.
const MAX_ANSWER: u64 = 1 << 20;

const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Trackio {
    client: Client,
    /// The fields of each entry that name the run, once it is open.
    run: Map<String, Value>,
    config: Map<String, Value>,
}

impl Trackio {
    /// Reads the address, which may have the token as `?write_token=`. Errors with [`Error::Config`] if a variable is missing or wrong.
    pub(crate) fn new(variable: &dyn Fn(&str) -> Option<String>) -> Result<Trackio> {
        let text = variable("TRACKIO_SERVER_URL").ok_or_else(|| {
            let remedy = "set it to the address of a Trackio server, which `trackio show` prints";
            Error::Config(format!("`logging.report_to` has \"trackio\", and TRACKIO_SERVER_URL is not set; {remedy}"))
        })?;
        let (address, query) = text.split_once('?').unwrap_or((&text, ""));
        let url = Url::new("TRACKIO_SERVER_URL", &format!("{}/api/bulk_log", address.trim_end_matches('/')))?;
        let in_query = query.split('&').find_map(|part| part.strip_prefix("write_token="));
        let key = match variable("TRACKIO_WRITE_TOKEN").or(in_query.map(str::to_string)) {
            None => None,
            Some(token) => Some(Secret::from_text("TRACKIO_WRITE_TOKEN", &token).ok_or_else(|| {
                Error::Config(
                    "TRACKIO_WRITE_TOKEN is empty, or contains spaces or other characters that cannot be printed"
                        .into(),
                )
            })?),
        };
        let client = Client::new(url, key.map(|key| key.with_header("X-Trackio-Write-Token")), MAX_ANSWER)?;
        Ok(Trackio { client, run: Map::new(), config: Map::new() })
    }
}

impl Tracker for Trackio {
    fn name(&self) -> &'static str {
        "Trackio"
    }

    fn open(&mut self, run: &Opening, _: &Stop) -> Result<(), Fault> {
        let fields = [("project", &run.facts.project), ("run", &run.facts.name), ("run_id", &run.id.to_string())];
        self.run = fields.into_iter().map(|(key, value)| (key.to_string(), json!(value))).collect();
        self.config = run.facts.settings.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        Ok(())
    }

    fn send(&mut self, lines: &[Line], stop: &Stop) -> Result<(), Fault> {
        let id = self.run["run_id"].as_str().unwrap_or_default().to_string();
        for some in lines.chunks(LINES) {
            let entry = |line: &Line| {
                let mut metrics: Map<String, Value> =
                    line.numbers.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
                if line.attempt > 0 {
                    metrics.insert("attempt".into(), json!(line.attempt));
                }
                let mut entry = self.run.clone();
                entry.insert("metrics".into(), Value::Object(metrics));
                entry.insert("step".into(), json!(line.step));
                entry.insert("config".into(), json!(self.config));
                // The server ignores an entry whose id it already has, so a repeated request adds nothing. A repeated step has another line, also after the
                // files of the run were restored from an earlier time. So its id contains the digest of the line.
                entry.insert(
                    "log_id".into(),
                    json!(format!("{id}-{}-{}-{:016x}", line.attempt, line.step, line.digest)),
                );
                Value::Object(entry)
            };
            let logs: Vec<Value> = some.iter().map(entry).collect();
            let body = json!({"logs": logs, "hf_token": null}).to_string();
            self.client.post_json(body.as_bytes(), stop.limit(TIMEOUT)?)?;
        }
        Ok(())
    }

    fn end(&mut self, _: Outcome, _: &Path, _: &Stop) -> Result<(), Fault> {
        Ok(())
    }
}
