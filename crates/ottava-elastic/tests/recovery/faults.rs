//! The moves and faults of a small job.

use ottava_elastic::{HostId, Policy, Step};

/// A job and its faults.
#[derive(Clone, Debug)]
pub struct Settings {
    pub policy: Policy,
    /// A snapshot is due after each step that is a multiple of this.
    pub interval: Step,
    /// A checkpoint on disk is complete after each step that is a multiple of this.
    pub save_steps: Step,
    /// The job ends after this step.
    pub last: Step,
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// The hub handles the next event of a host.
    ToHub(HostId),
    /// A host handles the next event of its connection to the hub.
    ToKeeper(HostId),
    /// A host handles the next message of another host.
    ToPeer(HostId, HostId),
    /// The process of a keeper finishes its next task.
    Task(HostId),
    /// The workers of all members complete a step.
    Step,
    /// A new hub starts.
    NewHub,
    /// The hub waits no longer.
    Timeout,
    /// A silent host is heard again.
    Heard(HostId),
    /// The hub waits no longer for a silent host.
    StaysSilent(HostId),
    Fault(Fault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A host is lost. The messages that it sent may be lost as well.
    Host(HostId, bool),
    /// A worker process ends.
    Worker(HostId),
    /// The hub ends, without its host.
    Hub,
    /// A host and the hub are lost at once.
    HostAndHub(HostId),
    /// A host and the host with its copies are lost at once.
    Pair(HostId),
    /// The hub sees no heartbeats of a host that lives.
    Silent(HostId),
    /// A host that was lost starts again.
    Return(HostId),
    /// The bytes of a share are damaged, and a check finds it.
    Damage(HostId),
    /// The bytes of the newest share are damaged, and only its next reader finds it.
    Corrupt(HostId),
    /// A host is slow.
    Slow(HostId),
    /// No step ends.
    Stuck(HostId),
    /// The hub times out although messages are under way.
    EarlyTimeout,
}
