//! How long ranks wait for each other.

use std::time::Duration;

/// Heartbeats per limit.
const HEARTBEATS: u32 = 4;

/// Longest time between heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(5);

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time within which all ranks must join.
    pub join: Duration,
    /// Time without messages after which a rank counts as lost. Processes send at least four heartbeats in this time, also while they
    /// compute.
    pub silence: Duration,
    /// Time after which the job fails if a live rank neither calls an open collective nor [reports progress](super::report_progress), or if
    /// a host still waits for its GPU. This time is much longer than a step.
    pub collective: Duration,
}

impl Limits {
    /// Time between heartbeats.
    pub(super) fn heartbeat(&self) -> Duration {
        (self.silence.min(self.collective) / HEARTBEATS).min(LONGEST_INTERVAL)
    }
}

impl Default for Limits {
    /// 300 s to join, 60 s of silence, 600 s between collectives.
    fn default() -> Limits {
        let [join, silence, collective] = [300, 60, 600].map(Duration::from_secs);
        Limits { join, silence, collective }
    }
}
