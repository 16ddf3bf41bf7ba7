//! The table `[alarms]`.

use ottava_sentinel::{AlarmPolicy, CastBounds, NonFiniteSteps, NormAlarmPolicy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[alarms]` table: what a run does about unusual losses, gradients and casts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AlarmsConfig {
    /// Action after a spike of the loss: "off", "warn", "rollback" (restore an earlier checkpoint and continue with the next unread rows),
    /// "pause" (save and end with exit code 76) or "stop" (end with exit code 77, without a checkpoint).
    pub loss_spike: AlarmPolicy,
    /// Action after a spike of the gradient norm: an action of loss_spike, or "skip" (the step changes no weights).
    pub grad_norm_spike: NormAlarmPolicy,
    /// Action if casts saturate or underflow, their amax grows, or their scale reaches a limit: "off", "warn", "rollback", "pause" or
    /// "stop". Casts are checked every logging.cast_statistics_steps steps.
    pub casts: AlarmPolicy,
    /// Action if routers send almost all tokens to the same experts: "off", "warn", "rollback", "pause" or "stop". Routers are checked
    /// every logging.cast_statistics_steps steps.
    pub routers: AlarmPolicy,
    /// Which losses and gradient norms are spikes.
    pub spikes: Spikes,
    /// Action if the gradient norm of a step is not finite: "stop" (end with exit code 4) or "skip" (continue with the next step). A step
    /// without a finite gradient norm changes no weights. With recipe "fp16", the action is taken only if the loss scale is already at its
    /// minimum.
    pub non_finite_steps: NonFiniteSteps,
    /// Maximum number of consecutive steps that are skipped.
    pub max_skipped_steps: u64,
    /// Share of saturated elements of a cast above which an alarm is raised.
    pub saturated_share: f64,
    /// Share of underflowed elements of a cast above which an alarm is raised.
    pub underflowed_share: f64,
    /// An alarm is raised if the amax of a cast exceeds the median of the amaxes in the last 50 lines of statistics by more than this many
    /// powers of two.
    pub amax_growth: f64,
    /// Share of all choices above which a router has collapsed: with K experts per token, the choices of its K most chosen experts count.
    pub collapsed_share: f64,
    /// What "rollback" does.
    pub rollback: Rollbacks,
}

/// The `[alarms.spikes]` table: which losses and gradient norms are spikes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Spikes {
    /// Number of preceding steps with which the loss and gradient norm of a step are compared.
    pub spike_window: usize,
    /// A loss or gradient norm is a spike if it exceeds the median of the preceding spike_window steps by more than this many robust
    /// standard deviations. A robust standard deviation is 1.4826 times the median absolute deviation.
    pub spike_threshold: f64,
}

/// The `[alarms.rollback]` table: how far and how often a run goes back.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rollbacks {
    /// Minimum age, in steps, of the checkpoint that "rollback" restores.
    pub rollback_steps: u64,
    /// Maximum number of rollbacks of a run; the next alarm with "rollback" ends the run with exit code 77.
    pub max_rollbacks: u64,
}

impl Default for Spikes {
    fn default() -> Spikes {
        Spikes { spike_window: 200, spike_threshold: 10.0 }
    }
}

impl Default for Rollbacks {
    fn default() -> Rollbacks {
        Rollbacks { rollback_steps: 10, max_rollbacks: 3 }
    }
}

impl Default for AlarmsConfig {
    fn default() -> AlarmsConfig {
        AlarmsConfig {
            loss_spike: AlarmPolicy::Warn,
            grad_norm_spike: NormAlarmPolicy::Warn,
            casts: AlarmPolicy::Warn,
            routers: AlarmPolicy::Warn,
            spikes: Spikes::default(),
            non_finite_steps: NonFiniteSteps::Stop,
            max_skipped_steps: 10,
            saturated_share: 0.01,
            underflowed_share: 0.5,
            amax_growth: 8.0,
            collapsed_share: 0.9,
            rollback: Rollbacks::default(),
        }
    }
}

impl AlarmsConfig {
    /// The bounds that statistics of casts must not exceed.
    pub fn cast_bounds(&self) -> CastBounds {
        CastBounds { saturated: self.saturated_share, underflowed: self.underflowed_share, growth: self.amax_growth }
    }

    /// Whether any alarm restores an earlier checkpoint.
    pub(super) fn rolls_back(&self) -> bool {
        [self.loss_spike, self.casts, self.routers].contains(&AlarmPolicy::Rollback)
            || self.grad_norm_spike == NormAlarmPolicy::Rollback
    }

    /// Problems of the values, a sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !(2..=1 << 20).contains(&self.spikes.spike_window) {
            let window = self.spikes.spike_window;
            problems
                .push(format!("`alarms.spikes.spike_window` is {window}; it is a number of steps from 2 to 1048576"));
        }
        if self.spikes.spike_threshold.is_nan() || self.spikes.spike_threshold <= 0.0 {
            let threshold = self.spikes.spike_threshold;
            problems
                .push(format!("`alarms.spikes.spike_threshold` is {threshold}; it is a number of deviations above 0"));
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
        if self.rollback.rollback_steps == 0 {
            problems.push(
                "`alarms.rollback.rollback_steps` is 0; a checkpoint of the step with the alarm is not older: set 1 or more"
                    .into(),
            );
        }
        problems
    }
}
