//! The passes that an objective runs beside the steps.

use ottava_recipe::mode::Pass;

/// A pass without gradients that an objective runs beside the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// When it runs.
    pub when: When,
    /// `Pass::Evaluation` or `Pass::Reference`.
    pub pass: Pass,
    /// Its micro-batches.
    pub micro_batches: usize,
    /// Rows of each of them.
    pub rows: usize,
}

/// When a phase runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the first step.
    BeforeTraining,
    /// Before each step, with the step loaded.
    BeforeEachStep,
    /// In each evaluation.
    Evaluation,
}
