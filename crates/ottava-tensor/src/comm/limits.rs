//! The times that ranks wait for each other.

use std::time::Duration;

/// The minimum number of heartbeats per limit.
const HEARTBEATS: u32 = 4;

/// The maximum time between heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(5);

/// The times that ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The time within which all ranks must join.
    pub join: Duration,
    /// The time without messages after which a rank is lost. Processes send at least four heartbeats in this time, even while they
    /// compute.
    pub silence: Duration,
    /// The time after which the job fails if a live rank neither calls an open collective nor [reports progress](super::report_progress), or if
    /// a host still waits for its GPU. It must be much longer than a step.
    pub collective: Duration,
}

impl Limits {
    /// Returns the time between heartbeats.
    pub(super) fn heartbeat(&self) -> Duration {
        (self.silence.min(self.collective) / HEARTBEATS).min(LONGEST_INTERVAL)
    }
}

impl Default for Limits {
    /// Returns 300 s to join, 60 s of silence, and 600 s between collectives.
    fn default() -> Limits {
        let [join, silence, collective] = [300, 60, 600].map(Duration::from_secs);
        Limits { join, silence, collective }
    }
}
