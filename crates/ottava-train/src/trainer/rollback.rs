//! Returns a run to an earlier checkpoint after an alarm. The run then continues with new rows.

use super::Trainer;
use super::assembly::end_comparison;
use super::building::restored_run;
use super::environment::Environment;
use super::files::RunFiles;
use super::observers::Observers;
use super::outputs::History;
use super::rollback_log::write_rollbacks;
use super::start::{Resumed, find_shared_checkpoint_until};
use ottava_checkpoint::Progress;
use ottava_common::error::{Error, Result};
use ottava_sentinel::{Rollback, SentinelState};

impl Trainer {
    /// Returns to an earlier checkpoint if an observer requests it and such a checkpoint exists. Returns whether it did. All ranks decide alike,
    /// because they have seen the same numbers.
    ///
    /// Errors with [`Error::Alarm`] if the run has already used its maximum number of rollbacks.
    pub(super) fn roll_back(&mut self) -> Result<bool> {
        let Some(reason) = self.observers.requests.rollback.take() else { return Ok(false) };
        let Environment { config, ranks, .. } = &self.environment;
        let (distance, most) = (config.alarms.rollback.rollback_steps, config.alarms.rollback.max_rollbacks);
        if let Some(saved) = self.outputs.saver.finish(ranks)? {
            tracing::info!("saved {}", saved.path.display());
        }
        let step = self.progress.step;
        let Some(resumed) = find_shared_checkpoint_until(config, step.saturating_sub(distance), ranks)? else {
            if ranks.leads() {
                tracing::warn!("step {step}: no checkpoint is at least {distance} steps old, so the run goes on");
            }
            return Ok(false);
        };
        if self.progress.sentinel.rollbacks.len() as u64 >= most {
            return Err(Error::Alarm(format!(
                "step {step}: {reason}; the run has gone back {most} times (`alarms.rollback.max_rollbacks`) and ends; {} is the last checkpoint before",
                resumed.path.display()
            )));
        }
        let rollback = Rollback { from: step, to: resumed.progress.step, reason, data: self.rows.state() };
        if ranks.leads() {
            tracing::warn!(
                "step {step}: {}; the run goes back to {} and skips the rows of steps {} to {step}",
                rollback.reason,
                resumed.path.display(),
                rollback.to + 1,
            );
        }
        self.go_back(resumed, rollback)?;
        Ok(true)
    }

    fn go_back(&mut self, mut resumed: Resumed, rollback: Rollback) -> Result<()> {
        let Environment { config, ranks, .. } = &self.environment;
        let mut rollbacks = self.progress.sentinel.rollbacks.clone();
        rollbacks.push(rollback);
        let logged = if ranks.leads() { write_rollbacks(&config.output_dir, &rollbacks) } else { Ok(()) };
        ranks.together("the log of rollbacks", logged)?;
        self.tasks.forget_model();
        self.samples.forget_model();
        self.run.free();
        let run = restored_run(&self.environment, Some(&resumed));
        let mut run = ranks.together("the model of the checkpoint", run)?;
        run.quantize_weights()?;
        // The progress comes from the checkpoint. Only the history of rollbacks continues, and `rows` keep the position in the data.
        self.progress = Progress {
            sentinel: SentinelState { rollbacks, ..resumed.progress.sentinel.clone() },
            loss_scale: resumed.progress.loss_scale.clone().or(self.progress.loss_scale.take()),
            pending: None,
            ..resumed.progress.clone()
        };
        end_comparison(&mut self.progress.sentinel, &self.environment);
        if let Some(scale) = &self.progress.loss_scale {
            run.step.set_loss_scale(scale.scale)?;
        }
        let casts = run.step.partition().casts(&mut run.model)?;
        self.run.replace(run);
        self.rows.forget_unfinished();
        let outputs = &mut self.outputs;
        let reopen = |files: RunFiles| RunFiles::open(config, files.lock, Some(&mut resumed), !casts.is_empty());
        outputs.files = ranks.together("the run's files", outputs.files.take().map(reopen).transpose())?;
        outputs.history = History::read(&config.output_dir);
        outputs.keep_best(self.progress.best.as_ref(), config);
        self.observers = Observers::new(config, &self.progress.alarms, &casts);
        Ok(())
    }
}
