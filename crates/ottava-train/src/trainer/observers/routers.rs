//! Routers that send almost all tokens to the same experts.

use super::contract::{Alarm, Observer, Watched, listed};
use crate::trainer::report::StepReport;
use ottava_common::error::Result;
use ottava_sentinel::CollapsedRouter;
use ottava_settings::AlarmsConfig;

/// Looks for routers that have collapsed in a step, if statistics of the step are logged.
pub(super) struct Routers;

impl Observer for Routers {
    fn after_step(&mut self, done: &StepReport, watched: &mut Watched) -> Result<()> {
        let config = &watched.environment.config;
        let every = config.logging.cast_statistics_steps;
        if every == 0 || !done.step.is_multiple_of(every) {
            return Ok(());
        }
        let AlarmsConfig { routers: policy, collapsed_share, .. } = config.alarms;
        let found = CollapsedRouter::among(&done.router_loads, collapsed_share);
        let Some(value) = found.iter().map(|router| router.share).reduce(f64::max) else { return Ok(()) };
        let tensors: Vec<_> = found.iter().map(|router| router.name.as_str()).collect();
        let text = listed(&found, "routers");
        watched.raise(done.step, policy.into(), Alarm { name: "router_collapse", tensors: &tensors, value, text })
    }
}
