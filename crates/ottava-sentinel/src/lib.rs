//! The sentinel judges comparisons of a recipe with BF16, and decides which products a run computes in BF16 from then on.
//!
//! ```
//! use ottava_sentinel::SpikeDetector;
//!
//! // A loss that is more than 6 deviations above the losses of the last 16 steps is a spike.
//! let mut detector = SpikeDetector::of_losses(16, 6.0);
//! for step in 0..16 {
//!     assert!(detector.see(2.0 + 0.01 * f64::from(step % 3)).is_none());
//! }
//! assert!(detector.see(9.0).is_some());
//! ```
//!
//! The training step makes comparisons. This module is a function of their numbers, so every rank decides alike, and a resumed run decides like the
//! interrupted run.
//!
//! `TrainStep::compare` runs a program of one micro-batch in two precisions side by side, in `Pass::Comparison`, which does not update statistics of
//! casts. `Stage::compare_forward` and `Stage::compare_backward` (`models/stage/compare.rs`) run a block first in one precision and then in the
//! other. They compare outputs and gradients, and drop the gradients. The recipe's pass saves what a step saves. In BF16, backward recomputes each
//! block from its input.
//!
//! In the recipe's precision, three things are compared:
//!
//! - casts with their unrounded inputs (`OperandCast::probe`), so producers do not write codes directly
//! - sampled rows of products with the same rows of the products of the dequantized codes (`Linear::product`, `layers/linear/probe.rs`), and all rows
//!   of grouped products (`layers/moe/probe.rs`)
//! - the cost of casts in the loss, from the outputs of sampled tokens and the gradients of the loss by them (`Core::keep_outputs`,
//!   `Core::compare_loss_cost`)
//!
//! A `Probe` (`scaling/probe.rs`) collects the sums on the device, and all ranks add their sums. The `Observer` of a probe copies tensors for
//! `[debug]`. `Verdict` and `SentinelState` are functions of these sums, and the observer `Comparison` (`trainer/observers/comparison.rs`) carries
//! out the decision. `ScalingState::set_high_precision` marks the slots of a linear. From then on, its products read unquantized operands, and its
//! casts only measure, as in a step in high precision. `SentinelState::decide_by_metric` decides by a metric of evaluations in both precisions
//! (`trainer/evaluation.rs`). `TrainStep::repeat` compares two passes of the same precision. `Recommendation` and `what_if`
//! say which linears to compute in BF16, and which error other casts would have. `RunComparison` (`report/run_comparison.rs`) finds the first
//! difference between two runs. Tests plant faults in products with `planted.rs` of `ottava-tensor`.
#![forbid(unsafe_code)]

mod alarm;
mod cast_alarm;
mod finding;
mod memory;
mod recommend;
mod rollout_alarm;
mod router_alarm;
mod state;
mod what_if;

pub use alarm::{AlarmPolicy, NonFiniteSteps, NormAlarmPolicy, Spike, SpikeDetector};
pub use cast_alarm::{CastAlarm, CastBounds, CastDetector, CastFinding, CastHistory, SeenCast};
pub use finding::{Bounds, Finding, Measure, MetricBounds, Verdict};
pub use memory::{AlarmMemory, CountedSince, LastLine};
pub use recommend::{Recommendation, Recommended};
pub use rollout_alarm::{RolloutAlarm, RolloutBounds, RolloutDetector, RolloutFinding, RolloutHistory};
pub use router_alarm::CollapsedRouter;
pub use state::{Decision, Demotion, Rollback, SentinelState};
pub use what_if::{WhatIf, what_if};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The action of the sentinel after a finding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SentinelPolicy {
    /// Logs the finding.
    #[default]
    Report,
    /// Saves a checkpoint after the step and ends the program.
    Pause,
    /// Computes the linears with findings in BF16 for some steps, then tries them in FP8 again. If no linear has a finding, chooses the linear with
    /// the largest cast errors, or, after a finding about the loss, the linear whose casts cost the most.
    Demote,
    /// Computes all products in BF16 for some steps, then tries the recipe again.
    Bf16,
}
