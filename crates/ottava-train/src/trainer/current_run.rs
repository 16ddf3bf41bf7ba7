//! The run of a trainer.

use super::environment::Environment;
use crate::run::Run;
use ottava_recipe::mode::StepPrecision;
use ottava_sentinel::SentinelState;
use ottava_settings::RunConfig;
use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};

/// The run of a trainer, and the precision of its products. The run is absent only while it is built again, since memory has no room for two runs.
pub struct CurrentRun {
    run: Option<Run>,
    /// The precision of the last step.
    precision: StepPrecision,
    /// The linears whose products currently read BF16 operands.
    demoted: BTreeSet<String>,
}

/// The reason why the run is never absent when it is used.
const BUILT: &str = "a run is built anew at once";

impl CurrentRun {
    pub(super) fn new(run: Run) -> CurrentRun {
        CurrentRun { run: Some(run), precision: StepPrecision::Recipe, demoted: BTreeSet::new() }
    }

    /// Frees the run. [`CurrentRun::replace`] must follow.
    pub(super) fn free(&mut self) {
        self.run = None;
    }

    /// Stores a run that was built again. All its linears compute by the recipe.
    pub(super) fn replace(&mut self, run: Run) {
        self.run = Some(run);
        self.demoted.clear();
    }

    pub(super) fn into_inner(self) -> Run {
        self.run.expect(BUILT)
    }

    /// Returns the precision of the products of the step in progress.
    pub(super) fn precision(&self) -> StepPrecision {
        self.precision
    }

    /// Sets the products that `step` computes in BF16, given the `decisions` so far. A period in BF16 ends with a check by the recipe.
    pub(super) fn follow(&mut self, step: u64, decisions: &SentinelState, environment: &Environment) {
        let config = &environment.config;
        let demoted = decisions.demoted_in(config.sentinel.check_before(step));
        if demoted != self.demoted {
            self.set_high_precision(&demoted);
            if environment.ranks.leads() {
                let back: Vec<_> = self.demoted.difference(&demoted).map(String::as_str).collect();
                if !back.is_empty() {
                    tracing::info!("step {step}: the recipe is tried again in {}", back.join(", "));
                }
            }
            self.demoted = demoted;
        }
        let precision = precision_of(step, decisions, config);
        if precision != std::mem::replace(&mut self.precision, precision) {
            let (name, and) = match precision {
                StepPrecision::High => ("bfloat16", "casts still measure"),
                StepPrecision::Recipe => (config.precision.recipe.as_str(), "scales are up to date"),
            };
            tracing::info!("from step {step} on, products are computed in {name}; {and}");
        }
    }
}

/// Returns the precision of the products of `step`, given the `decisions` so far.
pub(super) fn precision_of(step: u64, decisions: &SentinelState, config: &RunConfig) -> StepPrecision {
    match decisions.is_high_in(config.sentinel.check_before(step)) {
        true => StepPrecision::High,
        false => config.precision.precision_of(step),
    }
}

impl Deref for CurrentRun {
    type Target = Run;

    fn deref(&self) -> &Run {
        self.run.as_ref().expect(BUILT)
    }
}

impl DerefMut for CurrentRun {
    fn deref_mut(&mut self) -> &mut Run {
        self.run.as_mut().expect(BUILT)
    }
}
