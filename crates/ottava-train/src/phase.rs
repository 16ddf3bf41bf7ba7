//! The phases of a run, in their order. The trainer goes through these lists with data (`Trainer::walk`), and a plan goes through them on a device
//! without data (`plan/memory.rs`). So a plan cannot use another order or miss a phase.
//!
//! [`Passes`] and [`Check`] describe what a phase computes besides the step. The objective lists its passes, and the settings choose the checks.

use ottava_recipe::mode::Pass;
use ottava_settings::RunConfig;

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The reference model computes the log-probabilities of all rows.
    Reference,
    /// The loss of held-out rows is computed before the first step.
    FirstEvaluation,
    /// The rows of a step are loaded. An objective may generate them with the model, and may run passes over them.
    Rows,
    /// Observers check the loaded rows, if a check is due.
    Checks,
    /// Forward, backward and the update run.
    Update,
    /// The loss of held-out rows is computed, if an evaluation is due. The metrics of the step are written.
    Evaluation,
    /// The statistics of casts are logged, if they are due.
    Statistics,
    /// A checkpoint is saved, if one is due.
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
    /// `Phase::Reference`, `Phase::Rows` or `Phase::Evaluation`. Passes of `Phase::Evaluation` also run in `Phase::FirstEvaluation`.
    pub phase: Phase,
    /// `Pass::Evaluation` or `Pass::Reference`.
    pub pass: Pass,
    /// The number of micro-batches.
    pub micro_batches: usize,
    /// The number of rows of a micro-batch.
    pub rows: usize,
}

impl Passes {
    /// Returns the passes of an evaluation that computes losses of rows.
    pub fn of_evaluation(config: &RunConfig) -> Passes {
        Passes {
            phase: Phase::Evaluation,
            pass: Pass::Evaluation,
            micro_batches: config.parallel.pipeline,
            rows: config.evaluation_rows(),
        }
    }
}

/// A check of `Phase::Checks`, which runs passes over the first micro-batch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// The sentinel compares the recipe with BF16.
    Comparison,
    /// Tensors are recorded, as `[debug]` requests.
    Tensors,
    /// Passes are computed twice, and their results are compared.
    Repetition,
}

impl Check {
    /// Returns the checks of the run of `config`, in their order.
    pub fn of(config: &RunConfig) -> Vec<Check> {
        let all = [
            (Check::Comparison, config.sentinel.sentinel_steps > 0),
            (Check::Tensors, !config.debug.debug_steps.is_empty()),
            (Check::Repetition, config.sentinel.repeat_steps > 0),
        ];
        all.into_iter().filter_map(|(check, is_on)| is_on.then_some(check)).collect()
    }
}
