//! Weights & Biases, by a file that `wandb sync` sends.
//!
//! The file is written anew from `metrics.jsonl` at each start and after each return to an earlier step, so it never has steps that are no longer part
//! of the run. `metrics.jsonl` has no times, so lines that are written anew have the time at which they are written.

mod log;
mod message;

use crate::thread::Stop;
use crate::{Line, Opening, Outcome, Tracker};
use log::LogFile;
use message::Message;
use ottava_common::utc::Utc;
use ottava_http::Fault;
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};

/// The fields of `Record` in `wandb_internal.proto`.
mod record {
    pub const NUM: u32 = 1;
    pub const HISTORY: u32 = 2;
    pub const RUN: u32 = 17;
    pub const EXIT: u32 = 18;
}

/// The field of a value as JSON, in `ConfigItem` and `HistoryItem`.
const VALUE_JSON: u32 = 16;

#[derive(Default)]
pub(crate) struct Wandb {
    file: Option<LogFile>,
    /// The number of records so far.
    records: u64,
    started: u64,
}

impl Wandb {
    fn write(&mut self, field: u32, content: Message) -> io::Result<()> {
        let file = self.file.as_mut().ok_or_else(|| io::Error::other("the file is not open"))?;
        self.records += 1;
        file.append(&Message::default().number(record::NUM, self.records).message(field, content).bytes())
    }

    fn write_lines(&mut self, lines: &[Line]) -> io::Result<()> {
        for line in lines {
            let item = |key: &str, json: String| Message::default().text(1, key).text(VALUE_JSON, &json);
            let seconds = line.time as f64 / 1000.0;
            let mut history = Message::default();
            for (key, value) in &line.numbers {
                history = history.message(1, item(key, json!(value).to_string()));
            }
            if line.attempt > 0 {
                history = history.message(1, item("attempt", line.attempt.to_string()));
            }
            history = history.message(1, item("_step", line.step.to_string()));
            history = history.message(1, item("_timestamp", json!(seconds).to_string()));
            history = history.message(1, item("_runtime", json!((seconds - self.started as f64).max(0.0)).to_string()));
            history = history.message(2, Message::default().number(1, line.step));
            self.write(record::HISTORY, history)?;
        }
        self.file.as_mut().map_or(Ok(()), LogFile::flush)
    }
}

/// Returns the file of a run. Its folder has the name that `wandb` gives to the folder of an offline run.
fn path(folder: &Path, id: &str, started: u64) -> PathBuf {
    folder.join("wandb").join(format!("offline-run-{}-{id}", date(started))).join(format!("run-{id}.wandb"))
}

/// Formats seconds since 1970 as `YYYYMMDD_HHMMSS` in UTC.
fn date(seconds: u64) -> String {
    let Utc { date: [year, month, day], time: [hour, minute, second] } = Utc::of(seconds);
    format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
}

fn fault(error: io::Error) -> Fault {
    Fault::passing(format!("its file cannot be written: {error}"))
}

impl Tracker for Wandb {
    fn name(&self) -> &'static str {
        "Weights & Biases"
    }

    fn open(&mut self, run: &Opening, _: &Stop) -> Result<(), Fault> {
        let path = path(run.folder, run.id, run.started);
        self.file = Some(LogFile::create(&path).map_err(fault)?);
        (self.records, self.started) = (0, run.started);
        // `wandb sync` leaves this mark beside a file that it has sent.
        std::fs::remove_file(path.with_extension("wandb.synced")).ok();
        let mut config = Message::default();
        for (key, value) in &run.facts.settings {
            config = config.message(1, Message::default().text(1, key).text(VALUE_JSON, &json!(value).to_string()));
        }
        let content = Message::default()
            .text(1, run.id)
            .text(3, &run.facts.project)
            .message(4, config)
            .text(8, &run.facts.name)
            .message(17, Message::default().number(1, run.started));
        self.write(record::RUN, content).map_err(fault)?;
        tracing::info!("{}: send it with `wandb sync {}`", self.name(), path.parent().unwrap_or(&path).display());
        Ok(())
    }

    fn send(&mut self, lines: &[Line], _: &Stop) -> Result<(), Fault> {
        self.write_lines(lines).map_err(fault)
    }

    fn end(&mut self, outcome: Outcome, _: &Path, _: &Stop) -> Result<(), Fault> {
        let code = u64::from(outcome != Outcome::Finished);
        let mut write = || {
            self.write(record::EXIT, Message::default().number(1, code))?;
            self.file.take().map_or(Ok(()), LogFile::finish)
        };
        write().map_err(fault)
    }

    fn starts_over(&self) -> bool {
        true
    }
}
