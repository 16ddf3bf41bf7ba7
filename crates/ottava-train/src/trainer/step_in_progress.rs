//! The step that a trainer takes.

use super::report::StepReport;
use crate::objective::LoadedRows;
use ottava_common::error::Error;
use std::time::Instant;

/// A step in progress: what its phases leave for later phases.
pub(super) struct StepInProgress {
    pub(super) begin: Instant,
    pub(super) rows: LoadedRows,
    pub(super) report: StepReport,
    /// Whether the run keeps the checkpoint of the step as the best one.
    pub(super) is_best: bool,
    /// Why the run ends after the step although steps are left.
    pub(super) end: Option<Error>,
}

impl StepInProgress {
    /// The beginning of `step` of `max_steps`.
    pub(super) fn begin(step: u64, max_steps: u64) -> StepInProgress {
        StepInProgress {
            begin: Instant::now(),
            rows: LoadedRows::default(),
            report: StepReport { step, max_steps, ..StepReport::default() },
            is_best: false,
            end: None,
        }
    }
}
