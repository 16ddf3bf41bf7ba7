//! The `[memory]` table: what is kept, and what is made again when it is needed. Results are the same bits either way.

use crate::error::Error;
use crate::recompute::Recompute;
use serde::{Deserialize, Serialize};

/// The `[memory]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// What backward computes again: `none`, `norm-swiglu`, `attention`, `full`, or `auto` for the cheapest of these that fits the device.
    pub recompute: RecomputeChoice,
    /// Whether FP8 codes of weights are kept for the whole step. Without, each product casts the weight that it reads.
    pub weight_codes: bool,
}

impl Default for MemoryConfig {
    fn default() -> MemoryConfig {
        MemoryConfig { recompute: RecomputeChoice::Policy(Recompute::None), weight_codes: true }
    }
}

/// What decides what backward computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RecomputeChoice {
    /// The memory of the device, when the run starts.
    Auto,
    /// The user.
    Policy(Recompute),
}

impl RecomputeChoice {
    const AUTO: &str = "auto";

    /// The policy. `None` as long as nothing has been decided.
    pub fn policy(self) -> Option<Recompute> {
        match self {
            RecomputeChoice::Auto => None,
            RecomputeChoice::Policy(policy) => Some(policy),
        }
    }
}

impl TryFrom<String> for RecomputeChoice {
    type Error = Error;
    fn try_from(text: String) -> Result<RecomputeChoice, Error> {
        match text.as_str() {
            RecomputeChoice::AUTO => Ok(RecomputeChoice::Auto),
            policy => match policy.parse() {
                Ok(policy) => Ok(RecomputeChoice::Policy(policy)),
                Err(error) => Err(Error::Config(format!("{error}, and auto"))),
            },
        }
    }
}

impl From<RecomputeChoice> for String {
    fn from(choice: RecomputeChoice) -> String {
        choice.policy().map_or(RecomputeChoice::AUTO, Recompute::as_str).to_string()
    }
}
