//! The purpose of a pass through a model, and what its products read: values in the [`Context`](crate::context::Context).
//!
//! A `Mode` has two parts: the purpose of a pass (`Pass`), and whether products read codes or the compute type (`StepPrecision`). Evaluation and
//! generation have no effect on a run: their casts write statistics to a separate buffer that nothing reads, and only `ScalingState::update` changes
//! scales.
//!
//! For example, `Decoder::forward_only` of an evaluation uses `Mode::evaluation`, whose statistics are not read. A `KvCache` has a separate
//! `Recorder`.

/// The purpose of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward of a step. Casts are measured, and forward saves the values for backward.
    Training,
    /// Only forward. It saves nothing, and its measurements do not reach the run.
    Evaluation,
    /// Evaluation without adapters, which gives the results of the frozen model.
    Reference,
    /// Forward of tokens of several requests. It is like evaluation, but the scale of an operand does not depend on other requests.
    Inference,
    /// Forward and backward in two precisions for comparison. Neither measurements nor gradients reach the run.
    Comparison,
    /// Forward of a block that backward recomputes. It saves like training, but does not measure again.
    Recomputation,
}

/// The data that the products of a step read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StepPrecision {
    /// The formats of the recipe.
    #[default]
    Recipe,
    /// The compute type in all products. Operands that the recipe would cast are measured, so histories and scales stay up to date.
    High,
}

/// The mode of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The purpose of the pass.
    pub pass: Pass,
    /// The data that the products of the pass read.
    pub precision: StepPrecision,
}

impl Mode {
    /// The mode of forward without backward, in the recipe's precision.
    pub const EVALUATION: Mode = Mode::evaluation(StepPrecision::Recipe);
    /// The mode of forward and backward, in the recipe's precision.
    pub const TRAINING: Mode = Mode { pass: Pass::Training, precision: StepPrecision::Recipe };

    /// The mode of forward of tokens of several requests, in the recipe's precision.
    pub const INFERENCE: Mode = Mode { pass: Pass::Inference, precision: StepPrecision::Recipe };

    /// Returns the mode of forward and backward in this precision.
    pub fn training(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Training, precision }
    }

    /// Returns the mode of forward without backward, in this precision.
    pub const fn evaluation(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Evaluation, precision }
    }

    /// Returns the mode of forward without backward and without adapters, in this precision.
    pub const fn reference(precision: StepPrecision) -> Mode {
        Mode { pass: Pass::Reference, precision }
    }

    /// Returns the mode in which backward recomputes a forward of this mode.
    pub fn recomputation(self) -> Mode {
        Mode { pass: Pass::Recomputation, ..self }
    }

    /// Returns whether forward saves the values for backward.
    pub fn keeps(self) -> bool {
        matches!(self.pass, Pass::Training | Pass::Recomputation | Pass::Comparison)
    }

    /// Returns whether casts count for the run's statistics.
    pub fn measures(self) -> bool {
        self.pass == Pass::Training
    }

    /// Returns whether adapters add to the products of linears.
    pub fn adapts(self) -> bool {
        self.pass != Pass::Reference
    }

    /// Returns whether all products read the compute type.
    pub fn is_high_precision(self) -> bool {
        self.precision == StepPrecision::High
    }
}
