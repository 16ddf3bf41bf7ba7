//! `rollbacks.jsonl`: each return of a run to an earlier checkpoint.

use crate::checkpoint::Progress;
use crate::error::{Error, Result};
use crate::fs::{RealFs, replace_file};
use crate::input;
use crate::report::MAX_METRICS_BYTES;
use crate::sentinel::Rollback;
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

/// The rollbacks to the checkpoint of `progress` in the run's `folder` that happened after it was saved.
pub(super) fn later_rollbacks(folder: &Path, progress: &Progress) -> Result<Vec<Rollback>> {
    let known = &progress.sentinel.rollbacks;
    let later = |rollback: &Rollback| rollback.to == progress.step && !known.contains(rollback);
    Ok(read_rollbacks(folder)?.into_iter().filter(later).collect())
}

/// Removes rollbacks to checkpoints after `step`, from which the run goes on.
pub(super) fn forget_rollbacks_after(folder: &Path, step: u64) -> Result<()> {
    let mut all = read_rollbacks(folder)?;
    let count = all.len();
    all.retain(|rollback| rollback.to <= step);
    if all.len() == count { Ok(()) } else { write_rollbacks(folder, &all) }
}
