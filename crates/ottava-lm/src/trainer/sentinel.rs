//! What a run keeps of its sentinel between steps.

use crate::sentinel::SentinelState;
use std::collections::BTreeSet;

/// The sentinel of a run.
#[derive(Default)]
pub(super) struct Sentinel {
    /// The decisions so far.
    pub(super) state: SentinelState,
    /// The linears whose products read BF16 operands now.
    pub(super) demoted: BTreeSet<String>,
    /// Why the run ends after the step in progress.
    pub(super) pause: Option<String>,
    /// Why the run goes back to an earlier checkpoint after the step in progress.
    pub(super) rollback: Option<String>,
    /// Why the run ends after the step in progress, without a checkpoint.
    pub(super) stop: Option<String>,
}

impl Sentinel {
    /// That of a run that continues with these decisions.
    pub(super) fn new(state: SentinelState) -> Sentinel {
        Sentinel { state, ..Sentinel::default() }
    }
}
