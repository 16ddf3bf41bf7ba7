//! The detectors of a run's alarms.

use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, CastDetector, CastFinding, LastLine, SeenCast, SpikeDetector};
use ottava_settings::RunConfig;

/// The detectors of a run.
pub(super) struct Alarms {
    pub(super) loss: SpikeDetector,
    pub(super) grad_norm: SpikeDetector,
    casts: CastDetector,
    /// The last line of the log of casts, after which alarms count.
    pub(super) last_line: LastLine,
}

impl Alarms {
    /// Detectors that go on from `memory`. Counts of casts up to `now` belong to no line.
    pub(super) fn new(config: &RunConfig, memory: &AlarmMemory, now: &[CastRecord]) -> Alarms {
        let (window, threshold) = (config.alarms.spikes.spike_window, config.alarms.spikes.spike_threshold);
        Alarms {
            loss: SpikeDetector::of_losses(window, threshold).after(&memory.losses),
            grad_norm: SpikeDetector::of_norms(window, threshold).after(&memory.grad_norms),
            casts: CastDetector::new(config.alarms.cast_bounds(), memory.casts.clone()),
            last_line: LastLine::before(&memory.counted, now),
        }
    }

    /// What the detectors have seen, and what casts have counted up to `now`.
    pub(super) fn memory(&self, now: &[CastRecord]) -> AlarmMemory {
        AlarmMemory {
            losses: self.loss.values().clone(),
            grad_norms: self.grad_norm.values().clone(),
            casts: self.casts.history().clone(),
            counted: self.last_line.until(now),
        }
    }

    /// What is out of the ordinary in the statistics of casts since the last line. `now` is the line of `step`.
    pub(super) fn see_casts(&mut self, step: u64, now: &[CastRecord]) -> Vec<CastFinding> {
        let seen = SeenCast::since(&self.last_line.counts, now);
        self.last_line = LastLine { step, counts: now.iter().map(|record| record.counts).collect() };
        self.casts.see(&seen)
    }
}
