//! Learning rates by step.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The shape of the learning rate over a run, with its keys. Each shape starts with the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SchedulerType {
    /// Half a cosine from the peak to the minimum.
    Cosine(Decay),
    /// A straight line from the peak to the minimum.
    Linear(Decay),
    /// The peak.
    Constant,
    /// The peak, then a straight line to the minimum over the last decay_steps.
    WarmupStableDecay(StableDecay),
    /// Several half cosines from the peak to the minimum, one after the other.
    CosineWithRestarts(Restarts),
    /// A power of the remaining share of the steps, from the peak to the minimum.
    Polynomial(PolynomialDecay),
    /// The peak times the square root of warm-up steps / steps.
    InverseSqrt,
}

/// The keys of `cosine` and `linear`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Decay {
    /// Learning rate one step after the end of the schedule.
    pub min_learning_rate: f64,
}

/// The keys of `warmup_stable_decay`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StableDecay {
    /// Learning rate one step after the end of the schedule.
    pub min_learning_rate: f64,
    /// Steps of linear decay at the end of the run.
    pub decay_steps: u64,
}

/// The keys of `cosine_with_restarts`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Restarts {
    /// Learning rate one step after the end of the schedule.
    pub min_learning_rate: f64,
    /// Half cosines, each from the peak to min_learning_rate.
    pub num_cycles: u64,
}

/// The keys of `polynomial`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PolynomialDecay {
    /// Learning rate one step after the end of the schedule.
    pub min_learning_rate: f64,
    /// Exponent; 1.0 is a straight line.
    pub power: f64,
}

impl Default for Restarts {
    fn default() -> Restarts {
        Restarts { min_learning_rate: 0.0, num_cycles: 1 }
    }
}

impl Default for PolynomialDecay {
    fn default() -> PolynomialDecay {
        PolynomialDecay { min_learning_rate: 0.0, power: 1.0 }
    }
}

impl SchedulerType {
    /// Returns the learning rate at the end of the decay, or `None` for shapes without a minimum.
    pub fn minimum(self) -> Option<f64> {
        match self {
            SchedulerType::Cosine(Decay { min_learning_rate }) | SchedulerType::Linear(Decay { min_learning_rate }) => {
                Some(min_learning_rate)
            }
            SchedulerType::WarmupStableDecay(StableDecay { min_learning_rate, .. })
            | SchedulerType::CosineWithRestarts(Restarts { min_learning_rate, .. })
            | SchedulerType::Polynomial(PolynomialDecay { min_learning_rate, .. }) => Some(min_learning_rate),
            SchedulerType::Constant | SchedulerType::InverseSqrt => None,
        }
    }

    /// Returns the number of steps of a final decay. Returns 0 for shapes that decay from the warm-up on, or never.
    pub fn decay_steps(self) -> u64 {
        match self {
            SchedulerType::WarmupStableDecay(StableDecay { decay_steps, .. }) => decay_steps,
            _ => 0,
        }
    }
}

/// The number of steps that replaces the warm-up steps in [`SchedulerType::InverseSqrt`] without a warm-up, as in transformers.
const TIMESCALE: u64 = 10_000;

/// A learning rate for each step of a run.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The shape of the learning rate.
    pub kind: SchedulerType,
    /// The highest learning rate.
    pub peak: f64,
    /// The number of steps to the peak.
    pub warmup_steps: u64,
    /// The number of steps of the run.
    pub max_steps: u64,
}

impl Schedule {
    /// Returns the learning rate of `step`, counted from 1. No step has a rate of 0: the warm-up begins with the first step, and a decay from the
    /// peak would reach the minimum one step after the last step. After the warm-up, rates equal the rates of transformers.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let from = match self.kind {
            SchedulerType::WarmupStableDecay(StableDecay { decay_steps, .. }) => {
                self.max_steps.saturating_sub(decay_steps).max(self.warmup_steps)
            }
            _ => self.warmup_steps,
        };
        let span = self.max_steps.saturating_sub(from).max(1) as f64;
        let done = (step.saturating_sub(from + 1) as f64 / span).min(1.0);
        let half_cosine = |done: f64| 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        let (minimum, left) = match self.kind {
            SchedulerType::Cosine(decay) => (decay.min_learning_rate, half_cosine(done)),
            SchedulerType::CosineWithRestarts(Restarts { min_learning_rate, num_cycles }) => {
                let left = if done < 1.0 { half_cosine((num_cycles as f64 * done).fract()) } else { 0.0 };
                (min_learning_rate, left)
            }
            SchedulerType::Linear(decay) => (decay.min_learning_rate, 1.0 - done),
            SchedulerType::WarmupStableDecay(decay) => (decay.min_learning_rate, 1.0 - done),
            SchedulerType::Polynomial(decay) => (decay.min_learning_rate, (1.0 - done).powf(decay.power)),
            SchedulerType::Constant => return self.peak,
            SchedulerType::InverseSqrt => {
                let timescale = if self.warmup_steps > 0 { self.warmup_steps } else { TIMESCALE };
                let since = timescale + step.saturating_sub(self.warmup_steps + 1);
                return self.peak * (timescale as f64 / since as f64).sqrt();
            }
        };
        minimum + (self.peak - minimum) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMUM: f64 = 0.1;
    /// The formulas do the same operations in another order in F64, so rates near 1 may differ by a few units of 2⁻⁵³.
    const ROUNDING: f64 = 1e-12;

    /// Returns all shapes, with a minimum of `min_learning_rate`.
    fn shapes(min_learning_rate: f64, decay_steps: u64) -> [SchedulerType; 7] {
        [
            SchedulerType::Cosine(Decay { min_learning_rate }),
            SchedulerType::Linear(Decay { min_learning_rate }),
            SchedulerType::Constant,
            SchedulerType::WarmupStableDecay(StableDecay { min_learning_rate, decay_steps }),
            SchedulerType::CosineWithRestarts(Restarts { min_learning_rate, num_cycles: 3 }),
            SchedulerType::Polynomial(PolynomialDecay { min_learning_rate, power: 2.0 }),
            SchedulerType::InverseSqrt,
        ]
    }

    fn schedule(kind: SchedulerType) -> Schedule {
        Schedule { kind, peak: 1.0, warmup_steps: 10, max_steps: 110 }
    }

    /// The expected rates are from transformers 5.24 with the same settings. Its steps count from 0.
    #[test]
    fn rates_after_the_warm_up_are_those_of_transformers() {
        const STEPS: [u64; 8] = [11, 12, 30, 45, 61, 78, 79, 110];
        let [cosine, _, _, _, _, polynomial, inverse_sqrt] = shapes(MINIMUM, 20);
        let [_, _, _, _, restarts, ..] = shapes(0.0, 20);
        let cases = [
            (
                schedule(inverse_sqrt),
                [
                    1.0,
                    0.9534625892455922,
                    0.5872202195147035,
                    0.4767312946227961,
                    0.4082482904638631,
                    0.3603749850782236,
                ]
                .to_vec(),
            ),
            (
                Schedule { warmup_steps: 0, ..schedule(inverse_sqrt) },
                vec![0.9995003746877732, 0.9994504533344625, 0.9985531461477268, 0.9978072334820829],
            ),
            (
                schedule(restarts),
                vec![
                    1.0,
                    0.99778098230154,
                    0.39092837930172875,
                    0.9990133642141358,
                    0.5,
                    0.9997532801828657,
                    0.9960573506572389,
                    0.0022190176984600574,
                ],
            ),
            (schedule(polynomial), vec![1.0, 0.98209, 0.69049, 0.49204, 0.325, 0.19800999999999996, 0.19216, 0.10009]),
            (
                schedule(cosine),
                vec![1.0, 0.9997779521645792, 0.9221862584235527, 0.7667891533457718, 0.55, 0.32093136291233293],
            ),
        ];
        for (schedule, expected) in cases {
            for (step, expected) in STEPS.into_iter().zip(expected) {
                let got = schedule.at(step);
                assert!((got - expected).abs() < ROUNDING, "{:?}, step {step}: {got}, {expected}", schedule.kind);
            }
        }
    }

    #[test]
    fn every_shape_warms_up_and_ends_where_it_should() {
        let [cosine, linear, constant, stable, ..] = shapes(MINIMUM, 20);
        for (kind, middle, end) in [(cosine, 0.55, 0.1), (linear, 0.55, 0.1), (constant, 1.0, 1.0), (stable, 1.0, 0.1)]
        {
            let s = schedule(kind);
            assert_eq!((s.at(1), s.at(5), s.at(10), s.at(11)), (0.1, 0.5, 1.0, 1.0), "{kind:?}");
            assert!((s.at(61) - middle).abs() < ROUNDING, "{kind:?} in the middle: {}", s.at(61));
            assert!((s.at(111) - end).abs() < ROUNDING, "{kind:?} after the end: {}", s.at(111));
        }
        assert_eq!(schedule(stable).at(91), 1.0);
        assert!((schedule(stable).at(101) - 0.55).abs() < ROUNDING);
    }

    #[test]
    fn no_step_has_a_rate_of_zero() {
        for (kind, alone) in shapes(0.0, 4).into_iter().zip(shapes(0.0, 1)) {
            for (warmup_steps, max_steps) in [(0, 1), (0, 2), (1, 2), (2, 2), (5, 2), (3, 30)] {
                let s = Schedule { warmup_steps, max_steps, ..schedule(kind) };
                (1..=max_steps).for_each(|step| assert!(s.at(step) > 0.0, "{kind:?}: step {step} of {s:?}"));
            }
            let alone = Schedule { warmup_steps: 0, max_steps: 1, ..schedule(alone) };
            assert_eq!(alone.at(1), 1.0, "{kind:?}: one step trains at the peak");
        }
    }
}
