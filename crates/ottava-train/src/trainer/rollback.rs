//! Going back to an earlier checkpoint after an alarm, and going on with the rows that come next.

use super::Trainer;
use super::alarms::Alarms;
use super::current_run::CurrentRun;
use super::files::RunFiles;
use super::inputs::restored_run;
use super::rollback_log::write_rollbacks;
use super::sentinel::Sentinel;
use super::start::{Resumed, find_shared_checkpoint_until, read_losses};
use ottava_checkpoint::Progress;
use ottava_common::error::{Error, Result};
use ottava_sentinel::{Rollback, SentinelState};

impl Trainer {
    /// Goes back to an earlier checkpoint if an alarm asks for it and there is one. All ranks have seen the same alarms.
    ///
    /// Errors with [`Error::Alarm`] if the run has gone back too often.
    pub(super) fn roll_back(&mut self) -> Result<bool> {
        let Some(reason) = self.sentinel.rollback.take() else { return Ok(false) };
        let (distance, most) = (self.config.alarms.rollback.rollback_steps, self.config.alarms.rollback.max_rollbacks);
        if let Some(saved) = self.saver.finish(&self.ranks)? {
            tracing::info!("saved {}", saved.path.display());
        }
        let until = self.progress.step.saturating_sub(distance);
        let Some(resumed) = find_shared_checkpoint_until(&self.config, until, &self.ranks)? else {
            if self.ranks.leads() {
                tracing::warn!(
                    "step {}: no checkpoint is at least {distance} steps old, so the run goes on",
                    self.progress.step
                );
            }
            return Ok(false);
        };
        if self.progress.sentinel.rollbacks.len() as u64 >= most {
            return Err(Error::Alarm(format!(
                "step {}: {reason}; the run has gone back {most} times (`alarms.rollback.max_rollbacks`) and ends; {} is the last checkpoint before",
                self.progress.step,
                resumed.path.display()
            )));
        }
        let rollback =
            Rollback { from: self.progress.step, to: resumed.progress.step, reason, data: self.rows.state() };
        if self.ranks.leads() {
            tracing::warn!(
                "step {}: {}; the run goes back to {} and skips the rows of steps {} to {}",
                rollback.from,
                rollback.reason,
                resumed.path.display(),
                rollback.to + 1,
                rollback.from
            );
        }
        self.go_back(resumed, rollback)?;
        Ok(true)
    }

    fn go_back(&mut self, mut resumed: Resumed, rollback: Rollback) -> Result<()> {
        let folder = self.config.output_dir.clone();
        let mut rollbacks = self.progress.sentinel.rollbacks.clone();
        rollbacks.push(rollback);
        let logged = if self.ranks.leads() { write_rollbacks(&folder, &rollbacks) } else { Ok(()) };
        self.ranks.together("the log of rollbacks", logged)?;
        let (device, documents) = (self.run.model.device().clone(), self.data.max_documents());
        self.run.free();
        let run = restored_run(&self.resolved.config, &self.sizes, &device, Some(&resumed), documents, &self.ranks);
        let mut run = self.ranks.together("the model of the checkpoint", run)?;
        run.quantize_weights()?;
        // All that decides is as the checkpoint has it, but the history of rollbacks and the position in the data.
        self.progress = Progress {
            sentinel: SentinelState { rollbacks, ..resumed.progress.sentinel.clone() },
            loss_scale: resumed.progress.loss_scale.clone().or(self.progress.loss_scale.take()),
            pending: None,
            ..resumed.progress.clone()
        };
        if let Some(scale) = &self.progress.loss_scale {
            run.step.set_loss_scale(scale.scale)?;
        }
        let casts = run.step.partition().casts(&mut run.model)?;
        self.run = CurrentRun::new(run);
        let reopen = |files: RunFiles| RunFiles::open(&self.config, files.lock, Some(&mut resumed), !casts.is_empty());
        self.files = self.ranks.together("the run's files", self.files.take().map(reopen).transpose())?;
        self.sentinel = Sentinel::default();
        [self.losses, self.eval_losses] = read_losses(&folder.join("metrics.jsonl"));
        self.alarms = Alarms::new(&self.config, &self.progress.alarms, &casts);
        self.saver.keep_best(
            self.progress.best.as_ref().filter(|_| self.config.evaluation.load_best_model_at_end).map(|best| best.step),
        );
        Ok(())
    }
}
