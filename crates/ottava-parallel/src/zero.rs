//! The stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A ZeRO stage, which decides what ranks divide instead of replicating.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "u8", into = "u8")]
#[schemars(extend("maximum" = 3))]
pub enum Zero {
    /// Nothing.
    #[default]
    Nothing,
    /// Master weights and moments, and gradients once all micro-batches of a step have been added.
    OptimizerStates,
    /// Gradients between micro-batches in addition.
    Gradients,
    /// Weights and their codes in addition. The weights of a unit are gathered for each forward and each backward.
    Weights,
}

impl Zero {
    /// All stages.
    pub const ALL: [Zero; 4] = [Zero::Nothing, Zero::OptimizerStates, Zero::Gradients, Zero::Weights];
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(stage: u8) -> Result<Zero, String> {
        Zero::ALL.get(usize::from(stage)).copied().ok_or(format!("ZeRO stage {stage} is not one of 0, 1, 2, 3"))
    }
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> u8 {
        zero as u8
    }
}
