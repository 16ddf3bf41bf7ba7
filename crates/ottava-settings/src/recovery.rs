//! The table `[recovery]`: how a job goes on after the loss of a rank or a host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[recovery]` table: snapshots in the memory of hosts, from which a job goes on after it has lost a rank or a host. The launcher starts one process per
/// host, which starts one rank per GPU (`--gpus`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecoveryConfig {
    /// Steps between two snapshots; 0 takes no snapshots, and the job ends if it loses a rank. A snapshot takes the bytes of a checkpoint. Each host
    /// stores two snapshots of its ranks and two of another host.
    pub snapshot_steps: u64,
    /// The number of hosts that the launcher starts beyond the hosts that train. A spare host takes the place of a lost host.
    pub spares: u32,
    /// The smallest number of hosts with which the job goes on after a loss, if no spare host is left; 0 means all hosts that train. With fewer
    /// hosts, a step has the same rows and takes longer. Needs `training.global_batch_size`. torchrun calls it MIN in `--nnodes MIN:MAX`.
    pub min_hosts: u32,
    /// What happens to the host of a slow rank (`parallel.straggler_steps`): "warn" names it; "swap" also gives its place to a spare host after the
    /// next snapshot, if there is a spare host that is not slow.
    pub stragglers: Stragglers,
    /// Folder of a memory file system for the snapshots, on each host. Each run has a folder of its own in it.
    pub memory_dir: PathBuf,
    /// Number of recoveries without a new snapshot or checkpoint after which the job ends.
    pub max_recoveries: u32,
    /// Seconds without any message from a host, not even a heartbeat, after which the host counts as lost.
    pub silence_timeout: u64,
    /// Seconds that the job waits for missing hosts, at its start and after a loss.
    pub host_timeout: u64,
    /// Seconds within which hosts must fetch snapshots, and within which ranks must start and load their state.
    pub start_timeout: u64,
}

/// What happens to a host that is slower than the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stragglers {
    /// A warning names it.
    #[default]
    Warn,
    /// A spare host takes its place.
    Swap,
}

impl Default for RecoveryConfig {
    fn default() -> RecoveryConfig {
        RecoveryConfig {
            snapshot_steps: 0,
            spares: 0,
            min_hosts: 0,
            stragglers: Stragglers::default(),
            memory_dir: "/dev/shm".into(),
            max_recoveries: 5,
            silence_timeout: 10,
            host_timeout: 300,
            start_timeout: 1800,
        }
    }
}

impl RecoveryConfig {
    /// Returns whether the job goes on after the loss of a rank.
    pub fn is_on(&self) -> bool {
        self.snapshot_steps > 0
    }

    /// Returns whether a snapshot is due after `step`.
    pub fn is_due(&self, step: u64) -> bool {
        self.is_on() && step.is_multiple_of(self.snapshot_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_due_after_multiples() {
        let of = |snapshot_steps| RecoveryConfig { snapshot_steps, ..RecoveryConfig::default() };
        assert_eq!([1, 4, 5, 10].map(|step| of(5).is_due(step)), [false, false, true, true]);
        assert!(!of(0).is_due(5));
    }
}
