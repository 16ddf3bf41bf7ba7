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
}

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
    /// Steps of the run.
    pub max_steps: u64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 1. No step has a rate of 0: the warm-up begins with the first step, and a decay, which
    /// starts at the peak, would reach the minimum one step after the last. After the warm-up, rates are those of transformers.
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
        let left = match self.kind {
            SchedulerType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            SchedulerType::Linear | SchedulerType::WarmupStableDecay => 1.0 - done,
            SchedulerType::Constant => 1.0,
        };
        self.minimum + (self.peak - self.minimum) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: SchedulerType) -> Schedule {
        Schedule { kind, peak: 1.0, minimum: 0.1, warmup_steps: 10, decay_steps: 20, max_steps: 110 }
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
        for kind in [Cosine, Linear, Constant, WarmupStableDecay] {
            for (warmup_steps, max_steps) in [(0, 1), (0, 2), (1, 2), (2, 2), (5, 2), (3, 30)] {
                let s = Schedule { minimum: 0.0, warmup_steps, decay_steps: 4, max_steps, ..schedule(kind) };
                (1..=max_steps).for_each(|step| assert!(s.at(step) > 0.0, "{kind:?}: step {step} of {s:?}"));
            }
            let alone = Schedule { warmup_steps: 0, max_steps: 1, decay_steps: 1, ..schedule(kind) };
            assert_eq!(alone.at(1), 1.0, "{kind:?}: one step trains at the peak");
        }
    }
}
