//! What a pass through a model is for, and what its products read: values that travel in the [`Context`](crate::context::Context).

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward of a step: casts are measured, and forward keeps what backward needs.
    Training,
    /// Forward alone: nothing is kept, and no measurement reaches the run.
    Evaluation,
    /// Forward of a block once more, within backward: kept like training, but not measured a second time.
    Recomputation,
}

/// What the products of a step read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StepPrecision {
    /// What the recipe says.
    #[default]
    Recipe,
    /// The compute type everywhere. What the recipe would cast is measured, so histories and scales stay up to date.
    High,
}

/// The mode of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// What the pass is for.
    pub pass: Pass,
    /// What its products read.
    pub precision: StepPrecision,
}

impl Mode {
    /// Forward without backward, by the recipe.
    pub const EVALUATION: Mode = Mode::evaluation(StepPrecision::Recipe);
    /// Forward and backward, by the recipe.
    pub const TRAINING: Mode = Mode { pass: Pass::Training, precision: StepPrecision::Recipe };

    /// Forward and backward in this precision.
    pub fn training(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Training, precision }
    }

    /// Forward without backward, in this precision.
    pub const fn evaluation(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Evaluation, precision }
    }

    /// The mode in which backward runs a forward of this mode again.
    pub fn recomputation(self) -> Mode {
        Mode { pass: Pass::Recomputation, ..self }
    }

    /// Whether backward follows.
    pub fn keeps(self) -> bool {
        self.pass != Pass::Evaluation
    }

    /// Whether casts count for the run's statistics.
    pub fn measures(self) -> bool {
        self.pass == Pass::Training
    }

    /// Whether all products read the compute type.
    pub fn is_high_precision(self) -> bool {
        self.precision == StepPrecision::High
    }
}
