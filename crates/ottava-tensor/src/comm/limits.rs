//! How long ranks wait for each other.

use std::time::Duration;

/// Heartbeats per limit.
const HEARTBEATS: u32 = 4;

/// Longest time between heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(5);

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until all ranks have joined.
    pub join: Duration,
    /// Until a rank whose process sends nothing counts as lost. Processes send four heartbeats in that time, or more, whatever they compute.
    pub silence: Duration,
    /// Until a rank that lives, but neither comes to a collective nor [reports progress](super::report_progress), fails the group; and until
    /// a GPU that does not end its work does. Much longer than a step.
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
