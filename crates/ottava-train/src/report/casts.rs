//! `casts.jsonl`: statistics of each FP8 cast, a line every `cast_statistics_steps` steps.

use super::MetricsWriter;
use ottava_common::error::Result;
use ottava_recipe::scaling::{CastCounts, CastRecord};
use ottava_sentinel::LastLine;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Appends to a `casts.jsonl`.
///
/// A line holds its `step`, the step `since` which it counts, and under `casts` for each cast by name: `amax` and `scale` of that step
/// (`scale` is null for scales that follow from the tensor), the `largest` finite value of its format, and since then the numbers of
/// elements, of saturated and of underflowed ones, and of steps with an infinity.
pub struct CastLog {
    writer: MetricsWriter,
}

impl CastLog {
    /// Opens the log at `path`, of a new run or of one that continues after the checkpoint and step in `resumed`, with the lines that
    /// [`MetricsWriter`] would keep. `None`, after lines of earlier steps are restored, when `logs` is false.
    pub fn open(path: &Path, resumed: Option<(&Path, u64)>, logs: bool) -> Result<Option<CastLog>> {
        Ok(MetricsWriter::optional(path, resumed, logs)?.map(|writer| CastLog { writer }))
    }

    /// Appends the line of `step`, which has just ended, after the line `last`.
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

    /// Flushes to the disk.
    pub fn sync(&mut self) -> Result<()> {
        self.writer.sync()
    }
}
