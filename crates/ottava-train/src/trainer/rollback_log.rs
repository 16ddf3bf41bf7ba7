//! `rollbacks.jsonl`: each return of a run to an earlier checkpoint.

use crate::report::MAX_METRICS_BYTES;
use ottava_checkpoint::Progress;
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::input;
use ottava_sentinel::Rollback;
use std::path::Path;

/// The log of all rollbacks of a run, in its folder. Unlike other logs it is ahead of the checkpoints: a run that is resumed from the
/// checkpoint of a rollback skips the same rows.
const ROLLBACKS: &str = "rollbacks.jsonl";

fn read_rollbacks(folder: &Path) -> Result<Vec<Rollback>> {
    let path = folder.join(ROLLBACKS);
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = input::read_text(&path, MAX_METRICS_BYTES).map_err(Error::io(&path))?;
    let lines = text.lines().map(|line| {
        serde_json::from_str(line).map_err(|error| {
            Error::Data(format!(
                "{}: not a rollback of a run ({error}); is the file another program's?",
                path.display()
            ))
        })
    });
    lines.collect()
}

/// Writes the log of the run in `folder`.
pub(super) fn write_rollbacks(folder: &Path, rollbacks: &[Rollback]) -> Result<()> {
    let line = |rollback| serde_json::to_string(rollback).expect("rollbacks are plain data") + "\n";
    let text: String = rollbacks.iter().map(line).collect();
    replace_file(&RealFs, &folder.join(ROLLBACKS), text.as_bytes())
}

/// All rollbacks of the run in `folder` up to the checkpoint of `progress`: rollbacks that the checkpoint knows, and rollbacks until the last one that
/// returned to it, which happened after it was saved.
pub(super) fn history(folder: &Path, progress: &Progress) -> Result<Vec<Rollback>> {
    let known = &progress.sentinel.rollbacks;
    let mut all = read_rollbacks(folder)?;
    let last = all.iter().rposition(|rollback| rollback.to == progress.step);
    all.truncate(last.map_or(0, |last| last + 1));
    Ok(if all.starts_with(known) { all } else { known.clone() })
}

/// Writes the log of the run in `folder` if it says anything but `rollbacks`, from which the run goes on.
pub(super) fn keep_rollbacks(folder: &Path, rollbacks: &[Rollback]) -> Result<()> {
    if read_rollbacks(folder)? == rollbacks { Ok(()) } else { write_rollbacks(folder, rollbacks) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_data::{DataState, LoaderState};
    use ottava_sentinel::SentinelState;

    fn rollback(from: u64, to: u64) -> Rollback {
        let data = DataState::One(LoaderState { document: from, ..LoaderState::start(0) });
        Rollback { from, to, reason: "a spike".into(), data }
    }

    fn at(step: u64, rollbacks: &[Rollback]) -> Progress {
        let start = Progress::start(DataState::One(LoaderState::start(0)));
        Progress {
            step,
            sentinel: SentinelState { rollbacks: rollbacks.to_vec(), ..SentinelState::default() },
            ..start
        }
    }

    #[test]
    fn a_rollback_below_an_earlier_one_does_not_forget_it() {
        let folder = tempfile::tempdir().unwrap();
        let all = [rollback(14, 12), rollback(13, 11)];
        write_rollbacks(folder.path(), &all).unwrap();
        let of = |step, known: &[Rollback]| history(folder.path(), &at(step, known)).unwrap();
        // Killed right after the second rollback, to a checkpoint that was saved before the first one.
        assert_eq!(of(11, &[]), all);
        // A checkpoint that was saved after both.
        assert_eq!(of(13, &all), all);
        // Somebody goes back to a checkpoint from before, or from between.
        assert_eq!(of(10, &[]), []);
        assert_eq!(of(12, &[]), all[..1]);
        assert_eq!(of(12, &all[..1]), all[..1]);
        keep_rollbacks(folder.path(), &all[..1]).unwrap();
        assert_eq!(of(11, &[]), []);
    }
}
