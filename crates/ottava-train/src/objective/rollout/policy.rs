//! The loss of a policy, as the settings of a run say.

use ottava_settings::{Aggregation, CorrectionConfig};
use ottava_tensor::ops::{PolicyLoss, ValueLoss};

/// How the losses of tokens become the loss of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// The loss of a token.
    pub loss: PolicyLoss,
    /// The factor of the entropy of a token's distribution, which is subtracted from the loss of the token.
    pub entropy_coef: f64,
    /// The loss of the values of tokens, if the model has a value head.
    pub value: Option<ValueLoss>,
    /// Its correction for draws.
    pub correction: CorrectionConfig,
    /// The mean over the tokens of a step.
    pub aggregation: Aggregation,
}
