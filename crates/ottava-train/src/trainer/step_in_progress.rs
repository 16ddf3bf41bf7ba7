//! The step that a trainer is computing.

use super::report::StepReport;
use crate::objective::LoadedRows;
use ottava_common::error::Error;
use std::time::Instant;

/// A step in progress: the results that its phases leave for later phases.
pub(super) struct StepInProgress {
    pub(super) begin: Instant,
    pub(super) rows: LoadedRows,
    pub(super) report: StepReport,
    /// Whether the run keeps the checkpoint of this step as the best checkpoint.
    pub(super) is_best: bool,
    /// The reason why the run ends after this step, if it ends before its last step.
    pub(super) end: Option<Error>,
}

impl StepInProgress {
    /// Begins `step` of `max_steps`.
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
