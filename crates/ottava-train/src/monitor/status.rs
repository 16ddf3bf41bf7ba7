//! The state of a run: whether it trains, and how it ended.

use crate::report::{RunEnd, RunOutcome, RunRecord};
use crate::trainer::RunLock;
use serde::Serialize;
use std::path::Path;

/// The number of seconds without a new line after which a run that holds its lock is silent. It must also have missed `SILENT_STEPS` steps.
const SILENT_SECONDS: u64 = 120;
const SILENT_STEPS: f64 = 20.0;

/// The state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The folder does not exist, or was removed.
    Missing,
    /// A process holds the folder, and has not recorded a step yet.
    Starting,
    /// A process holds the folder, and records steps.
    Running,
    /// A process holds the folder, but has not recorded a step for a long time.
    Silent,
    /// The run ended after its last step.
    Finished,
    /// A signal or the sentinel ended the run.
    Stopped,
    /// An error ended the run.
    Failed,
    /// No process holds the folder, and `run.json` does not say how the run ended.
    Killed,
    /// No process holds the folder, and it has no `run.json`.
    Ended,
    /// No run has begun in the folder.
    Empty,
}

/// The state of a run, and a sentence about it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// The state.
    pub state: State,
    /// A sentence about the state; may be empty.
    pub detail: String,
}

/// What is known of a run, apart from its lock.
pub struct Known<'a> {
    /// The record of the run.
    pub record: Option<&'a RunRecord>,
    /// The time at which the metrics were last written, in seconds since 1970.
    pub written: Option<u64>,
    /// The last step of the run.
    pub step: Option<u64>,
    /// The number of seconds between the last steps, if known.
    pub step_seconds: Option<f64>,
}

/// Returns whether a process trains into `folder` now. Returns `None` if the folder does not exist. Call it before the record is read: a run records
/// its end before it releases the lock.
pub fn is_held(folder: &Path) -> ottava_common::Result<Option<bool>> {
    if folder.is_dir() { RunLock::is_held(folder).map(Some) } else { Ok(None) }
}

/// Returns the state of a run at `now`, in seconds since 1970. `held` is the result of [`is_held`].
pub fn status(held: Option<bool>, known: &Known, now: u64) -> Status {
    let (state, detail) = match (held, known.record) {
        (None, _) => (State::Missing, "there is no such folder".to_string()),
        (Some(true), record) => holder(record, known, now),
        (Some(false), None) if known.step.is_none() => (State::Empty, "no run has begun in this folder".to_string()),
        (Some(false), Some(RunRecord { end: Some(end), .. })) => ended(end),
        (Some(false), Some(_)) => {
            let why = "no process holds the folder, and the run has recorded no end: it was killed, or has crashed";
            (State::Killed, why.to_string())
        }
        (Some(false), None) => {
            let why = "no process holds the folder, and there is no run.json to say how the run ended";
            (State::Ended, why.to_string())
        }
    };
    Status { state, detail }
}

fn holder(record: Option<&RunRecord>, known: &Known, now: u64) -> (State, String) {
    let begun = record.is_some_and(|record| record.end.is_none());
    let written = known.written.filter(|&at| record.is_none_or(|record| at >= record.started));
    let Some(written) = written.filter(|_| begun && known.step.is_some()) else {
        return (State::Starting, "a process holds the folder, and has recorded no step yet".into());
    };
    let quiet = now.saturating_sub(written);
    let due = known.step_seconds.map_or(0.0, |seconds| seconds * SILENT_STEPS);
    if quiet > SILENT_SECONDS && quiet as f64 > due {
        let text = format!(
            "a process holds the folder, and has recorded nothing for {}: it evaluates, saves a checkpoint, or hangs",
            seconds(quiet)
        );
        return (State::Silent, text);
    }
    (State::Running, String::new())
}

fn ended(end: &RunEnd) -> (State, String) {
    let state = match end.outcome {
        RunOutcome::Finished => State::Finished,
        RunOutcome::Stopped => State::Stopped,
        RunOutcome::Failed => State::Failed,
    };
    (state, end.message.clone())
}

/// Returns a duration in words.
fn seconds(count: u64) -> String {
    match count {
        0..120 => format!("{count} s"),
        120..7200 => format!("{} minutes", count / 60),
        _ => format!("{} hours", count / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_follows_from_lock_and_record_and_time() {
        let open = RunRecord { started: 1000, ..RunRecord::default() };
        let end = |outcome| {
            let end = RunEnd { time: 2000, step: 9, outcome, message: "why".into() };
            RunRecord { end: Some(end), ..open.clone() }
        };
        let of = |held: Option<bool>, record: Option<&RunRecord>, written: Option<u64>, now: u64| {
            let step = written.map(|_| 9);
            status(held, &Known { record, written, step, step_seconds: Some(1.0) }, now).state
        };
        let finished = end(RunOutcome::Finished);
        for (state, held, record, written, now) in [
            (State::Missing, None, None, None, 3000),
            (State::Missing, None, Some(&finished), Some(2000), 3000),
            (State::Empty, Some(false), None, None, 3000),
            (State::Starting, Some(true), None, None, 3000),
            (State::Starting, Some(true), Some(&open), None, 3000),
            // A resumed run before its first step, which has not written its record yet.
            (State::Starting, Some(true), Some(&open), Some(999), 3000),
            (State::Starting, Some(true), Some(&finished), Some(2000), 2001),
            (State::Running, Some(true), Some(&open), Some(2000), 2100),
            (State::Silent, Some(true), Some(&open), Some(2000), 2121),
            (State::Finished, Some(false), Some(&finished), Some(2000), 2001),
            (State::Stopped, Some(false), Some(&end(RunOutcome::Stopped)), Some(2000), 2001),
            (State::Failed, Some(false), Some(&end(RunOutcome::Failed)), Some(2000), 2001),
            (State::Killed, Some(false), Some(&open), Some(2000), 2001),
            (State::Killed, Some(false), Some(&open), None, 2001),
            (State::Ended, Some(false), None, Some(2000), 2001),
        ] {
            assert_eq!(of(held, record, written, now), state, "{held:?} {record:?} {written:?} {now}");
        }
        // If steps take a minute, a run is silent only after twenty minutes.
        let slow = Known { record: Some(&open), written: Some(2000), step: Some(9), step_seconds: Some(60.0) };
        assert_eq!(status(Some(true), &slow, 3000).state, State::Running);
        assert_eq!(status(Some(true), &slow, 3201).state, State::Silent);
    }
}
