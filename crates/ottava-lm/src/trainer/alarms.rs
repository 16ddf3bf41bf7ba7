//! The detectors of a run's alarms.

use super::files::CASTS;
use super::start::Losses;
use crate::config::RunConfig;
use crate::error::Result;
use crate::report::CastTable;
use crate::scaling::{CastCounts, CastRecord};
use crate::sentinel::{CastDetector, CastFinding, SeenCast, SpikeDetector};

/// The detectors of a run.
pub(super) struct Alarms {
    pub(super) loss: SpikeDetector,
    pub(super) grad_norm: SpikeDetector,
    casts: CastDetector,
    /// What each cast had counted when it was last seen.
    counted: Vec<CastCounts>,
}

impl Alarms {
    /// Detectors that have seen the losses and gradient norms of the steps so far, and the lines of the log of casts. Counts up to `now` belong
    /// to no further line.
    pub(super) fn new(config: &RunConfig, losses: &Losses, grad_norms: &Losses, now: &[CastRecord]) -> Result<Alarms> {
        let alarms = &config.alarms;
        let (window, threshold) = (alarms.spike_window, alarms.spike_threshold);
        let with = |mut detector: SpikeDetector, seen: &Losses| {
            let first = seen.len().saturating_sub(alarms.spike_window);
            for (_, value) in &seen[first..] {
                detector.see(*value);
            }
            detector
        };
        let mut casts = CastDetector::new(alarms.cast_bounds());
        let log = config.output_dir.join(CASTS);
        if log.is_file() && config.training.cast_statistics_steps > 0 {
            for line in CastTable::read(&log)?.seen() {
                casts.see(&line);
            }
        }
        let counted = now.iter().map(|record| record.counts).collect();
        let loss = with(SpikeDetector::of_losses(window, threshold), losses);
        let grad_norm = with(SpikeDetector::of_norms(window, threshold), grad_norms);
        Ok(Alarms { loss, grad_norm, casts, counted })
    }

    /// What the statistics of casts since the last call have that is out of the ordinary.
    pub(super) fn see_casts(&mut self, now: &[CastRecord]) -> Vec<CastFinding> {
        let seen = SeenCast::since(&self.counted, now);
        self.counted = now.iter().map(|record| record.counts).collect();
        self.casts.see(&seen)
    }
}
