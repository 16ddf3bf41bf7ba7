//! The log of completions, and metrics of completions that are out of the ordinary.

use super::contract::{Alarm, Observer, Watched};
use crate::objective::LoadedRows;
use crate::trainer::report::StepReport;
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, RolloutBounds, RolloutDetector};
use serde_json::Value;

/// Logs some completions of each generation, and looks for metrics of completions that are out of their bounds.
pub(super) struct Rollouts {
    detector: RolloutDetector,
}

impl Rollouts {
    pub(super) fn new(bounds: RolloutBounds, memory: &AlarmMemory) -> Rollouts {
        Rollouts { detector: RolloutDetector::new(bounds, memory.rollouts.clone()) }
    }
}

impl Observer for Rollouts {
    fn before_step(&mut self, step: u64, rows: &LoadedRows, watched: &mut Watched) -> Result<()> {
        let Some(log) = watched.files.as_mut().and_then(|files| files.completions.as_mut()) else { return Ok(()) };
        for example in rows.examples.iter().filter_map(Value::as_object) {
            let fields: Vec<_> = example.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
            log.append(step, &fields)?;
        }
        Ok(())
    }

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
