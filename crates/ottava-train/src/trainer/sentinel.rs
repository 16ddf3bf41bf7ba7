//! What a run's sentinel and alarms ask for within a step.

use std::collections::BTreeSet;

/// What follows from a step. Nothing of it outlives the step but `demoted`, which follows from the decisions in
/// [`Progress`](ottava_checkpoint::Progress).
#[derive(Default)]
pub(super) struct Sentinel {
    /// The linears whose products read BF16 operands now.
    pub(super) demoted: BTreeSet<String>,
    /// Why the run ends after the step in progress.
    pub(super) pause: Option<String>,
    /// Why the run goes back to an earlier checkpoint after the step in progress.
    pub(super) rollback: Option<String>,
    /// Why the run ends after the step in progress, without a checkpoint.
    pub(super) stop: Option<String>,
}
