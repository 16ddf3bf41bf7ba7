//! The table `[alarms]`.

use ottava_sentinel::{AlarmPolicy, CastBounds, NonFiniteSteps, NormAlarmPolicy, RolloutBounds};
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
    /// Action if the completions of reinforcement learning show that the model learns nothing, or something else than it should: "off",
    /// "warn", "rollback", "pause" or "stop". Each alarm is raised once, and again after the metric has come back within its bound.
    pub rollouts: AlarmPolicy,
    /// Which losses and gradient norms are spikes.
    pub spikes: Spikes,
    /// Action if the gradient norm of a step is not finite: "stop" (end with exit code 4) or "skip" (continue with the next step). A step
    /// without a finite gradient norm changes no weights. With recipe "fp16", the action is taken only if the loss scale is already at its
    /// minimum.
    pub non_finite_steps: NonFiniteSteps,
    /// Maximum number of consecutive steps that are skipped.
    pub max_skipped_steps: u64,
    /// Which statistics of casts raise an alarm.
    pub cast_bounds: CastLimits,
    /// Share of all choices above which a router has collapsed: with K experts per token, the choices of its K most chosen experts count.
    pub collapsed_share: f64,
    /// Which metrics of completions raise an alarm.
    pub rollout_bounds: RolloutLimits,
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

/// The `[alarms.cast_bounds]` table: which statistics of casts raise an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CastLimits {
    /// Share of saturated elements of a cast above which an alarm is raised.
    pub saturated_share: f64,
    /// Share of underflowed elements of a cast above which an alarm is raised.
    pub underflowed_share: f64,
    /// An alarm is raised if the amax of a cast exceeds the median of the amaxes in the last 50 lines of statistics by more than this many
    /// powers of two.
    pub amax_growth: f64,
}

/// The `[alarms.rollout_bounds]` table: which metrics of completions raise an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutLimits {
    /// Largest token_mult_prob_error: how much the probabilities of tokens differ between draws and steps. 1 is no difference.
    pub max_mult_prob_error: f64,
    /// Smallest entropy, in nats per token. A model that draws almost always the same completions learns nothing from comparing them.
    pub min_entropy: f64,
    /// Largest completions/clipped_ratio: the share of completions that reach max_completion_length.
    pub max_clipped_ratio: f64,
    /// Largest frac_reward_zero_std: the share of groups whose completions all have the same reward.
    pub max_zero_std_ratio: f64,
    /// An alarm is raised if the mean reward of this many steps is not above the mean reward of as many steps before; 0 for no such alarm.
    pub plateau_steps: usize,
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

impl Default for CastLimits {
    fn default() -> CastLimits {
        CastLimits { saturated_share: 0.01, underflowed_share: 0.5, amax_growth: 8.0 }
    }
}

impl Default for RolloutLimits {
    fn default() -> RolloutLimits {
        RolloutLimits {
            max_mult_prob_error: 1.2,
            min_entropy: 0.01,
            max_clipped_ratio: 0.9,
            max_zero_std_ratio: 0.95,
            plateau_steps: 0,
        }
    }
}

impl Default for AlarmsConfig {
    fn default() -> AlarmsConfig {
        AlarmsConfig {
            loss_spike: AlarmPolicy::Warn,
            grad_norm_spike: NormAlarmPolicy::Warn,
            casts: AlarmPolicy::Warn,
            routers: AlarmPolicy::Warn,
            rollouts: AlarmPolicy::Warn,
            spikes: Spikes::default(),
            non_finite_steps: NonFiniteSteps::Stop,
            max_skipped_steps: 10,
            cast_bounds: CastLimits::default(),
            collapsed_share: 0.9,
            rollout_bounds: RolloutLimits::default(),
            rollback: Rollbacks::default(),
        }
    }
}

impl AlarmsConfig {
    /// The bounds that statistics of casts must not exceed.
    pub fn cast_bounds(&self) -> CastBounds {
        let CastLimits { saturated_share, underflowed_share, amax_growth } = self.cast_bounds;
        CastBounds { saturated: saturated_share, underflowed: underflowed_share, growth: amax_growth }
    }

    /// The bounds that metrics of completions must not exceed.
    pub fn rollout_bounds(&self) -> RolloutBounds {
        let RolloutLimits { max_mult_prob_error, min_entropy, max_clipped_ratio, max_zero_std_ratio, plateau_steps } =
            self.rollout_bounds;
        RolloutBounds {
            mult_prob_error: max_mult_prob_error,
            entropy: min_entropy,
            clipped_ratio: max_clipped_ratio,
            zero_std_ratio: max_zero_std_ratio,
            plateau_steps,
        }
    }

    /// Whether any alarm restores an earlier checkpoint.
    pub(super) fn rolls_back(&self) -> bool {
        [self.loss_spike, self.casts, self.routers, self.rollouts].contains(&AlarmPolicy::Rollback)
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
            ("cast_bounds.saturated_share", self.cast_bounds.saturated_share),
            ("cast_bounds.underflowed_share", self.cast_bounds.underflowed_share),
            ("collapsed_share", self.collapsed_share),
            ("rollout_bounds.max_clipped_ratio", self.rollout_bounds.max_clipped_ratio),
            ("rollout_bounds.max_zero_std_ratio", self.rollout_bounds.max_zero_std_ratio),
        ];
        for (key, share) in shares {
            if !(0.0..=1.0).contains(&share) {
                problems.push(format!("`alarms.{key}` is {share}; it is a share from 0 to 1"));
            }
        }
        let growth = self.cast_bounds.amax_growth;
        if growth.is_nan() || growth <= 0.0 {
            problems
                .push(format!("`alarms.cast_bounds.amax_growth` is {growth}; it is a number of powers of two above 0"));
        }
        let RolloutLimits { max_mult_prob_error, min_entropy, .. } = self.rollout_bounds;
        if max_mult_prob_error.is_nan() || max_mult_prob_error < 1.0 {
            problems.push(format!(
                "`alarms.rollout_bounds.max_mult_prob_error` is {max_mult_prob_error}; it is at least 1, which means no difference"
            ));
        }
        if min_entropy.is_nan() || min_entropy < 0.0 {
            problems.push(format!(
                "`alarms.rollout_bounds.min_entropy` is {min_entropy}; it is a number of nats from 0 up"
            ));
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
