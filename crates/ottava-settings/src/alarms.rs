//! The table `[alarms]`.

use ottava_sentinel::{AlarmPolicy, CastBounds, NonFiniteSteps};
use serde::{Deserialize, Serialize};

/// The `[alarms]` table: what a run does about losses, gradients and casts out of the ordinary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlarmsConfig {
    /// What a spike of the loss does: `off`, `warn`, `rollback`, `pause` or `stop`.
    pub loss_spike: AlarmPolicy,
    /// What a spike of the gradient norm does: `off`, `warn`, `skip`, `rollback`, `pause` or `stop`.
    pub grad_norm_spike: AlarmPolicy,
    /// What an alarm about the statistics of casts does: `off`, `warn`, `rollback`, `pause` or `stop`.
    pub casts: AlarmPolicy,
    /// What a router that has collapsed does: `off`, `warn`, `rollback`, `pause` or `stop`.
    pub routers: AlarmPolicy,
    /// Steps with which a step is compared.
    pub spike_window: usize,
    /// Robust standard deviations above the median of these steps, beyond which a value is a spike.
    pub spike_threshold: f64,
    /// What happens to a step whose gradient norm is not finite: `stop` or `skip`.
    pub non_finite_steps: NonFiniteSteps,
    /// Steps in a row that may be skipped.
    pub max_skipped_steps: u64,
    /// The share of the elements of a cast that saturate, beyond which it is an alarm.
    pub saturated_share: f64,
    /// The share of the elements of a cast that underflow, beyond which it is an alarm.
    pub underflowed_share: f64,
    /// The powers of two by which the amax of a cast lies above the median of those before, beyond which it is an alarm.
    pub amax_growth: f64,
    /// The share of a router's choices that as many experts have as a token is sent to, above which the router has collapsed.
    pub collapsed_share: f64,
    /// Steps between the checkpoint of a rollback and the alarm, at least.
    pub rollback_steps: u64,
    /// Rollbacks of a run, after which the next one ends it.
    pub max_rollbacks: u64,
}

impl Default for AlarmsConfig {
    fn default() -> AlarmsConfig {
        AlarmsConfig {
            loss_spike: AlarmPolicy::Warn,
            grad_norm_spike: AlarmPolicy::Warn,
            casts: AlarmPolicy::Warn,
            routers: AlarmPolicy::Warn,
            spike_window: 200,
            spike_threshold: 10.0,
            non_finite_steps: NonFiniteSteps::Stop,
            max_skipped_steps: 10,
            saturated_share: 0.01,
            underflowed_share: 0.5,
            amax_growth: 8.0,
            collapsed_share: 0.9,
            rollback_steps: 10,
            max_rollbacks: 3,
        }
    }
}

impl AlarmsConfig {
    /// The bounds of statistics of casts.
    pub fn cast_bounds(&self) -> CastBounds {
        CastBounds { saturated: self.saturated_share, underflowed: self.underflowed_share, growth: self.amax_growth }
    }

    /// Whether any alarm goes back to an earlier checkpoint.
    pub(super) fn rolls_back(&self) -> bool {
        [self.loss_spike, self.grad_norm_spike, self.casts, self.routers].contains(&AlarmPolicy::Rollback)
    }

    /// Problems of the values, a sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !(2..=1 << 20).contains(&self.spike_window) {
            let window = self.spike_window;
            problems.push(format!("`alarms.spike_window` is {window}; it is a number of steps from 2 to 1048576"));
        }
        if self.spike_threshold.is_nan() || self.spike_threshold <= 0.0 {
            let threshold = self.spike_threshold;
            problems.push(format!("`alarms.spike_threshold` is {threshold}; it is a number of deviations above 0"));
        }
        for (key, policy) in [("loss_spike", self.loss_spike), ("casts", self.casts), ("routers", self.routers)] {
            if policy == AlarmPolicy::Skip {
                problems.push(format!(
                    "`alarms.{key}` is \"skip\", and it is known only after the update; take \"rollback\", or `grad_norm_spike = \"skip\"`"
                ));
            }
        }
        let shares = [
            ("saturated_share", self.saturated_share),
            ("underflowed_share", self.underflowed_share),
            ("collapsed_share", self.collapsed_share),
        ];
        for (key, share) in shares {
            if !(0.0..=1.0).contains(&share) {
                problems.push(format!("`alarms.{key}` is {share}; it is a share from 0 to 1"));
            }
        }
        if self.amax_growth.is_nan() || self.amax_growth <= 0.0 {
            problems
                .push(format!("`alarms.amax_growth` is {}; it is a number of powers of two above 0", self.amax_growth));
        }
        if self.rollback_steps == 0 {
            problems.push(
                "`alarms.rollback_steps` is 0; a checkpoint of the step with the alarm is not older: set 1 or more"
                    .into(),
            );
        }
        problems
    }
}
