//! The data that a monitor holds about one run.

use super::heat::{HeatMap, HeatPart};
use super::lines::{AlarmLine, CastLine, CompletionLine, Entries, Field, RollbackLine, SentinelLine};
use super::series::{Part, Series};
use super::status::{Known, State, Status, is_held, status};
use super::tail::{Found, Tail};
use crate::report::RunRecord;
use ottava_common::error::Result;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

/// The maximum number of series of a run. Further series are not shown.
const MOST_SERIES: usize = 256;

/// The maximum number of alarms that are listed, also of findings and of rollbacks. The newest events are listed.
const MOST_EVENTS: usize = 100;

/// The number of completions that are listed, the newest.
const MOST_COMPLETIONS: usize = 20;

/// The largest text of a prompt or a completion that is listed, in bytes.
const MOST_TEXT: usize = 4 << 10;

/// An alarm, a finding of the sentinel, or a rollback.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// The step after which it was found.
    pub step: u64,
    /// `alarm`, `sentinel` or `rollback`.
    pub kind: &'static str,
    /// What was found.
    pub text: String,
}

/// Events of one kind.
#[derive(Default)]
struct Events {
    newest: VecDeque<Event>,
    count: usize,
}

impl Events {
    fn push(&mut self, step: u64, kind: &'static str, text: String) {
        self.count += 1;
        self.newest.push_back(Event { step, kind, text });
        if self.newest.len() > MOST_EVENTS {
            self.newest.pop_front();
        }
    }
}

/// The data of a run that a reader lacks.
#[derive(Debug, Serialize)]
pub struct Changes {
    /// The series, by name.
    pub series: BTreeMap<String, Part>,
    /// The elements that casts have lost.
    pub casts: Option<HeatPart>,
    /// All events; `None` if there are no new events.
    pub events: Option<Vec<Event>>,
    /// The newest completions of reinforcement learning and samples of the run, if there are new ones.
    pub completions: Option<VecDeque<CompletionLine>>,
}

/// A summary of a run, which a page always shows.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// The number of the run in this monitor.
    pub id: usize,
    /// The last part of the path of the run's folder. If runs share this part, the whole path.
    pub name: String,
    /// The path of the run's folder, with U+FFFD in place of bytes that are not UTF-8.
    pub folder: String,
    /// The state of the run.
    #[serde(flatten)]
    pub status: Status,
    /// The record in the run's `run.json`.
    pub record: Option<RunRecord>,
    /// The last step.
    pub step: Option<u64>,
    /// The time at which metrics were last written, in seconds since 1970.
    pub written: Option<u64>,
    /// The newest values, by name.
    pub latest: BTreeMap<String, f64>,
    /// The numbers of alarms, of findings of the sentinel, and of rollbacks.
    pub events: [usize; 3],
    /// A message for each file that cannot be read, and for skipped lines.
    pub problems: Vec<String>,
    /// Whether the monitor has not read all of the run's files yet.
    pub pending: bool,
    /// The revision after which the reader asks for further changes.
    pub revision: u64,
}

/// The files of a run, in the order of [`MonitoredRun::tails`].
const FILES: [&str; 7] = [
    "metrics.jsonl",
    "casts.jsonl",
    "sentinel.jsonl",
    "alarms.jsonl",
    "rollbacks.jsonl",
    "completions.jsonl",
    "samples.jsonl",
];

/// A run that is monitored.
pub struct MonitoredRun {
    id: usize,
    name: String,
    folder: PathBuf,
    tails: [Tail; FILES.len()],
    shown: Shown,
    status: Status,
    record: Option<RunRecord>,
    pending: bool,
    /// The reasons why the record or a file cannot be read.
    errors: Vec<String>,
}

/// The data of the files that were read.
struct Shown {
    series: BTreeMap<String, Series>,
    casts: HeatMap,
    /// Alarms, findings and rollbacks.
    events: [Events; 3],
    events_changed: u64,
    completions: VecDeque<CompletionLine>,
    completions_changed: u64,
    /// The last step of each file.
    steps: [Option<u64>; FILES.len()],
    /// The number of lines of each file that could not be read.
    skipped: [u64; FILES.len()],
    revision: u64,
}

impl Shown {
    /// Discards all data of a file.
    fn restart(&mut self, file: usize) {
        (self.steps[file], self.skipped[file]) = (None, 0);
        match file {
            0 => self.restart_series(|name| !name.starts_with("sentinel/")),
            1 => self.casts = HeatMap::new(self.revision),
            2 => {
                self.restart_series(|name| name.starts_with("sentinel/"));
                self.events[1] = Events::default();
            }
            3 => self.events[0] = Events::default(),
            4 => self.events[2] = Events::default(),
            _ => {
                self.completions.clear();
                self.completions_changed = self.revision;
            }
        }
        self.events_changed = self.revision;
    }

    fn restart_series(&mut self, of: impl Fn(&str) -> bool) {
        for (_, series) in self.series.iter_mut().filter(|(name, _)| of(name)) {
            *series = Series::new(self.revision);
        }
    }

    fn line(&mut self, file: usize, line: &[u8]) {
        let read = match file {
            0 => self.metrics(line),
            1 => self.cast_line(line),
            2 => self.comparison(line),
            3 => self.alarm(line),
            4 => self.rollback(line),
            _ => self.completion(file, line),
        };
        self.skipped[file] += u64::from(read.is_none());
    }

    /// Stores the step of a line. If this step precedes the last step, the run was resumed, and `cut` removes the data of the steps from this one on.
    fn advance(&mut self, file: usize, step: u64, cut: impl FnOnce(&mut Shown)) {
        if self.steps[file].is_some_and(|last| step < last) {
            cut(self);
        }
        self.steps[file] = Some(step);
    }

    fn push(&mut self, name: &str, step: u64, value: Option<f64>) {
        let revision = self.revision;
        if let Some(series) = self.series.get_mut(name) {
            series.push(step, value, revision);
        } else if self.series.len() < MOST_SERIES {
            let series = self.series.entry(name.to_string()).or_insert(Series::new(revision));
            series.push(step, value, revision);
        }
    }

    fn cut_series(&mut self, step: u64, of: impl Fn(&str) -> bool) {
        for (_, series) in self.series.iter_mut().filter(|(name, _)| of(name)) {
            series.cut(step, self.revision);
        }
    }

    fn metrics(&mut self, line: &[u8]) -> Option<()> {
        let Entries(fields) = serde_json::from_slice::<Entries<Field>>(line).ok()?;
        let step = fields.iter().find_map(|(name, field)| match field {
            Field::Number(step) if name == "step" && *step >= 0.0 => Some(*step as u64),
            _ => None,
        })?;
        self.advance(0, step, |shown| shown.cut_series(step, |name| !name.starts_with("sentinel/")));
        for (name, field) in fields.iter().filter(|(name, _)| name != "step") {
            match field {
                Field::Number(value) => self.push(name, step, Some(*value)),
                Field::NotFinite => self.push(name, step, None),
                Field::Other => {}
            }
        }
        Some(())
    }

    fn cast_line(&mut self, line: &[u8]) -> Option<()> {
        let CastLine { step, casts } = serde_json::from_slice(line).ok()?;
        self.advance(1, step, |shown| shown.casts.cut(step, shown.revision));
        let revision = self.revision;
        self.casts.push(step, casts.0.into_iter().map(|(name, cell)| (name, cell.shares())), revision);
        Some(())
    }

    fn comparison(&mut self, line: &[u8]) -> Option<()> {
        let line: SentinelLine = serde_json::from_slice(line).ok()?;
        let step = line.step;
        self.advance(2, step, |shown| {
            shown.cut_series(step, |name| name.starts_with("sentinel/"));
            shown.events[1].newest.retain(|event| event.step < step);
        });
        self.push("sentinel/loss_gap", step, line.loss_gap);
        self.push("sentinel/gradient_cosine", step, line.gradient_cosine);
        self.push("sentinel/gradient_norm_ratio", step, line.gradient_norm_ratio);
        for finding in line.findings {
            self.events[1].push(step, "sentinel", finding.text);
            self.events_changed = self.revision;
        }
        Some(())
    }

    fn alarm(&mut self, line: &[u8]) -> Option<()> {
        let AlarmLine { step, alarm, policy, text } = serde_json::from_slice(line).ok()?;
        self.events[0].push(step, "alarm", format!("{alarm} ({policy}): {text}"));
        self.events_changed = self.revision;
        Some(())
    }

    fn rollback(&mut self, line: &[u8]) -> Option<()> {
        let RollbackLine { from, to, reason } = serde_json::from_slice(line).ok()?;
        self.events[2].push(from, "rollback", format!("back to step {to}: {reason}"));
        self.events_changed = self.revision;
        Some(())
    }

    fn completion(&mut self, file: usize, line: &[u8]) -> Option<()> {
        let mut line: CompletionLine = serde_json::from_slice(line).ok()?;
        let step = line.step;
        self.advance(file, step, |shown| shown.completions.retain(|completion| completion.step < step));
        for text in [&mut line.prompt, &mut line.completion] {
            let end = (0..=MOST_TEXT.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
            text.truncate(end.unwrap_or(0));
        }
        self.completions.push_back(line);
        if self.completions.len() > MOST_COMPLETIONS {
            self.completions.pop_front();
        }
        self.completions_changed = self.revision;
        Some(())
    }
}

impl MonitoredRun {
    /// Makes the run in `folder`, without data.
    pub fn new(id: usize, folder: &Path) -> MonitoredRun {
        MonitoredRun {
            id,
            name: String::new(),
            folder: folder.to_path_buf(),
            tails: FILES.map(|file| Tail::new(folder.join(file))),
            shown: Shown {
                series: BTreeMap::new(),
                casts: HeatMap::new(0),
                events: Default::default(),
                events_changed: 0,
                completions: VecDeque::new(),
                completions_changed: 0,
                steps: [None; FILES.len()],
                skipped: [0; FILES.len()],
                revision: 0,
            },
            status: Status { state: State::Empty, detail: String::new() },
            record: None,
            pending: false,
            errors: Vec::new(),
        }
    }

    /// Sets the name that is shown.
    pub fn set_name(&mut self, name: String) {
        self.name = name;
    }

    /// Returns the run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads what is new at `now`, in seconds since 1970.
    pub fn refresh(&mut self, now: u64) {
        self.shown.revision += 1;
        self.errors.clear();
        let held = is_held(&self.folder);
        self.record = self.note(RunRecord::read).flatten();
        self.pending = false;
        for file in 0..FILES.len() {
            let shown = &mut self.shown;
            let read = self.tails[file].read(&mut |found| match found {
                Found::Restart => shown.restart(file),
                Found::Line(line) => shown.line(file, line),
            });
            match read {
                Ok(more) => self.pending |= more && file < 3,
                Err(error) => self.errors.push(error.to_string()),
            }
        }
        let held = held.unwrap_or_else(|error| {
            self.errors.push(error.to_string());
            Some(false)
        });
        let latest = |name: &str| self.shown.series.get(name).and_then(Series::last);
        let tokens = self.record.as_ref().map(|record| record.tokens_per_step as f64);
        let known = Known {
            record: self.record.as_ref(),
            written: self.tails[0].written(),
            step: self.shown.steps[0],
            step_seconds: tokens.zip(latest("tokens_per_second")).map(|(tokens, rate)| tokens / rate),
        };
        self.status = status(held, &known, now);
    }

    fn note<T>(&mut self, read: impl FnOnce(&Path) -> Result<T>) -> Option<T> {
        read(&self.folder).map_err(|error| self.errors.push(error.to_string())).ok()
    }

    /// Returns the summary of the run.
    pub fn summary(&self) -> Summary {
        let Shown { series, events, steps, skipped, revision, .. } = &self.shown;
        let latest = series.iter().filter_map(|(name, series)| Some((name.clone(), series.last()?))).collect();
        let lines = FILES.iter().zip(skipped).filter(|(_, skipped)| **skipped > 0);
        let lines = lines.map(|(file, skipped)| format!("{file}: {skipped} lines could not be read"));
        Summary {
            id: self.id,
            name: self.name.clone(),
            folder: self.folder.display().to_string(),
            status: self.status.clone(),
            record: self.record.clone(),
            step: steps[0],
            written: self.tails[0].written(),
            latest,
            events: [0, 1, 2].map(|kind| events[kind].count),
            problems: self.errors.iter().cloned().chain(lines).collect(),
            pending: self.pending,
            revision: *revision,
        }
    }

    /// Returns what a reader lacks that has read everything up to revision `since`.
    pub fn changes(&self, since: u64) -> Changes {
        let Shown { series, casts, events, events_changed, completions, completions_changed, .. } = &self.shown;
        let series = series.iter().filter_map(|(name, series)| Some((name.clone(), series.since(since)?))).collect();
        let mut all: Vec<Event> = events.iter().flat_map(|events| &events.newest).cloned().collect();
        all.sort_by_key(|event| event.step);
        let is_new = |changed: u64| since == 0 || changed > since;
        let completions = is_new(*completions_changed).then(|| completions.clone());
        Changes { series, casts: casts.since(since), events: is_new(*events_changed).then_some(all), completions }
    }
}
