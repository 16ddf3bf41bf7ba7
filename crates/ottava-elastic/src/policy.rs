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
    /// The number of hosts that must be connected before an epoch is formed: [`Policy::quorum_of_first_hub`] or [`Policy::quorum_of_later_hub`].
    pub quorum: u32,
    /// Whether hosts have snapshots in memory. If not, each epoch starts from a checkpoint on disk.
    pub snapshots: bool,
    /// What to do about a slow host.
    pub straggler: Straggler,
    /// The number of recoveries without a new snapshot that all places have sealed, and without a new checkpoint, after which the job ends.
    pub most_recoveries: u32,
}

impl Policy {
    /// Returns the number of `hosts` that the first hub of a job needs: half of them, rounded up. Then too few others are left for a later hub, so the parts of a
    /// divided network do not both train.
    pub const fn quorum_of_first_hub(hosts: u32) -> u32 {
        hosts.div_ceil(2)
    }

    /// Returns the number of `hosts` that a hub needs that replaces a lost one, or one that only cannot be reached: more than half of them.
    pub const fn quorum_of_later_hub(hosts: u32) -> u32 {
        hosts / 2 + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_of_a_network_never_both_have_enough_hosts() {
        for hosts in 1..200 {
            let [first, later] = [Policy::quorum_of_first_hub(hosts), Policy::quorum_of_later_hub(hosts)];
            for part in 0..=hosts {
                let other = hosts - part;
                assert!(part < first || other < later, "the first hub with {part} of {hosts} hosts");
                assert!(part < later || other < later, "two later hubs, with {part} of {hosts} hosts");
            }
            assert!(hosts >= first && hosts >= later && later - first <= 1, "no more hosts than needed");
        }
    }
}
