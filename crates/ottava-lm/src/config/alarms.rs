//! The table `[alarms]`.

use crate::sentinel::{AlarmPolicy, NonFiniteSteps};
use serde::{Deserialize, Serialize};

/// The `[alarms]` table: what a run does about losses and gradients out of the ordinary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlarmsConfig {
    /// What a spike of the loss does: `off`, `warn` or `pause`.
    pub loss_spike: AlarmPolicy,
    /// What a spike of the gradient norm does: `off`, `warn` or `pause`.
    pub grad_norm_spike: AlarmPolicy,
    /// Steps with which a step is compared.
    pub spike_window: usize,
    /// Robust standard deviations above the median of these steps, beyond which a value is a spike.
    pub spike_threshold: f64,
    /// What happens to a step whose gradient norm is not finite: `stop` or `skip`.
    pub non_finite_steps: NonFiniteSteps,
    /// Steps in a row that may be skipped.
    pub max_non_finite_steps: u64,
}

impl Default for AlarmsConfig {
    fn default() -> AlarmsConfig {
        AlarmsConfig {
            loss_spike: AlarmPolicy::Warn,
            grad_norm_spike: AlarmPolicy::Warn,
            spike_window: 200,
            spike_threshold: 10.0,
            non_finite_steps: NonFiniteSteps::Stop,
            max_non_finite_steps: 10,
        }
    }
}

impl AlarmsConfig {
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
        problems
    }
}
