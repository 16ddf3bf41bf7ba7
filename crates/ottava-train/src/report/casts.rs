//! Writes `casts.jsonl`: statistics of each FP8 cast, one line every `cast_statistics_steps` steps.

use super::MetricsWriter;
use ottava_common::error::Result;
use ottava_recipe::scaling::{CastCounts, CastRecord};
use ottava_sentinel::LastLine;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Appends lines to a `casts.jsonl`.
///
/// A line holds:
/// * `step`: the last step whose casts are in the line
/// * `since`: the step after which its counts begin
/// * `casts`: the statistics of each cast, by name. `amax` and `scale` are of the last step, and `scale` is null if it is computed from the tensor.
///   `largest` is the largest finite value of the format. `elements`, `saturated`, `underflowed` and `non_finite` count since the step `since`:
///   elements, saturated elements, underflowed elements, and steps with an infinity.
pub struct CastLog {
    writer: MetricsWriter,
}

impl CastLog {
    /// Opens the log at `path`. If `resumed` holds a checkpoint and its step, restores the lines of earlier steps as [`MetricsWriter`] does. Returns
    /// `None` if `logs` is false, also after it has restored lines.
    pub fn open(path: &Path, resumed: Option<(&Path, u64)>, logs: bool) -> Result<Option<CastLog>> {
        Ok(MetricsWriter::optional(path, resumed, logs)?.map(|writer| CastLog { writer }))
    }

    /// Appends the line of `step`, which has just ended. `last` is the preceding line.
    pub fn append(&mut self, step: u64, last: &LastLine, now: &[CastRecord]) -> Result<()> {
        let casts: Map<String, Value> = now
            .iter()
            .zip(&last.counts)
            .map(|(CastRecord { name, largest, amax, scale, counts }, before)| {
                let CastCounts { elements, saturated, underflowed, non_finite } = counts.minus(*before);
                let fields = json!({
                    "amax": amax,
                    "scale": scale,
                    "largest": largest,
                    "elements": elements,
                    "saturated": saturated,
                    "underflowed": underflowed,
                    "non_finite": non_finite,
                });
                (name.clone(), fields)
            })
            .collect();
        self.writer.append(step, &[("since", json!(last.step)), ("casts", Value::Object(casts))])
    }

    /// Returns the path of the log.
    pub fn path(&self) -> &Path {
        self.writer.path()
    }

    /// Flushes the log to the disk.
    pub fn sync(&mut self) -> Result<()> {
        self.writer.sync()
    }
}
