//! Sends the metrics of a run to experiment trackers while it trains: MLflow and Trackio by HTTP, and Weights & Biases by files that `wandb sync` reads.
//!
//! A thread per tracker follows `metrics.jsonl` of the run (`follow.rs`), so training never waits for a tracker, and the file is the queue: lines that
//! could not be sent during an outage are sent later, also by a resumed run. `trackers.json` in the folder of the run has the id of the run and what
//! each tracker has got (`state.rs`), so a restart goes on in the same run of the tracker.
//!
//! Trackers get numbers, the settings without folders of the machine, the version, and the files of `logging.report_files`. They never get data,
//! tokens, the environment or names of hosts.
#![forbid(unsafe_code)]

mod follow;
mod mlflow;
mod state;
mod thread;
mod trackio;
mod wandb;

use ottava_common::Result;
use ottava_http::Fault;
use ottava_settings::{LoggingConfig, TrackerKind};
use state::{Seen, Shared};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use thread::{Stop, Worker};

/// The time after the end of a run within which lines are sent.
const GRACE: Duration = Duration::from_secs(10);

/// The run as trackers see it.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The project, or the experiment of MLflow.
    pub project: String,
    /// The name of the run.
    pub name: String,
    /// The settings, by key. Their texts reach the trackers, so they must not have what is private.
    pub settings: Vec<(String, String)>,
    /// Files below the folder of the run that MLflow gets at the end.
    pub files: Vec<String>,
}

/// How a run has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has made all its steps.
    Finished,
    /// A signal has stopped it, and it can resume.
    Stopped,
    /// It has failed.
    Failed,
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    step: u64,
    /// The numbers by their names, without `step`.
    numbers: Vec<(String, f64)>,
    /// The number of times that the run had returned to an earlier step before this line.
    attempt: u64,
    /// The time at which the line was read, in milliseconds since 1970.
    time: u64,
    /// A digest of the line, which differs between lines of the same step.
    digest: u64,
}

/// A service, or a file that a service reads.
trait Tracker: Send {
    /// The name in messages.
    fn name(&self) -> &'static str;

    /// Creates the run, or finds the run of an earlier start. `stop` limits the time of requests, here and below.
    fn open(&mut self, run: &Opening, stop: &Stop) -> Result<(), Fault>;

    /// Sends lines. After a fault, the same lines are sent again.
    fn send(&mut self, lines: &[Line], stop: &Stop) -> Result<(), Fault>;

    /// Records the end of the run. `folder` is the folder of the run.
    fn end(&mut self, outcome: Outcome, folder: &Path, stop: &Stop) -> Result<(), Fault>;

    /// Whether the tracker needs all lines again after each start and each return to an earlier step, because it writes a file of its own.
    fn starts_over(&self) -> bool {
        false
    }
}

/// What a tracker knows when it opens a run.
struct Opening<'a> {
    /// A random id, which the run keeps when it resumes.
    id: &'a str,
    /// The first start of the run, in seconds since 1970.
    started: u64,
    facts: &'a Facts,
    /// The folder of the run.
    folder: &'a Path,
}

/// The trackers that the settings name, before a run starts.
pub struct Trackers {
    trackers: Vec<(TrackerKind, Box<dyn Tracker>)>,
    grace: Duration,
}

impl Trackers {
    /// Reads addresses and keys from the environment: `MLFLOW_TRACKING_URI`, `MLFLOW_TRACKING_TOKEN` or `MLFLOW_TRACKING_USERNAME` and
    /// `MLFLOW_TRACKING_PASSWORD`; `TRACKIO_SERVER_URL` and `TRACKIO_WRITE_TOKEN`. Opens no connection.
    ///
    /// Errors with `Error::Config` if a variable is missing or wrong, or if connections are forbidden.
    pub fn from_env(settings: &LoggingConfig) -> Result<Trackers> {
        Trackers::with_variables(settings, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Like [`Trackers::from_env`], with the variables that `variable` returns.
    pub fn with_variables(settings: &LoggingConfig, variable: &dyn Fn(&str) -> Option<String>) -> Result<Trackers> {
        let mut trackers: Vec<(TrackerKind, Box<dyn Tracker>)> = Vec::new();
        for kind in &settings.report_to {
            let tracker: Box<dyn Tracker> = match kind {
                TrackerKind::Tensorboard => continue,
                TrackerKind::Mlflow => Box::new(mlflow::Mlflow::new(variable)?),
                TrackerKind::Trackio => Box::new(trackio::Trackio::new(variable)?),
                TrackerKind::Wandb => Box::new(wandb::Wandb::default()),
            };
            if !trackers.iter().any(|(known, _)| known == kind) {
                trackers.push((*kind, tracker));
            }
        }
        Ok(Trackers { trackers, grace: GRACE })
    }

    /// Returns these trackers with another time after the end of a run within which lines are sent; by default ten seconds.
    pub fn with_grace(self, grace: Duration) -> Trackers {
        Trackers { grace, ..self }
    }

    /// Starts to follow the metrics of the run in `folder`, which has opened its `metrics.jsonl`.
    ///
    /// Errors if `trackers.json` of the run cannot be read or written.
    pub fn start(self, folder: &Path, facts: Facts) -> Result<Following> {
        let stop = Arc::new(Stop::new(self.grace));
        if self.trackers.is_empty() {
            return Ok(Following { stop, threads: Vec::new() });
        }
        let shared = Arc::new(Shared::open(folder)?);
        let mut threads = Vec::new();
        for (kind, tracker) in self.trackers {
            let seen = if tracker.starts_over() { Seen::default() } else { shared.seen(kind) };
            let (folder, facts, shared): (PathBuf, _, _) = (folder.to_path_buf(), facts.clone(), shared.clone());
            let worker = Worker::new(kind, tracker, folder, facts, shared, seen)?;
            let stop = stop.clone();
            threads.push(std::thread::spawn(move || worker.run(&stop)));
        }
        Ok(Following { stop, threads })
    }
}

/// The threads that follow a run. If it is dropped without [`Following::finish`], the threads are told that the run has failed.
pub struct Following {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl Following {
    /// Sends what is left, and records how the run has ended. Waits for about ten seconds at most; lines that were not sent by then are sent when
    /// the run resumes.
    pub fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        self.stop.ask(outcome);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::warn!("a thread that reports metrics has panicked");
            }
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.end(Outcome::Failed);
    }
}
