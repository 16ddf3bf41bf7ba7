//! Reads what is new in the folders of runs: series, cast statistics, events and states. The memory is bounded. `ottava monitor` shows the results.
//!
//! A reader asks for the changes after a revision. `Tail` reads the new lines of a file. `Series` and `HeatMap` hold a bounded number of buckets.
//! [`Status`] says whether a run trains.
//!
//! `RunRecord` (`report/run_record.rs`) is written when a run begins, and again when it ends. The `State` of a run follows from `RunLock::is_held`
//! and this record. `ottava-serve` sends the page and the answers, and the page only draws. A monitor never writes into the folder of a run.

mod export;
mod heat;
mod lines;
mod run;
mod series;
mod status;
mod tail;

#[cfg(test)]
mod tests;

pub use export::{Form, Metrics};
pub use heat::HeatPart;
pub use run::{Changes, Event, Summary};
pub use series::Part;
pub use status::{State, Status};

use crate::report::RunRecord;
use ottava_common::error::{Error, Result};
use run::MonitoredRun;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The maximum number of monitored runs.
const MOST_RUNS: usize = 64;

/// The minimum time between two reads of the files.
const INTERVAL: Duration = Duration::from_millis(500);

/// The maximum number of ranks whose logs are shown. `LOG_BYTES` is the number of bytes that are read from the end of each log.
const MOST_LOGS: usize = 64;
const LOG_BYTES: u64 = 4096;

/// A monitor of several runs.
pub struct Monitor {
    /// The paths from the command line.
    paths: Vec<PathBuf>,
    runs: Vec<MonitoredRun>,
    refreshed: Option<Instant>,
    left_out: bool,
    /// The folders that are not shown, and about which a warning was logged.
    refused: BTreeSet<PathBuf>,
}

/// An answer to a reader.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// All runs.
    pub runs: Vec<Summary>,
    /// The changes of each run that the reader asks for.
    pub changes: BTreeMap<usize, Changes>,
    /// Whether there are more runs than a monitor shows.
    pub left_out: bool,
}

/// The end of the log of a rank.
#[derive(Debug, PartialEq, Serialize)]
pub struct RankLog {
    /// The rank.
    pub rank: usize,
    /// The last lines of the log.
    pub text: String,
}

impl Monitor {
    /// Monitors the runs in these folders. A folder belongs to a run, or contains the folders of runs. Runs that begin later are also found.
    ///
    /// # Errors
    /// [`Error::Config`] if one of the paths is a file.
    pub fn new(paths: Vec<PathBuf>) -> Result<Monitor> {
        if let Some(file) = paths.iter().find(|path| path.is_file()) {
            let text = format!("{}: this is a file; name the `output_dir` of `ottava train`", file.display());
            return Err(Error::Config(text));
        }
        Ok(Monitor { paths, runs: Vec::new(), refreshed: None, left_out: false, refused: BTreeSet::new() })
    }

    /// Reads what is new in all folders, unless the last read was less than half a second ago.
    pub fn refresh(&mut self) {
        if self.refreshed.is_some_and(|at| at.elapsed() < INTERVAL) {
            return;
        }
        self.find_runs();
        let now = RunRecord::now();
        for number in 0..self.runs.len() {
            if self.is_own(self.runs[number].folder()) {
                self.runs[number].refresh(now);
            }
        }
        self.refreshed = Some(Instant::now());
    }

    /// Returns a summary of each run, and the changes of the runs in `since`. A run in `since` has the revision up to which the reader has
    /// everything.
    pub fn answer(&self, since: &BTreeMap<usize, u64>) -> Answer {
        let runs: Vec<Summary> = self.runs.iter().map(MonitoredRun::summary).collect();
        let changes = since.iter().filter_map(|(&id, &since)| Some((id, self.runs.get(id)?.changes(since)))).collect();
        Answer { runs, changes, left_out: self.left_out }
    }

    /// Returns the ends of the logs of the ranks of a run. Returns `None` if the run does not exist.
    pub fn logs(&self, id: usize) -> Option<Vec<RankLog>> {
        let folder = self.runs.get(id)?.folder();
        let logs = (0..MOST_LOGS).filter_map(|rank| match end_of(&folder.join(format!("rank-{rank}.log"))) {
            Ok(text) => Some(RankLog { rank, text }),
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                Some(RankLog { rank, text: format!("rank-{rank}.log: {error}\n") })
            }
            Err(_) => None,
        });
        Some(logs.filter(|_| self.is_own(folder)).collect())
    }

    /// Returns the settings of a run, by their dotted paths. Returns `None` if the run does not exist.
    ///
    /// Errors if its `config.toml` cannot be read.
    pub fn settings(&self, id: usize) -> Option<Result<BTreeMap<String, String>>> {
        Some(export::settings(self.folder(id)?))
    }

    /// Opens the metrics of a run. Returns `None` if the run does not exist.
    ///
    /// Errors if its `metrics.jsonl` cannot be read.
    pub fn metrics(&self, id: usize) -> Option<Result<Metrics>> {
        Some(Metrics::open(self.folder(id)?))
    }

    /// Returns the folder of a run that may be read.
    fn folder(&self, id: usize) -> Option<&Path> {
        Some(self.runs.get(id)?.folder()).filter(|folder| self.is_own(folder))
    }

    /// Returns whether `folder` was named on the command line, or lies in a folder that was. Checked again later, since `folder` may become a link to
    /// another place.
    fn is_own(&self, folder: &Path) -> bool {
        self.paths.iter().any(|path| path == folder)
            || self.paths.iter().any(|path| folder.starts_with(path) && leads_into(folder, path))
    }

    fn find_runs(&mut self) {
        for path in self.paths.clone() {
            if is_run(&path) || !path.is_dir() {
                self.add(&path);
                continue;
            }
            let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
            let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|folder| is_run(folder)).collect();
            found.sort();
            for folder in found {
                if leads_into(&folder, &path) {
                    self.add(&folder);
                } else if self.refused.insert(folder.clone()) {
                    tracing::warn!(
                        "{}: not shown, since it is a link out of {}; name the folder that it leads to",
                        folder.display(),
                        path.display()
                    );
                }
            }
        }
    }

    fn add(&mut self, folder: &Path) {
        if self.runs.iter().any(|run| run.folder() == folder) {
            return;
        }
        if self.runs.len() == MOST_RUNS {
            self.left_out = true;
            return;
        }
        self.runs.push(MonitoredRun::new(self.runs.len(), folder));
        let names: Vec<String> = self.runs.iter().map(|run| last_part(run.folder())).collect();
        for (run, name) in self.runs.iter_mut().zip(&names) {
            let is_unique = names.iter().filter(|other| *other == name).count() == 1;
            run.set_name(if is_unique { name.clone() } else { run.folder().display().to_string() });
        }
    }
}

/// Returns the last part of the path of a folder.
fn last_part(folder: &Path) -> String {
    folder.file_name().map_or(folder.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Returns whether `folder` belongs to a run.
fn is_run(folder: &Path) -> bool {
    let is_file = |file: &&str| std::fs::symlink_metadata(folder.join(file)).is_ok_and(|found| found.is_file());
    ["metrics.jsonl", "run.json", ".lock"].iter().any(is_file)
}

/// Returns whether `folder` lies in the folder `root` after its links are followed. Returns true if `folder` does not exist.
fn leads_into(folder: &Path, root: &Path) -> bool {
    match (folder.canonicalize(), root.canonicalize()) {
        (Ok(folder), Ok(root)) => folder.starts_with(root),
        (Err(error), _) => error.kind() == ErrorKind::NotFound,
        (Ok(_), Err(_)) => false,
    }
}

/// Returns the last lines of a file. Errors if the file is a link.
fn end_of(path: &Path) -> std::io::Result<String> {
    let (mut file, size) = ottava_common::input::open_unlinked(path)?;
    let from = size.saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // Unless the text begins at the start of the file, its first line may be incomplete.
    Ok(if from == 0 { text } else { text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_string()) })
}
