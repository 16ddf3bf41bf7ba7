//! Metrics of completions that are out of the ordinary.

use super::contract::{Alarm, Observer, Watched};
use crate::trainer::report::StepReport;
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, RolloutBounds, RolloutDetector};

/// Looks for metrics of completions that are out of their bounds, in each step of reinforcement learning.
pub(super) struct Rollouts {
    detector: RolloutDetector,
}

impl Rollouts {
    pub(super) fn new(bounds: RolloutBounds, memory: &AlarmMemory) -> Rollouts {
        Rollouts { detector: RolloutDetector::new(bounds, memory.rollouts.clone()) }
    }
}

impl Observer for Rollouts {
    fn after_step(&mut self, done: &StepReport, watched: &mut Watched) -> Result<()> {
        let policy = watched.environment.config.alarms.rollouts;
        for finding in self.detector.see(|name| done.metrics.get(name)) {
            let (name, text) = (finding.alarm.as_str(), finding.to_string());
            watched.raise(done.step, policy.into(), Alarm { name, tensors: &[], value: finding.value, text })?;
        }
        Ok(())
    }

    fn remember(&self, _: &[CastRecord], memory: &mut AlarmMemory) {
        memory.rollouts = self.detector.history().clone();
    }
}
