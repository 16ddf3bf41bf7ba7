//! The training loop with data, checkpoints, metrics and signals.
//!
//! A [`Trainer`] walks the phases of a run (`phase.rs`), and `Trainer::walk` says which function carries out each phase:
//!
//! | phase | file |
//! |---|---|
//! | rows and update, steps that are not finite | `update.rs` |
//! | evaluations, the best one, early stopping | `evaluation.rs` |
//! | statistics of casts, checkpoints, requests to stop | `saving.rs` |
//! | sentinel, alarms, recorded tensors, repeated passes | `observers/` |
//! | the return to an earlier checkpoint, after any phase | `rollback.rs` |
//!
//! `assembly.rs` makes a trainer, of the checkpoint that `start.rs` finds and the inputs that `inputs.rs` reads; `building.rs` makes rows and model.
//! `end.rs` returns the result of a run.
//!
//! All that decides about later steps is in one `Progress`, which a checkpoint saves as it is. A rollback replaces it, except the history of
//! rollbacks and the position in the data: `rollback.rs` builds the run anew from the checkpoint, as a resumed process does, and goes on with the rows
//! that come next. The log of rollbacks, `rollbacks.jsonl`, is ahead of the checkpoints.

mod assembly;
mod building;
mod current_run;
mod end;
mod environment;
mod evaluation;
mod files;
mod inputs;
mod observers;
mod outputs;
mod report;
mod rollback;
mod rollback_log;
mod saving;
mod start;
mod step_in_progress;
mod update;

pub use current_run::CurrentRun;
pub use report::{StepCost, StepReport};
pub use start::{RunLock, Start, build, log_exceptions};

use crate::objective::Rows;
use crate::phase::Phase;
use crate::run::Run;
use environment::Environment;
use observers::{Observer, Observers, Watched};
use ottava_checkpoint::Progress;
use ottava_common::error::{Error, Result};
use ottava_common::fs::Fs;
use ottava_parallel::optim::Schedule;
use outputs::Outputs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use step_in_progress::StepInProgress;

/// A run in progress.
pub struct Trainer {
    // Dropped before the ranks, since freeing the pinned memory of a save waits for the GPU: while there is a communicator, a process that waits for a
    // lost rank is ended.
    outputs: Outputs,
    /// Model, optimizer and step.
    pub run: CurrentRun,
    schedule: Schedule,
    rows: Box<dyn Rows>,
    /// All that decides about later steps, as the next checkpoint has it; but the position in the data and the memory of alarms, which `rows` and
    /// `observers` hold between saves.
    progress: Progress,
    observers: Observers,
    environment: Environment,
}

impl Trainer {
    /// Trains to the end, calling `report` after each step; if samples are to be generated, slices of weights are gathered then. When `stop`
    /// becomes true on any rank, all save after the step in progress and return [`Error::Interrupted`].
    pub fn run(&mut self, stop: &AtomicBool, report: &mut dyn FnMut(&StepReport)) -> Result<()> {
        let mut trained = self.train(stop, report);
        let Environment { config, resolved, ranks, .. } = &self.environment;
        if trained.is_err() && ranks.size() == 1 {
            self.outputs.finish_save(ranks);
        }
        if trained.is_ok() && !config.generation.prompts.is_empty() && ranks.have_whole_model() {
            let Run { model, step, .. } = &mut *self.run;
            trained = step.partition().gather(model);
        }
        // Ranks stop together.
        let finished = match &trained {
            Err(error) if !error.is_stop() => Ok(()),
            _ => ranks.finish(),
        };
        let outcome = trained.and(finished).map_err(|error| match resolved.explain(error) {
            Error::Memory(text) => Error::Memory(format!("{text}\n{}", self.describe_latest_checkpoint())),
            other => other,
        });
        self.outputs.record_end(&config.output_dir, self.progress.step, outcome.as_ref().err());
        outcome
    }

    fn train(&mut self, stop: &AtomicBool, report: &mut dyn FnMut(&StepReport)) -> Result<()> {
        let next = |trainer: &Trainer| StepInProgress::begin(trainer.progress.step + 1, trainer.schedule.max_steps);
        let mut current = next(self);
        self.walk(&Phase::BEFORE_STEPS, &mut current, stop)?;
        while !self.has_ended() {
            current = next(self);
            if self.walk(&Phase::OF_STEP, &mut current, stop)? == Walk::RolledBack {
                continue;
            }
            report(&current.report);
            if let Some(end) = current.end {
                return Err(end);
            }
        }
        Ok(())
    }

    /// Goes through `phases`, until the run goes back to an earlier checkpoint.
    fn walk(&mut self, phases: &[Phase], current: &mut StepInProgress, stop: &AtomicBool) -> Result<Walk> {
        for phase in phases {
            match phase {
                Phase::Reference => self.compute_reference()?,
                Phase::FirstEvaluation => self.evaluate_first()?,
                Phase::Rows => self.load(current)?,
                Phase::Checks => {
                    let step = current.report.step;
                    self.observe(|observer, watched| observer.before_step(step, &current.rows, watched))?;
                }
                Phase::Update => self.update(current)?,
                Phase::Evaluation => self.evaluate_step(current)?,
                Phase::Statistics => self.log_due_casts()?,
                Phase::Save => self.save_due(current, stop)?,
            }
            if self.roll_back()? {
                return Ok(Walk::RolledBack);
            }
        }
        Ok(Walk::Completed)
    }

    /// Computes the log-probabilities of a reference model that are still missing.
    fn compute_reference(&mut self) -> Result<()> {
        if !self.rows.needs_reference() {
            return Ok(());
        }
        let Run { model, step, .. } = &mut *self.run;
        self.rows.compute_reference(model, step)
    }

    /// Shows a moment of the run to each observer.
    fn observe(&mut self, show: impl FnMut(&mut dyn Observer, &mut Watched) -> Result<()>) -> Result<()> {
        let Trainer { outputs, run, progress, observers, environment, .. } = self;
        observers.each(environment, run, progress, outputs.files.as_mut(), show)
    }

    /// Writes checkpoints through `fs`, to make operations slow or fail.
    pub fn set_fs(&mut self, fs: &'static dyn Fs) {
        self.outputs.saver.set_fs(fs);
    }

    /// Tokens per optimizer step, of all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.environment.config.tokens_per_step()
    }

    /// Whether this rank writes the run's files and reports its progress.
    pub fn leads(&self) -> bool {
        self.environment.ranks.leads()
    }

    /// The run's folder.
    pub fn output_dir(&self) -> &Path {
        &self.environment.config.output_dir
    }

    /// Validation losses so far, by step.
    pub fn eval_losses(&self) -> &[(u64, f64)] {
        &self.outputs.history.eval_losses
    }
}

/// How a walk through phases ends.
#[derive(PartialEq, Eq)]
enum Walk {
    /// All phases were carried out.
    Completed,
    /// The run went back to an earlier checkpoint, and the rest of the phases is left out.
    RolledBack,
}
