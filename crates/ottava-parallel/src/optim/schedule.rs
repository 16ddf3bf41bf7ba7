//! Learning rates by step.

use serde::{Deserialize, Serialize};

/// Shapes of the learning rate over a run; each starts with the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerType {
    /// Half a cosine from the peak to the minimum.
    #[serde(alias = "cosine_with_min_lr")]
    Cosine,
    /// A straight line from the peak to the minimum.
    Linear,
    /// The peak.
    #[serde(alias = "constant_with_warmup")]
    Constant,
    /// The peak, then a straight line to the minimum over the last `decay_steps`.
    #[serde(rename = "warmup_stable_decay", alias = "wsd")]
    WarmupStableDecay,
    /// Several half cosines from the peak to the minimum, one after the other.
    CosineWithRestarts,
    /// A power of the remaining share of the steps, from the peak to the minimum.
    Polynomial,
    /// The peak times the square root of warm-up steps / steps.
    InverseSqrt,
}

impl SchedulerType {
    /// Whether rates fall to [`Schedule::minimum`].
    pub fn has_minimum(self) -> bool {
        !matches!(self, SchedulerType::Constant | SchedulerType::InverseSqrt)
    }
}

/// The steps for which [`SchedulerType::InverseSqrt`] keeps near the peak in a run without a warm-up, as in transformers.
const TIMESCALE: u64 = 10_000;

/// A learning rate for each step of a run.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The shape.
    pub kind: SchedulerType,
    /// Highest learning rate.
    pub peak: f64,
    /// Lowest learning rate, at the end of the decay.
    pub minimum: f64,
    /// Steps to the peak.
    pub warmup_steps: u64,
    /// Steps of the final decay, for [`SchedulerType::WarmupStableDecay`].
    pub decay_steps: u64,
    /// Half cosines, for [`SchedulerType::CosineWithRestarts`].
    pub cycles: u64,
    /// The exponent, for [`SchedulerType::Polynomial`].
    pub power: f64,
    /// Steps of the run.
    pub max_steps: u64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 1. No step has a rate of 0: the warm-up begins with the first step, and a decay, which
    /// starts at the peak, would reach the minimum one step after the last. After the warm-up, rates equal the rates of transformers.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let from = match self.kind {
            SchedulerType::WarmupStableDecay => self.max_steps.saturating_sub(self.decay_steps).max(self.warmup_steps),
            _ => self.warmup_steps,
        };
        let span = self.max_steps.saturating_sub(from).max(1) as f64;
        let done = (step.saturating_sub(from + 1) as f64 / span).min(1.0);
        let half_cosine = |done: f64| 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        let left = match self.kind {
            SchedulerType::Cosine => half_cosine(done),
            SchedulerType::CosineWithRestarts if done < 1.0 => half_cosine((self.cycles as f64 * done).fract()),
            SchedulerType::CosineWithRestarts => 0.0,
            SchedulerType::Linear | SchedulerType::WarmupStableDecay => 1.0 - done,
            SchedulerType::Polynomial => (1.0 - done).powf(self.power),
            SchedulerType::Constant => return self.peak,
            SchedulerType::InverseSqrt => {
                let timescale = if self.warmup_steps > 0 { self.warmup_steps } else { TIMESCALE };
                let since = timescale + step.saturating_sub(self.warmup_steps + 1);
                return self.peak * (timescale as f64 / since as f64).sqrt();
            }
        };
        self.minimum + (self.peak - self.minimum) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: SchedulerType) -> Schedule {
        let (cycles, power) = (3, 2.0);
        Schedule { kind, peak: 1.0, minimum: 0.1, warmup_steps: 10, decay_steps: 20, cycles, power, max_steps: 110 }
    }

    /// Rates of transformers 5.24 for the same settings, whose steps count from 0.
    #[test]
    fn rates_after_the_warm_up_are_those_of_transformers() {
        use SchedulerType::*;
        const STEPS: [u64; 8] = [11, 12, 30, 45, 61, 78, 79, 110];
        let without_floor = |kind| Schedule { minimum: 0.0, ..schedule(kind) };
        let cases = [
            (
                schedule(InverseSqrt),
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
                Schedule { warmup_steps: 0, ..schedule(InverseSqrt) },
                vec![0.9995003746877732, 0.9994504533344625, 0.9985531461477268, 0.9978072334820829],
            ),
            (
                without_floor(CosineWithRestarts),
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
            (schedule(Polynomial), vec![1.0, 0.98209, 0.69049, 0.49204, 0.325, 0.19800999999999996, 0.19216, 0.10009]),
            (
                schedule(Cosine),
                vec![1.0, 0.9997779521645792, 0.9221862584235527, 0.7667891533457718, 0.55, 0.32093136291233293],
            ),
        ];
        for (schedule, expected) in cases {
            for (step, expected) in STEPS.into_iter().zip(expected) {
                let got = schedule.at(step);
                assert!((got - expected).abs() < 1e-12, "{:?}, step {step}: {got}, {expected}", schedule.kind);
            }
        }
    }

    #[test]
    fn every_shape_warms_up_and_ends_where_it_should() {
        use SchedulerType::*;
        for (kind, middle, end) in
            [(Cosine, 0.55, 0.1), (Linear, 0.55, 0.1), (Constant, 1.0, 1.0), (WarmupStableDecay, 1.0, 0.1)]
        {
            let s = schedule(kind);
            assert_eq!((s.at(1), s.at(5), s.at(10), s.at(11)), (0.1, 0.5, 1.0, 1.0), "{kind:?}");
            assert!((s.at(61) - middle).abs() < 1e-12, "{kind:?} in the middle: {}", s.at(61));
            assert!((s.at(111) - end).abs() < 1e-12, "{kind:?} after the end: {}", s.at(111));
        }
        assert_eq!(schedule(WarmupStableDecay).at(91), 1.0);
        assert!((schedule(WarmupStableDecay).at(101) - 0.55).abs() < 1e-12);
    }

    #[test]
    fn no_step_has_a_rate_of_zero() {
        use SchedulerType::*;
        for kind in [Cosine, Linear, Constant, WarmupStableDecay, CosineWithRestarts, Polynomial, InverseSqrt] {
            for (warmup_steps, max_steps) in [(0, 1), (0, 2), (1, 2), (2, 2), (5, 2), (3, 30)] {
                let s = Schedule { minimum: 0.0, warmup_steps, decay_steps: 4, max_steps, ..schedule(kind) };
                (1..=max_steps).for_each(|step| assert!(s.at(step) > 0.0, "{kind:?}: step {step} of {s:?}"));
            }
            let alone = Schedule { warmup_steps: 0, max_steps: 1, decay_steps: 1, ..schedule(kind) };
            assert_eq!(alone.at(1), 1.0, "{kind:?}: one step trains at the peak");
        }
    }
}
