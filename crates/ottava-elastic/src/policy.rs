//! The settings of a hub.

/// What the hub does about a host that is slower than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Straggler {
    /// Name the host.
    Warn,
    /// Name the host, and give its place to a spare at the next sealed step.
    Swap,
}

/// The settings of a hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The numbers of hosts with which the job can run, the largest first. A job that must not shrink has one.
    pub sizes: Vec<u32>,
    /// The number of hosts that the launcher starts, spares included. A new hub waits for so many hosts.
    pub hosts: u32,
    /// The number of hosts that must be connected before an epoch is formed. The hub that replaces a lost one needs more than half of all hosts, so the
    /// two halves of a divided network do not both train.
    pub quorum: u32,
    /// Whether hosts have snapshots in memory. If not, each epoch starts from a checkpoint on disk.
    pub snapshots: bool,
    /// What to do about a slow host.
    pub straggler: Straggler,
    /// The number of recoveries without a new snapshot that all places have sealed, and without a new checkpoint, after which the job ends.
    pub most_recoveries: u32,
}
