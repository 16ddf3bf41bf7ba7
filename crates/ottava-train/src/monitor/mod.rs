//! What is new in the folders of runs: series, cast statistics, events and states, in bounded memory. `ottava monitor` shows it.
//!
//! A reader asks for what it lacks since a revision. `Tail` reads the new lines of a file, `Series` and
//! `HeatMap` keep a bounded number of buckets, and [`Status`] says whether a run trains.
//!
//! `RunRecord` (`report/run_record.rs`) is written when a run begins, and again when it ends. `RunLock::is_held` and the record give the `State` of
//! a run. `ottava-serve` sends the page and the answers; the page only draws. A monitor never writes into the folder of a run.

mod heat;
mod lines;
mod run;
mod series;
mod status;
mod tail;

#[cfg(test)]
mod tests;

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

/// The most runs that are monitored.
const MOST_RUNS: usize = 64;

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_millis(500);

/// The most ranks whose logs are shown, and bytes of the end of each log.
const MOST_LOGS: usize = 64;
const LOG_BYTES: u64 = 4096;

/// Runs that are monitored.
pub struct Monitor {
    /// What was named on the command line.
    paths: Vec<PathBuf>,
    runs: Vec<MonitoredRun>,
    refreshed: Option<Instant>,
    left_out: bool,
    /// Folders that are not shown, which was said.
    refused: BTreeSet<PathBuf>,
}

/// An answer to a reader.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// All runs.
    pub runs: Vec<Summary>,
    /// What the reader lacks of the runs that it asks for.
    pub changes: BTreeMap<usize, Changes>,
    /// Whether there are more runs than are monitored.
    pub left_out: bool,
}

/// The end of the log of a rank.
#[derive(Debug, PartialEq, Serialize)]
pub struct RankLog {
    /// The rank.
    pub rank: usize,
    /// Its last lines.
    pub text: String,
}

impl Monitor {
    /// Monitors the runs in these folders. A folder belongs to a run, or has the folders of runs in it, also of such that begin later.
    ///
    /// # Errors
    /// [`Error::Config`] when one of them is a file.
    pub fn new(paths: Vec<PathBuf>) -> Result<Monitor> {
        if let Some(file) = paths.iter().find(|path| path.is_file()) {
            let text = format!("{}: this is a file; name the `output_dir` of `ottava train`", file.display());
            return Err(Error::Config(text));
        }
        Ok(Monitor { paths, runs: Vec::new(), refreshed: None, left_out: false, refused: BTreeSet::new() })
    }

    /// Reads what is new in all folders, unless that was done just now.
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

    /// All runs, and what a reader lacks of the runs in `since`, each with the revision up to which it has everything.
    pub fn answer(&self, since: &BTreeMap<usize, u64>) -> Answer {
        let runs: Vec<Summary> = self.runs.iter().map(MonitoredRun::summary).collect();
        let changes = since.iter().filter_map(|(&id, &since)| Some((id, self.runs.get(id)?.changes(since)))).collect();
        Answer { runs, changes, left_out: self.left_out }
    }

    /// The ends of the logs of the ranks of a run; `None` if there is no such run.
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

    /// Whether `folder` was named on the command line, or is in a folder that was: a link may lead out of that later.
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

/// The last part of the path of a folder.
fn last_part(folder: &Path) -> String {
    folder.file_name().map_or(folder.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Whether `folder` belongs to a run.
fn is_run(folder: &Path) -> bool {
    let is_file = |file: &&str| std::fs::symlink_metadata(folder.join(file)).is_ok_and(|found| found.is_file());
    ["metrics.jsonl", "run.json", ".lock"].iter().any(is_file)
}

/// Whether `folder`, after its links are followed, is in the folder `root`. One that does not exist leads nowhere else.
fn leads_into(folder: &Path, root: &Path) -> bool {
    match (folder.canonicalize(), root.canonicalize()) {
        (Ok(folder), Ok(root)) => folder.starts_with(root),
        (Err(error), _) => error.kind() == ErrorKind::NotFound,
        (Ok(_), Err(_)) => false,
    }
}

/// The last lines of a file that is no link.
fn end_of(path: &Path) -> std::io::Result<String> {
    let (mut file, size) = ottava_common::input::open_unlinked(path)?;
    let from = size.saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // The first line is whole only at the start of the file.
    Ok(if from == 0 { text } else { text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_string()) })
}
