//! `casts.jsonl`: statistics of each FP8 cast, a line every `cast_statistics_steps` steps.

use super::MetricsWriter;
use crate::error::Result;
use crate::scaling::{CastCounts, CastRecord};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Appends to a `casts.jsonl`.
///
/// A line holds its `step`, the step `since` which it counts, and under `casts` for each cast by name: `amax` and `scale` of that step
/// (`scale` is null for scales that follow from the tensor), the `largest` finite value of its format, and since then the numbers of
/// elements, of saturated and of underflowed ones, and of steps with an infinity.
pub struct CastLog {
    writer: MetricsWriter,
    since: u64,
    counted: Vec<CastCounts>,
}

impl CastLog {
    /// Opens the log at `path`, of a new run or of one that continues after the checkpoint and step in `resumed`, with the lines that
    /// [`MetricsWriter`] would keep. Counts up to `now` belong to no line. `None`, after lines of earlier steps are restored, when `logs`
    /// is false or there are no casts.
    pub fn open(path: &Path, resumed: Option<(&Path, u64)>, now: &[CastRecord], logs: bool) -> Result<Option<CastLog>> {
        let logs = logs && !now.is_empty();
        let writer = MetricsWriter::optional(path, resumed, logs)?;
        let (since, counted) = (resumed.map_or(0, |(_, step)| step), now.iter().map(|record| record.counts).collect());
        Ok(writer.map(|writer| CastLog { writer, since, counted }))
    }

    /// Appends the line of `step`, which has just ended.
    pub fn append(&mut self, step: u64, now: &[CastRecord]) -> Result<()> {
        let casts: Map<String, Value> = now
            .iter()
            .zip(&self.counted)
            .map(|(CastRecord { name, largest, amax, scale, counts }, before)| {
                let fields = json!({
                    "amax": amax,
                    "scale": scale,
                    "largest": largest,
                    "elements": counts.elements - before.elements,
                    "saturated": counts.saturated - before.saturated,
                    "underflowed": counts.underflowed - before.underflowed,
                    "non_finite": counts.non_finite - before.non_finite,
                });
                (name.clone(), fields)
            })
            .collect();
        self.writer.append(step, &[("since", json!(self.since)), ("casts", Value::Object(casts))])?;
        self.since = step;
        self.counted = now.iter().map(|record| record.counts).collect();
        Ok(())
    }

    /// Flushes to the disk.
    pub fn sync(&mut self) -> Result<()> {
        self.writer.sync()
    }
}
