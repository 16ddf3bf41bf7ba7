//! The sentinel: judges comparisons of a recipe with BF16, and decides what a run computes in BF16 from then on.
//!
//! Comparisons are made by [`TrainStep::compare`](crate::step::TrainStep::compare); this module is a function of their numbers, so every
//! rank decides alike, and a resumed run decides as the interrupted one.

mod alarm;
mod cast_alarm;
mod finding;
mod memory;
mod recommend;
mod router_alarm;
mod state;
mod what_if;

pub use alarm::{AlarmPolicy, NonFiniteSteps, NormAlarmPolicy, Spike, SpikeDetector};
pub use cast_alarm::{CastAlarm, CastBounds, CastDetector, CastFinding, CastHistory, SeenCast};
pub use finding::{Bounds, Finding, Measure, Verdict};
pub use memory::{AlarmMemory, CountedSince, LastLine};
pub use recommend::{Recommendation, Recommended};
pub use router_alarm::CollapsedRouter;
pub use state::{Decision, Demotion, Rollback, SentinelState};
pub use what_if::{WhatIf, what_if};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the sentinel does about a finding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SentinelPolicy {
    /// Logs it.
    #[default]
    Report,
    /// Saves a checkpoint after the step and ends the program.
    Pause,
    /// Computes the linears with findings in BF16 for some steps, then tries them again; without such a linear, the one with the largest
    /// cast errors.
    Demote,
    /// Computes all products in BF16 for some steps, then tries the recipe again.
    Bf16,
}
