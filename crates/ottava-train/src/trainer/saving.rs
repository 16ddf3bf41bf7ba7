//! The end of a step: statistics of casts, a checkpoint or a snapshot, and the end of the run if an observer or a signal requests it.

use super::Trainer;
use super::environment::Environment;
use super::memory::{MemorySnapshots, Told};
use super::start::checkpoints;
use super::step_in_progress::StepInProgress;
use crate::run::Run;
use ottava_checkpoint::{Progress, Saved, Saver, Verify, latest_complete};
use ottava_common::error::{Error, Result};
use ottava_data::DataState;
use ottava_elastic::process::WorkerLink;
use ottava_settings::RunConfig;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// The folder below the run's folder with the average of the weights.
const AVERAGES: &str = "ema";

impl Trainer {
    /// Logs the statistics of casts if they are due.
    pub(super) fn log_due_casts(&mut self) -> Result<()> {
        let step = self.progress.step;
        match self.has_ended() || self.environment.config.logging.logs_casts(step) {
            true => self.log_casts(step),
            false => Ok(()),
        }
    }

    /// Logs the statistics of casts up to `step`, if the run logs statistics of casts.
    pub(super) fn log_casts(&mut self, step: u64) -> Result<()> {
        if self.environment.config.logging.cast_statistics_steps == 0 {
            return Ok(());
        }
        let Run { model, step: work, .. } = &mut *self.run;
        let casts = work.partition().casts(model)?;
        self.observe(|observer, watched| observer.statistics(step, &casts, watched))
    }

    /// Saves a checkpoint if one is due. If an observer requests a pause, or `stop` is true on any rank, also saves one and stores in `current` why
    /// the run ends.
    ///
    /// Errors with [`Error::Alarm`] if an observer requests that the run stops.
    pub(super) fn save_due(&mut self, current: &mut StepInProgress, stop: &AtomicBool) -> Result<()> {
        let (step, ends) = (self.progress.step, self.has_ended());
        if let Some(found) = self.observers.requests.stop.take() {
            self.outputs.finish_save(&self.environment.ranks);
            let latest = self.describe_latest_checkpoint();
            return Err(Error::Alarm(format!("stopped by an alarm after step {step}: {found}. {latest}")));
        }
        if ends && !self.is_last_step() && self.leads() {
            let e = &self.environment.config.evaluation;
            tracing::info!(
                "the run ends after step {step}: `{}` did not improve in {} evaluations in a row",
                e.metric_for_best_model,
                e.early_stopping_patience
            );
        }
        let Environment { config, ranks, .. } = &self.environment;
        let (ranks, saver) = (ranks.clone(), &mut self.outputs.saver);
        let is_late = ranks.leads() && config.checkpoint.is_due_after(self.outputs.saved_at.elapsed());
        let [snapshot, room] = self.outputs.memory.as_mut().map_or([0.0; 2], MemorySnapshots::told);
        let told = [f64::from(stop.load(Ordering::Relaxed)), saver.state(), f64::from(is_late), snapshot, room];
        let told = ranks.gather("request to stop, state of a save and its age, state of a snapshot", told)?;
        let paused = self.observers.requests.pause.take();
        let stops = paused.is_some() || told.iter().any(|[stop, ..]| *stop != 0.0);
        let is_late = told.iter().any(|[_, _, late, ..]| *late != 0.0);
        let saved = &mut current.report.saved;
        saved.extend(saver.advance(&ranks, told.iter().map(|[_, state, ..]| *state))?);
        let is_due = config.checkpoint.save_steps.is_due(step) || is_late;
        let is_regular = is_due || paused.is_some() || current.is_best || ends;
        if is_regular || stops {
            self.progress.is_interruption = !is_regular;
            // A run that stops early resumes from its last checkpoint.
            self.progress.is_model_only = config.checkpoint.save_only_model && !stops;
            saved.extend(self.save()?);
            if stops || ends || !self.outputs.saver.is_async() {
                saved.extend(self.outputs.saver.finish(&ranks)?);
            }
            if ends {
                self.save_average()?;
            }
        }
        if let Some(memory) = &self.outputs.memory {
            memory.report(step, &current.report.saved);
        }
        if !stops && !ends {
            self.snapshot_due(told.iter().map(|[.., state, room]| [*state, *room]))?;
        }
        let saved = &current.report.saved;
        let has_more = !ends || self.progress.pending.is_some();
        let from = saved
            .last()
            .map_or(String::new(), |saved| format!("; {}", goes_on_from(&self.environment.config, &saved.path)));
        current.end = match paused {
            Some(found) => Some(Error::Paused(format!("paused by the sentinel after step {step}: {found}{from}"))),
            None if stops && has_more => {
                Some(Error::Interrupted(format!("stopped by a signal after step {step}{from}")))
            }
            None => None,
        };
        Ok(())
    }

    /// Saves a checkpoint after a request to stop while rows were loaded, such as completions that clients draw. The position in the data before the
    /// load is `place`. Returns why the run ends; `cancelled` where nothing is saved, because there was no step yet or because other ranks may still load.
    pub(super) fn save_before_rows(&mut self, place: DataState, cancelled: Error) -> Error {
        let (step, ranks) = (self.progress.step, self.environment.ranks.clone());
        if step == 0 || ranks.size() > 1 {
            return cancelled;
        }
        self.outputs.finish_save(&ranks);
        let path = checkpoints(&self.environment.config.output_dir).join(format!("checkpoint-{step}"));
        // No run resumes from the model alone. A checkpoint of it is set aside.
        let saved = match path.exists() && !self.progress.is_model_only {
            true => Ok(()),
            false => {
                (self.progress.is_interruption, self.progress.is_model_only) = (true, false);
                self.save_at(place).and_then(|_| self.outputs.saver.finish(&ranks)).map(drop)
            }
        };
        match saved {
            Ok(()) => Error::Interrupted(format!(
                "stopped by a signal after step {step}; {}",
                goes_on_from(&self.environment.config, &path)
            )),
            Err(error) => error,
        }
    }

    /// Saves the average of the weights as a model folder, if the run has one.
    fn save_average(&mut self) -> Result<()> {
        let Environment { config, inputs, ranks, .. } = &self.environment;
        let Run { model, step: work, optimizer, .. } = &mut *self.run;
        if !config.ema.config().is_some_and(|ema| ema.has_begun(optimizer.steps())) {
            return Ok(());
        }
        let progress = Progress { is_model_only: true, ..self.progress.clone() };
        let mut saver = Saver::new(config.output_dir.join(AVERAGES), 1);
        let saved = work.with_averages(model, &mut **optimizer, |model, optimizer, step| {
            saver.begin(&progress, &inputs.template, model, optimizer, step.partition(), || Ok(Vec::new()))?;
            saver.finish(ranks)
        })?;
        saved.iter().for_each(|saved| tracing::info!("the average of the weights: {}", saved.path.display()));
        Ok(())
    }

    /// Begins to save a checkpoint of the current step. Returns the preceding checkpoint if it was not complete yet.
    fn save(&mut self) -> Result<Option<Saved>> {
        self.save_at(self.rows.state())
    }

    /// As [`Trainer::save`], with the position `place` in the data.
    fn save_at(&mut self, place: DataState) -> Result<Option<Saved>> {
        self.note_position(place)?;
        self.outputs.save(&self.environment, &self.progress, &mut self.run)
    }

    /// Notes the position `place` in the data, and all else that a checkpoint of this step stores besides tensors.
    pub(super) fn note_position(&mut self, place: DataState) -> Result<()> {
        let Run { model, step: work, .. } = &mut *self.run;
        // Without a log of casts, nothing reads the statistics of the casts.
        let casts = match self.environment.config.logging.cast_statistics_steps {
            0 => Vec::new(),
            _ => work.partition().casts(model)?,
        };
        self.progress.rows.loader = place;
        self.progress.rows.reference = self.rows.reference_digest();
        self.progress.rows.unfinished = self.rows.unfinished();
        self.progress.alarms = self.observers.memory(&casts);
        Ok(())
    }

    /// From now on, takes snapshots and gives them to `keeper`. The ranks of this host write them into `folder`. Call it before [`Trainer::run`].
    pub fn keep_snapshots(&mut self, keeper: WorkerLink, folder: PathBuf) -> Result<()> {
        let snapshots = MemorySnapshots::new(&self.environment, &mut self.run, keeper, folder);
        let snapshots = self.environment.ranks.together("the host memory for snapshots", snapshots)?;
        snapshots.started();
        self.outputs.memory = Some(snapshots);
        Ok(())
    }

    /// Advances the snapshot in progress, and begins one if it is due and all hosts have room. `told` has what each rank told.
    pub(super) fn snapshot_due(&mut self, told: impl Iterator<Item = Told> + Clone) -> Result<()> {
        let Some(memory) = &mut self.outputs.memory else { return Ok(()) };
        memory.advance(&self.environment.ranks, told.clone().map(|[state, _]| state))?;
        let step = self.progress.step;
        if !self.environment.config.recovery.is_due(step) {
            return Ok(());
        }
        if told.into_iter().any(|[_, room]| room == 0.0) {
            memory.leave_out(step, &self.environment.ranks);
            return Ok(());
        }
        self.note_position(self.rows.state())?;
        let progress = Progress { is_interruption: false, is_model_only: false, ..self.progress.clone() };
        let Some(memory) = &mut self.outputs.memory else { return Ok(()) };
        memory.begin(&self.environment, &progress, &mut self.run, self.outputs.files.as_ref())
    }

    /// Returns a sentence that names the checkpoint from which a failed run can resume.
    pub(super) fn describe_latest_checkpoint(&self) -> String {
        let folder = checkpoints(&self.environment.config.output_dir);
        match latest_complete(&folder, Verify::Sizes).map(|latest| latest.complete) {
            // The sentence names only settings that may change within a run.
            Ok(Some((path, _))) => {
                format!("`--resume` goes on from {}, also with other `recompute` and `weight_codes`.", path.display())
            }
            _ => "No checkpoint was saved before.".into(),
        }
    }
}

/// Says that the run can resume from the checkpoint at `path`, and how.
fn goes_on_from(config: &RunConfig, path: &Path) -> String {
    format!("`--resume` goes on from {}: {}", path.display(), config.ways_to_resume())
}
