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
    /// The learning rate of `step`, counted from 1. The first step is not wasted on a rate of 0, and the last one reaches the
    /// minimum.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let from = match self.kind {
            SchedulerType::WarmupStableDecay => self.max_steps.saturating_sub(self.decay_steps).max(self.warmup_steps),
            _ => self.warmup_steps,
        };
        let span = self.max_steps.saturating_sub(from).max(1) as f64;
        let done = (step.saturating_sub(from) as f64 / span).min(1.0);
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
            assert_eq!((s.at(1), s.at(5), s.at(10)), (0.1, 0.5, 1.0), "{kind:?}");
            assert!((s.at(60) - middle).abs() < 1e-12, "{kind:?} in the middle: {}", s.at(60));
            assert!((s.at(110) - end).abs() < 1e-12, "{kind:?} at the end: {}", s.at(110));
        }
        assert_eq!(schedule(WarmupStableDecay).at(90), 1.0);
        assert!((schedule(WarmupStableDecay).at(100) - 0.55).abs() < 1e-12);
    }

    #[test]
    fn a_run_without_warm_up_starts_near_the_peak() {
        let s = Schedule { warmup_steps: 0, ..schedule(SchedulerType::Linear) };
        assert!(s.at(1) > 0.99 && s.at(1) <= 1.0);
    }
}
