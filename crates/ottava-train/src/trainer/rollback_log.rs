//! `rollbacks.jsonl`: each return of a run to an earlier checkpoint.

use crate::report::MAX_METRICS_BYTES;
use ottava_checkpoint::Progress;
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::input;
use ottava_sentinel::Rollback;
use std::path::Path;

/// The name of the log of all rollbacks of a run. Unlike other logs, it is written before the next checkpoint: a run that is resumed from the
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

/// Writes the log of rollbacks of the run in `folder`.
pub(super) fn write_rollbacks(folder: &Path, rollbacks: &[Rollback]) -> Result<()> {
    let line = |rollback| serde_json::to_string(rollback).expect("rollbacks are plain data") + "\n";
    let text: String = rollbacks.iter().map(line).collect();
    replace_file(&RealFs, &folder.join(ROLLBACKS), text.as_bytes())
}

/// Returns the rollbacks of the run in `folder` that precede the checkpoint of `progress`. The checkpoint holds earlier rollbacks. If the run
/// returned to the checkpoint after it was saved, all rollbacks until the last such return are included.
pub(super) fn history(folder: &Path, progress: &Progress) -> Result<Vec<Rollback>> {
    let known = &progress.sentinel.rollbacks;
    let mut all = read_rollbacks(folder)?;
    let last = all.iter().rposition(|rollback| rollback.to == progress.step);
    all.truncate(last.map_or(0, |last| last + 1));
    Ok(if all.starts_with(known) { all } else { known.clone() })
}

/// Writes the log of rollbacks of the run in `folder`, unless the log already equals `rollbacks`.
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
        // The run was killed right after the second rollback. The checkpoint to which this rollback returned was saved before the first one.
        assert_eq!(of(11, &[]), all);
        // The checkpoint was saved after both rollbacks.
        assert_eq!(of(13, &all), all);
        // The user resumes from a checkpoint that was saved before both rollbacks, or between them.
        assert_eq!(of(10, &[]), []);
        assert_eq!(of(12, &[]), all[..1]);
        assert_eq!(of(12, &all[..1]), all[..1]);
        keep_rollbacks(folder.path(), &all[..1]).unwrap();
        assert_eq!(of(11, &[]), []);
    }
}
