//! Alarms about a series of numbers of a run, such as its losses.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt::{self, Display};

/// The action of an alarm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AlarmPolicy {
    /// Does nothing.
    Off,
    /// Logs the alarm.
    #[default]
    Warn,
    /// Returns to an earlier checkpoint, and continues with the next unread rows.
    Rollback,
    /// Saves a checkpoint after the step and ends the program.
    Pause,
    /// Ends the program without a checkpoint.
    Stop,
}

/// The action after a spike of the gradient norm. The norm is known before the update, so the step can be skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NormAlarmPolicy {
    /// Does nothing.
    Off,
    /// Logs the alarm.
    #[default]
    Warn,
    /// Logs the alarm, and skips the update of the step.
    Skip,
    /// Returns to an earlier checkpoint, and continues with the next unread rows.
    Rollback,
    /// Saves a checkpoint after the step and ends the program.
    Pause,
    /// Ends the program without a checkpoint.
    Stop,
}

impl From<AlarmPolicy> for NormAlarmPolicy {
    fn from(policy: AlarmPolicy) -> NormAlarmPolicy {
        match policy {
            AlarmPolicy::Off => NormAlarmPolicy::Off,
            AlarmPolicy::Warn => NormAlarmPolicy::Warn,
            AlarmPolicy::Rollback => NormAlarmPolicy::Rollback,
            AlarmPolicy::Pause => NormAlarmPolicy::Pause,
            AlarmPolicy::Stop => NormAlarmPolicy::Stop,
        }
    }
}

impl NormAlarmPolicy {
    /// Returns the spelling in configuration files.
    pub fn as_str(self) -> &'static str {
        match self {
            NormAlarmPolicy::Off => "off",
            NormAlarmPolicy::Warn => "warn",
            NormAlarmPolicy::Skip => "skip",
            NormAlarmPolicy::Rollback => "rollback",
            NormAlarmPolicy::Pause => "pause",
            NormAlarmPolicy::Stop => "stop",
        }
    }
}

/// The action after a step whose gradient norm is not finite. Such a step changes no weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NonFiniteSteps {
    /// The run ends with an error.
    #[default]
    Stop,
    /// The step is skipped.
    Skip,
}

/// The number of first values that are never spikes, since losses and norms change fast in the first steps.
const LEAST: usize = 100;

/// The minimum spread of a window of losses, relative to its median. On a plateau, values within this spread are not spikes.
const FLOOR_OF_LOSSES: f64 = 0.005;

/// The minimum spread of a window of gradient norms, relative to its median. In every run, some norms are twice the median.
const FLOOR_OF_NORMS: f64 = 0.2;

/// The factor between the median absolute deviation and the standard deviation of a normal distribution.
const NORMAL: f64 = 1.4826;

/// A detector of values that lie far above the values of the window before them.
#[derive(Clone, Debug)]
pub struct SpikeDetector {
    window: usize,
    threshold: f64,
    floor: f64,
    values: VecDeque<f64>,
}

/// A value far above the values before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spike {
    /// The value of the spike.
    pub value: f64,
    /// The median of the window.
    pub median: f64,
    /// The distance from the median in robust standard deviations: 1.4826 times the median absolute deviation.
    pub deviations: f64,
}

impl Display for Spike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spike { value, median, deviations } = self;
        write!(f, "{value:.4} is {deviations:.0} robust standard deviations above the median {median:.4}")
    }
}

impl SpikeDetector {
    /// Makes a detector of losses that are more than `threshold` robust standard deviations above the median of the last `window` losses.
    pub fn of_losses(window: usize, threshold: f64) -> SpikeDetector {
        SpikeDetector { window, threshold, floor: FLOOR_OF_LOSSES, values: VecDeque::new() }
    }

    /// Returns the same detector after it has seen `values`, which [`SpikeDetector::values`] returned.
    pub fn after(mut self, values: &VecDeque<f64>) -> SpikeDetector {
        self.values = values.iter().skip(values.len().saturating_sub(self.window)).copied().collect();
        self
    }

    /// Returns the values with which the next value is compared.
    pub fn values(&self) -> &VecDeque<f64> {
        &self.values
    }

    /// Makes a detector of gradient norms that are more than `threshold` robust standard deviations above the median of the last `window` norms.
    pub fn of_norms(window: usize, threshold: f64) -> SpikeDetector {
        SpikeDetector { floor: FLOOR_OF_NORMS, ..SpikeDetector::of_losses(window, threshold) }
    }

    /// Adds `value`, which must be finite, and returns it if it is a spike.
    pub fn see(&mut self, value: f64) -> Option<Spike> {
        let spike = self.judge(value);
        self.values.push_back(value);
        if self.values.len() > self.window {
            self.values.pop_front();
        }
        spike
    }

    /// Returns the largest next value that would not be a spike. Returns infinity while too few values were seen.
    pub fn limit(&self) -> f64 {
        self.center_and_spread().map_or(f64::INFINITY, |(center, spread)| center + self.threshold * spread)
    }

    fn judge(&self, value: f64) -> Option<Spike> {
        let (center, spread) = self.center_and_spread()?;
        (value > self.limit()).then_some(Spike { value, median: center, deviations: (value - center) / spread })
    }

    /// Returns the median of the window and its robust standard deviation.
    fn center_and_spread(&self) -> Option<(f64, f64)> {
        if self.values.len() < LEAST.min(self.window) {
            return None;
        }
        let center = median(self.values.iter().copied().collect());
        let deviation = median(self.values.iter().map(|x| (x - center).abs()).collect());
        Some((center, (NORMAL * deviation).max(self.floor * center.abs()).max(f64::MIN_POSITIVE)))
    }
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a falling loss with noise, like the loss of a run.
    fn loss(step: usize) -> f64 {
        // The noise between -1 and 1 is a hash of the step.
        let noise = ((step as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / f64::from(1 << 23) - 1.0;
        2.0 + 8.0 / (1.0 + step as f64 / 20.0) + 0.08 * noise
    }

    fn spikes(series: impl Iterator<Item = f64>) -> Vec<usize> {
        let mut detector = SpikeDetector::of_losses(200, 10.0);
        series.enumerate().filter(|(_, x)| detector.see(*x).is_some()).map(|(step, _)| step).collect()
    }

    #[test]
    fn a_normal_run_a_drift_and_a_plateau_give_no_alarm() {
        assert_eq!(spikes((0..10_000).map(loss)), [0usize; 0]);
        assert_eq!(spikes((0..10_000).map(|step| loss(step) + 1e-4 * step as f64)), [0usize; 0]);
        assert_eq!(spikes((0..10_000).map(|_| 2.5)), [0usize; 0]);
        assert_eq!(spikes((0..10_000).map(|step| 2.5 + 1e-3 * (loss(step) - loss(step + 1)))), [0usize; 0]);
    }

    #[test]
    fn spikes_are_found_at_their_step_and_described() {
        let with_spikes = (0..3000).map(|step| loss(step) + if step % 1000 == 700 { 1.5 } else { 0.0 });
        assert_eq!(spikes(with_spikes), [700, 1700, 2700]);
        let mut detector = SpikeDetector::of_losses(50, 10.0);
        (0..50).for_each(|i| assert_eq!(detector.see(2.0 + 0.1 * f64::from(i % 3)), None));
        let spike = detector.see(7.0).unwrap();
        assert_eq!(spike.median, 2.1);
        assert_eq!(spike.to_string(), "7.0000 is 33 robust standard deviations above the median 2.1000");
        // A spike does not hide the next spike.
        assert!(detector.see(7.0).is_some());
    }

    #[test]
    fn nothing_is_judged_without_a_history() {
        let mut detector = SpikeDetector::of_losses(100, 10.0);
        (0..LEAST).for_each(|i| assert_eq!(detector.see(10f64.powi(i as i32)), None));
    }

    /// Returns the losses or gradient norms of 1,200 steps of a small model on the bundled text.
    fn recorded(key: &str) -> Vec<f64> {
        let text = include_str!("../tests/data/losses_and_norms.json");
        let all: std::collections::BTreeMap<String, Vec<f64>> = serde_json::from_str(text).unwrap();
        all[key].clone()
    }

    fn spikes_of(detector: fn(usize, f64) -> SpikeDetector, series: &[f64]) -> Vec<usize> {
        let mut detector = detector(200, 10.0);
        (0..series.len()).filter(|&step| detector.see(series[step]).is_some()).collect()
    }

    #[test]
    fn recorded_series_give_an_alarm_at_planted_spikes_alone() {
        type Detector = fn(usize, f64) -> SpikeDetector;
        let cases: [(&str, Detector, f64); 2] =
            [("loss", SpikeDetector::of_losses, 2.0), ("grad_norm", SpikeDetector::of_norms, 10.0)];
        for (key, detector, factor) in cases {
            let normal = recorded(key);
            let with = |change: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
                normal.iter().enumerate().map(|(step, value)| change(step, *value)).collect()
            };
            assert_eq!(spikes_of(detector, &normal), [0usize; 0], "{key}");
            let spike = with(&|step, value| if [600, 601, 900].contains(&step) { factor * value } else { value });
            assert_eq!(spikes_of(detector, &spike), [600, 601, 900], "{key}");
            let drift = with(&|step, value| value * (1.0 + step as f64 / 1200.0));
            assert_eq!(spikes_of(detector, &drift), [0usize; 0], "{key}");
            let plateau = with(&|step, value| if step < 900 { value } else { normal[900] });
            assert_eq!(spikes_of(detector, &plateau), [0usize; 0], "{key}");
        }
    }
}
