//! What a pass through a model is for, and what its products read: values in the [`Context`](crate::context::Context).
//!
//! A `Mode` has two parts: the purpose of a pass (training, evaluation, inference, recomputation and others in `Pass`), and whether products read
//! codes or the compute type (`StepPrecision`). Evaluation and generation have no effect on a run: their casts write statistics to a separate
//! buffer that nothing reads, and only `ScalingState::update` changes scales.
//!
//! For example, `Decoder::forward_only` of an evaluation uses `Mode::evaluation`, whose statistics are unread, and a `KvCache` has a `Recorder` of
//! its own.

/// The purpose of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward of a step: casts are measured, and forward saves what backward needs.
    Training,
    /// Forward alone: saves nothing, and its measurements do not reach the run.
    Evaluation,
    /// As evaluation, but without adapters: forward of the model that adapters are trained beside.
    Reference,
    /// Forward of tokens of several requests: as evaluation, and no operand is scaled by what other requests have.
    Inference,
    /// Forward and backward that are compared between precisions: no measurement and no gradient reaches the run.
    Comparison,
    /// Forward of a block, recomputed in backward: saves like training, but does not measure again.
    Recomputation,
}

/// What the products of a step read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StepPrecision {
    /// The formats of the recipe.
    #[default]
    Recipe,
    /// The compute type everywhere. What the recipe would cast is measured, so histories and scales stay up to date.
    High,
}

/// The mode of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The purpose of the pass.
    pub pass: Pass,
    /// What its products read.
    pub precision: StepPrecision,
}

impl Mode {
    /// Forward without backward, in the recipe's precision.
    pub const EVALUATION: Mode = Mode::evaluation(StepPrecision::Recipe);
    /// Forward and backward, in the recipe's precision.
    pub const TRAINING: Mode = Mode { pass: Pass::Training, precision: StepPrecision::Recipe };

    /// Forward of tokens of several requests, in the recipe's precision.
    pub const INFERENCE: Mode = Mode { pass: Pass::Inference, precision: StepPrecision::Recipe };

    /// Forward and backward in this precision.
    pub fn training(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Training, precision }
    }

    /// Forward without backward, in this precision.
    pub const fn evaluation(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Evaluation, precision }
    }

    /// Forward without backward and without adapters, in this precision.
    pub const fn reference(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Reference, precision }
    }

    /// The mode in which backward recomputes a forward of this mode.
    pub fn recomputation(self) -> Mode {
        Mode { pass: Pass::Recomputation, ..self }
    }

    /// Whether backward follows.
    pub fn keeps(self) -> bool {
        matches!(self.pass, Pass::Training | Pass::Recomputation | Pass::Comparison)
    }

    /// Whether casts count for the run's statistics.
    pub fn measures(self) -> bool {
        self.pass == Pass::Training
    }

    /// Whether adapters add to the products of linears.
    pub fn adapts(self) -> bool {
        self.pass != Pass::Reference
    }

    /// Whether all products read the compute type.
    pub fn is_high_precision(self) -> bool {
        self.precision == StepPrecision::High
    }
}
