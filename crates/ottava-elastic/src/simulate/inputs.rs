//! What a simulation is told: failures, times and policies.

use crate::Straggler;
use serde::Serialize;

/// What a failure takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// A worker process. Its host stays.
    Process,
    /// A host, until it is repaired.
    Host,
}

/// A kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cause {
    /// The kind, in words.
    pub name: &'static str,
    /// The number of failures per 1,000 GPUs and day.
    pub per_1000_gpu_days: f64,
    /// What the failure takes.
    pub scope: Scope,
}

/// Slow hosts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stragglers {
    /// The number of hosts that become slow per 1,000 GPUs and day.
    pub per_1000_gpu_days: f64,
    /// The time of a step with a slow host, relative to the time without.
    pub slowdown: f64,
    /// The seconds until a host that is slow is noticed.
    pub notice: f64,
    /// The seconds for which a host stays slow.
    pub lasts: f64,
}

/// Checkpoints on disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Saves {
    /// The seconds of training between two checkpoints.
    pub interval: f64,
    /// The seconds for which training pauses for a checkpoint.
    pub pause: f64,
    /// The seconds until a checkpoint is complete on disk.
    pub write: f64,
}

/// Snapshots in the memory of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Snapshots {
    /// The number of steps between two snapshots.
    pub every: u64,
    /// The seconds until a snapshot is copied to the next host.
    pub seal: f64,
    /// The share of the time of training that snapshots take.
    pub cost: f64,
}

/// Times in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// From a failure until the hub knows of it.
    pub detect: f64,
    /// Between two hosts, for a message.
    pub latency: f64,
    /// To fetch shares from the memory of another host.
    pub fetch: f64,
    /// To load a checkpoint.
    pub load: f64,
    /// From the start of the workers to the first step.
    pub start: f64,
    /// The time for which the hub waits for a host to take a lost place.
    pub wait: f64,
    /// From the end of a job, or the loss of the hub, until the launcher has started it again.
    pub relaunch: f64,
    /// From the loss of a host until it is repaired and joins as a spare.
    pub repair: f64,
}

/// The inputs of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inputs {
    /// The number of hosts that train.
    pub hosts: u32,
    /// The number of spare hosts.
    pub spares: u32,
    /// The GPUs of a host.
    pub gpus_per_host: u32,
    /// The smallest number of hosts with which the job may go on; `hosts` if it may not shrink.
    pub smallest: u32,
    /// The kinds of failures.
    pub causes: Vec<Cause>,
    /// The least and the most seconds between two failures, with a uniform distribution in between; `None` for an exponential distribution with
    /// the mean of `causes`.
    pub apart: Option<[f64; 2]>,
    /// The share of the losses of hosts that also take the next host.
    pub in_pairs: f64,
    /// Slow hosts, if there are any.
    pub stragglers: Option<Stragglers>,
    /// What to do about a slow host.
    #[serde(skip)]
    pub policy: Straggler,
    /// The seconds of a step.
    pub step: f64,
    /// Checkpoints on disk.
    pub saves: Saves,
    /// Snapshots in memory; `None` if a failure goes back to a checkpoint.
    pub snapshots: Option<Snapshots>,
    /// Times.
    pub times: Times,
    /// The simulated days.
    pub days: f64,
}

impl Inputs {
    /// Returns the number of GPUs that train.
    pub fn gpus(&self) -> u32 {
        self.hosts * self.gpus_per_host
    }

    /// Returns the mean seconds between failures of the hosts that train.
    pub fn mean_time_between_failures(&self) -> f64 {
        let per_1000_gpu_days: f64 = self.causes.iter().map(|cause| cause.per_1000_gpu_days).sum();
        DAY / (per_1000_gpu_days / 1000.0 * f64::from(self.gpus()))
    }
}

/// The seconds of a day.
pub const DAY: f64 = 86_400.0;
