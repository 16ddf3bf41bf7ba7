//! The phases of a run, in their order. The trainer walks these lists with data (`Trainer::walk`), and a plan walks them on a device without data
//! (`plan/memory.rs`). So a plan has no order of its own, and no phase is missing from it.
//!
//! [`Passes`] and [`Check`] say what a phase computes besides the step: an objective lists its passes, and the settings choose the checks.

use ottava_recipe::mode::Pass;
use ottava_settings::RunConfig;

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The log-probabilities of all rows by a reference model.
    Reference,
    /// The loss of held-out rows before the first step.
    FirstEvaluation,
    /// The rows of a step are loaded. An objective may make them by the model, and run passes over them.
    Rows,
    /// Observers check the loaded rows, where that is due.
    Checks,
    /// Forward, backward and update.
    Update,
    /// The loss of held-out rows after a step, where it is due. The metrics of the step are written.
    Evaluation,
    /// The statistics of casts are logged, where they are due.
    Statistics,
    /// A checkpoint is saved, where it is due.
    Save,
}

impl Phase {
    /// The phases before the first step of a process.
    pub const BEFORE_STEPS: [Phase; 2] = [Phase::Reference, Phase::FirstEvaluation];

    /// The phases of each step.
    pub const OF_STEP: [Phase; 6] =
        [Phase::Rows, Phase::Checks, Phase::Update, Phase::Evaluation, Phase::Statistics, Phase::Save];
}

/// Passes without gradients that an objective runs in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// `Phase::Reference`, `Phase::Rows` or `Phase::Evaluation`; passes of evaluations run in the first evaluation too.
    pub phase: Phase,
    /// `Pass::Evaluation` or `Pass::Reference`.
    pub pass: Pass,
    /// Their micro-batches.
    pub micro_batches: usize,
    /// Rows of a micro-batch.
    pub rows: usize,
}

/// A check of `Phase::Checks`, which runs passes of the first micro-batch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// The sentinel compares the recipe with BF16.
    Comparison,
    /// Tensors are recorded for `[debug]`.
    Tensors,
    /// Passes are computed twice.
    Repetition,
}

impl Check {
    /// The checks of the run of `config`, in their order.
    pub fn of(config: &RunConfig) -> Vec<Check> {
        let all = [
            (Check::Comparison, config.sentinel.sentinel_steps > 0),
            (Check::Tensors, !config.debug.debug_steps.is_empty()),
            (Check::Repetition, config.sentinel.repeat_steps > 0),
        ];
        all.into_iter().filter_map(|(check, is_on)| is_on.then_some(check)).collect()
    }
}
