//! The detectors of spikes of a run.

use super::start::Losses;
use crate::config::AlarmsConfig;
use crate::sentinel::SpikeDetector;

/// The detectors of a run.
pub(super) struct Alarms {
    pub(super) loss: SpikeDetector,
    pub(super) grad_norm: SpikeDetector,
}

impl Alarms {
    /// Detectors that have seen the losses and gradient norms of the steps so far.
    pub(super) fn new(config: &AlarmsConfig, losses: &Losses, grad_norms: &Losses) -> Alarms {
        let detector = |seen: &Losses| {
            let mut detector = SpikeDetector::new(config.spike_window, config.spike_threshold);
            let first = seen.len().saturating_sub(config.spike_window);
            for (_, value) in &seen[first..] {
                detector.see(*value);
            }
            detector
        };
        Alarms { loss: detector(losses), grad_norm: detector(grad_norms) }
    }
}
