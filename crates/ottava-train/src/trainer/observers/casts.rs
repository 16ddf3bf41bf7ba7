//! The log of the statistics of casts, and its alarms.

use super::contract::{Alarm, Observer, Watched, listed};
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, CastBounds, CastDetector, LastLine, SeenCast};

/// Logs the statistics of casts, and looks for casts whose statistics since the last line are out of the ordinary.
pub(super) struct Casts {
    detector: CastDetector,
    last_line: LastLine,
}

impl Casts {
    /// Counts of casts up to `now` belong to no line.
    pub(super) fn new(bounds: CastBounds, memory: &AlarmMemory, now: &[CastRecord]) -> Casts {
        Casts {
            detector: CastDetector::new(bounds, memory.casts.clone()),
            last_line: LastLine::before(&memory.counted, now),
        }
    }
}

impl Observer for Casts {
    fn statistics(&mut self, step: u64, casts: &[CastRecord], watched: &mut Watched) -> Result<()> {
        if let Some(log) = watched.files.as_mut().and_then(|files| files.casts.as_mut()) {
            log.append(step, &self.last_line, casts)?;
        }
        let found = self.detector.see(&SeenCast::since(&self.last_line.counts, casts));
        self.last_line = LastLine { step, counts: casts.iter().map(|record| record.counts).collect() };
        let policy = watched.environment.config.alarms.casts;
        for of_alarm in found.chunk_by(|a, b| a.alarm == b.alarm) {
            let tensors: Vec<_> = of_alarm.iter().map(|finding| finding.name.as_str()).collect();
            let value = of_alarm.iter().map(|finding| finding.value).fold(f64::NEG_INFINITY, f64::max);
            let (name, text) = (of_alarm[0].alarm.as_str(), listed(of_alarm, "casts"));
            watched.raise(step, policy.into(), Alarm { name, tensors: &tensors, value, text })?;
        }
        Ok(())
    }

    fn remember(&self, casts: &[CastRecord], memory: &mut AlarmMemory) {
        memory.casts = self.detector.history().clone();
        memory.counted = self.last_line.until(casts);
    }
}
