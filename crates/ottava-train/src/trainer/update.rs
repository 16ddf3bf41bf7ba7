//! The update of a step: its rows, forward and backward, and the reaction to values that are not finite.

use super::Trainer;
use super::report::{StepCost, StepReport, not_finite, peak_memory, warn_of_infinities};
use super::step_in_progress::StepInProgress;
use crate::run::Run;
use crate::step::StepResult;
use ottava_common::error::{Error, Result};
use ottava_parallel::optim::Overflow;
use ottava_sentinel::NonFiniteSteps;
use ottava_settings::AlarmsConfig;
use serde_json::Map;

/// The maximum number of times that a step loads other rows because its rows have no target.
const MOST_SKIPPED: usize = 1000;

impl Trainer {
    /// Loads the rows of the step in progress. The decisions so far set the precision of the step.
    pub(super) fn load(&mut self, current: &mut StepInProgress) -> Result<()> {
        self.run.follow(current.report.step, &self.progress.sentinel, &self.environment);
        let precision = self.run.precision();
        let Run { model, step, .. } = &mut *self.run;
        let place = self.rows.state();
        match self.rows.load(model, step, precision) {
            Err(error @ Error::Cancelled(_)) => Err(self.save_before_rows(place, error)),
            rows => {
                current.rows = rows?;
                Ok(())
            }
        }
    }

    /// Computes the step in progress, and shows its report to the observers.
    pub(super) fn update(&mut self, current: &mut StepInProgress) -> Result<()> {
        let step = current.report.step;
        let learning_rate = self.schedule.at(step);
        let result = self.run_step(learning_rate, current)?;
        self.skip_or_fail(step, &result)?;
        self.check_replicas(step)?;
        self.find_stragglers(step)?;
        let config = &self.environment.config;
        let Run { model, step: work, .. } = &mut *self.run;
        let casts = model.scaling().losses(work.partition())?;
        warn_of_infinities(step, &casts.non_finite);
        let router_loads = match model.config().experts() {
            Some(_) => work.partition().router_loads(model)?,
            None => Vec::new(),
        };
        let rate = config.router.bias_update_rate;
        if rate > 0.0 && result.is_finite() && !result.is_skipped {
            model.balance_routers(&router_loads, rate)?;
        }
        self.progress.step = step;
        self.progress.tokens += result.tokens;
        let is_read = self.environment.ranks.leads() && step.is_multiple_of(config.logging.logging_steps);
        let gpu = if is_read { self.outputs.gpu_meter.read(model.device()) } else { Map::new() };
        let tokens_per_second = result.tokens as f64 / current.begin.elapsed().as_secs_f64();
        current.report = StepReport {
            learning_rate,
            loss_scale: self.progress.loss_scale.clone(),
            cost: StepCost {
                tokens_per_second,
                mfu: self.outputs.record.utilization(tokens_per_second),
                peak_memory_bytes: peak_memory(model.device()),
            },
            gpu,
            casts: (!model.scaling().is_empty()).then_some(casts),
            router_loads,
            metrics: std::mem::take(&mut current.rows.metrics).and(work.metrics(&result.sums)),
            result,
            ..std::mem::take(&mut current.report)
        };
        self.observe(|observer, watched| observer.after_step(&current.report, watched))
    }

    /// Runs the step on the loaded rows. If the rows have no target, warns and loads the next rows.
    fn run_step(&mut self, learning_rate: f64, current: &mut StepInProgress) -> Result<StepResult> {
        let mut skipped = 0;
        loop {
            let precision = self.run.precision();
            match self.run.step(learning_rate, precision) {
                Err(Error::NoTargets(text)) if skipped < MOST_SKIPPED => {
                    skipped += 1;
                    let step = current.report.step;
                    tracing::warn!("step {step}: {text}; these sequences are skipped, and the next ones are taken");
                    self.load(current)?;
                }
                done => return done,
            }
        }
    }

    /// Updates the loss scale. Skips the step if its gradient norm is above the limit, or if gradients are not finite and the settings allow this.
    ///
    /// Errors with [`Error::NonFinite`] on all ranks if the run ends at this step.
    fn skip_or_fail(&mut self, step: u64, result: &StepResult) -> Result<()> {
        let goes_on = self.follow_loss_scale(step, result.is_finite())?;
        match (goes_on, result.is_skipped) {
            (true, true) => return self.skip_step(),
            (true, false) => self.progress.sentinel.skipped_in_a_row = 0,
            (false, _) => {}
        }
        if goes_on || self.skips_non_finite(step)? {
            return Ok(());
        }
        // Infinities in the casts of this step may explain the error.
        self.log_casts(step)?;
        let precision = self.run.precision();
        let Run { model, step: work, .. } = &mut *self.run;
        let (bad, ranks) = (work.first_bad_gradient(model, precision)?, &self.environment.ranks);
        let bad = ranks.first_named("the gradient that is not finite", bad)?;
        // All ranks reach this call.
        self.outputs.finish_save(ranks);
        Err(not_finite(step, result.loss, bad))
    }

    /// Updates the loss scale after a step. Returns false if the gradients were not finite and the loss scale is at its minimum, or not used.
    fn follow_loss_scale(&mut self, step: u64, finite: bool) -> Result<bool> {
        let how = self.environment.config.precision.loss_scaling();
        let (Some(scale), Some(how)) = (&mut self.progress.loss_scale, how) else { return Ok(finite) };
        let outcome = scale.update(finite, how);
        if outcome == Overflow::Skipped {
            self.run.optimizer.skip_step();
            tracing::warn!(
                "step {step}: gradients are not finite and no weight was changed; the loss scale is {} from here on",
                scale.scale
            );
        }
        self.run.step.set_loss_scale(scale.scale)?;
        Ok(outcome != Overflow::AtMinimum)
    }

    /// Skips a step whose gradient norm is not finite, if `alarms.non_finite_steps` allows it. Returns whether it did. A skipped step has not changed
    /// any weight.
    fn skips_non_finite(&mut self, step: u64) -> Result<bool> {
        let AlarmsConfig { non_finite_steps, max_skipped_steps, .. } = self.environment.config.alarms;
        if non_finite_steps == NonFiniteSteps::Stop || self.progress.sentinel.skipped_in_a_row >= max_skipped_steps {
            return Ok(false);
        }
        self.skip_step()?;
        if self.leads() {
            tracing::warn!(
                "step {step}: gradients are not finite and no weight was changed; the step is skipped, number {} of at most \
                 {max_skipped_steps} in a row",
                self.progress.sentinel.skipped_in_a_row
            );
        }
        Ok(true)
    }

    /// Counts a step that has not changed any weight. Casts the weights as a resumed run does, because the update has not measured their amaxes.
    fn skip_step(&mut self) -> Result<()> {
        self.progress.sentinel.skipped_in_a_row += 1;
        self.progress.sentinel.skipped_steps += 1;
        self.run.optimizer.skip_step();
        self.run.quantize_weights()?;
        self.run.step.forget_captures();
        Ok(())
    }

    /// Searches for slow ranks, if `parallel.straggler_steps` makes a search due.
    fn find_stragglers(&mut self, step: u64) -> Result<()> {
        let (parallel, ranks) = (&self.environment.config.parallel, &self.environment.ranks);
        let every = parallel.straggler_steps;
        if every == 0 || !step.is_multiple_of(every) || ranks.size() == 1 {
            return Ok(());
        }
        let is_slow = self.outputs.stragglers.search(&self.environment.device, ranks, parallel.straggler_ratio)?;
        if let Some(memory) = self.outputs.memory.as_ref().filter(|_| is_slow) {
            memory.is_slow();
        }
        Ok(())
    }

    /// Compares the weights of ranks that hold the same weights, if `parallel.check_replicas` makes a comparison due.
    fn check_replicas(&mut self, step: u64) -> Result<()> {
        let every = self.environment.config.parallel.check_replicas;
        if every == 0 || !step.is_multiple_of(every) {
            return Ok(());
        }
        let Run { model, optimizer, step: work, .. } = &mut *self.run;
        let compared = work.partition().compare_replicas(model, &mut **optimizer, &format!("after step {step}"));
        // Ranks with other layers also return the error.
        self.environment.ranks.together("the comparison of replicas", compared)
    }
}
