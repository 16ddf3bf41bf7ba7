//! What a hub reports to a person.

use crate::message::{HostId, Step};

/// What a hub reports to a person.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Warning {
    /// A host is slower than the others.
    Slow(HostId),
    /// Hosts hang; the host that is behind, if it is known.
    Stuck(Option<HostId>),
    /// Both copies of some share are lost, so the job goes back to the checkpoint of this step.
    CopiesLost(Step),
    /// No spare came in time: the job goes on with fewer hosts.
    Shrunk(u32),
    /// The job cannot go on. The reason, as a sentence.
    Ended(&'static str),
}
