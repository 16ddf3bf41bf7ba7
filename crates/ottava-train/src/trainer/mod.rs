//! The training loop: data, checkpoints, metrics and signals.
//!
//! A [`Trainer`] goes through the phases of a run (`phase.rs`). `Trainer::walk` calls one function for each phase:
//!
//! | phase | file |
//! |---|---|
//! | rows, update, steps with values that are not finite | `update.rs` |
//! | evaluations, the best evaluation, early stopping | `evaluation.rs` |
//! | statistics of casts, checkpoints, requests to stop | `saving.rs` |
//! | snapshots in the memory of hosts | `memory.rs` |
//! | ranks that are slower than the others | `stragglers.rs` |
//! | sentinel, alarms, recorded tensors, repeated passes | `observers/` |
//! | return to an earlier checkpoint, after any phase | `rollback.rs` |
//!
//! `assembly.rs` makes a trainer from the checkpoint that `start.rs` finds and the inputs that `inputs.rs` reads. `building.rs` makes the rows and
//! the model. `end.rs` returns the result of a run.
//!
//! `Progress` holds the state that later steps depend on, and a checkpoint saves it unchanged. A rollback builds the run again from an earlier
//! checkpoint, as a resumed process does (`rollback.rs`). It restores the `Progress` of this checkpoint, but keeps the history of rollbacks and the
//! position in the data, so the run continues with new rows. The log of rollbacks, `rollbacks.jsonl`, is written before the next checkpoint.

mod assembly;
mod building;
mod current_run;
mod end;
mod environment;
mod evaluation;
mod files;
mod gpu_meter;
mod inputs;
mod memory;
mod observers;
mod outputs;
mod report;
mod rollback;
mod rollback_log;
mod saving;
mod start;
mod step_in_progress;
mod stragglers;
mod update;

pub use current_run::CurrentRun;
pub use report::{StepCost, StepReport};
pub use start::{RunLock, Start, build, log_exceptions};

use crate::objective::Rows;
use crate::objective::rollout::Clients;
use crate::phase::Phase;
use crate::run::Run;
use crate::tasks::{RunSamples, RunTasks};
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
    // Declared before the ranks, so it is dropped first: freeing the pinned memory of a save waits for the GPU. If a rank is lost, this wait never
    // returns, and only a process that still has its communicator is ended.
    outputs: Outputs,
    /// The model, the optimizer and the step.
    pub run: CurrentRun,
    schedule: Schedule,
    rows: Box<dyn Rows>,
    tasks: RunTasks,
    samples: RunSamples,
    /// The state that later steps depend on, as the next checkpoint stores it. Between saves, `rows` holds the position in the data, and `observers`
    /// hold the memory of alarms.
    progress: Progress,
    observers: Observers,
    environment: Environment,
}

impl Trainer {
    /// Trains to the end, and calls `report` after each step. If samples are to be generated, gathers the slices of weights at the end. When `stop`
    /// becomes true on any rank, all ranks save a checkpoint after the step in progress and return [`Error::Interrupted`].
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
        // A request to stop ends all ranks at the same step, so they finish together.
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

    /// Lets `clients` draw and score the completions of a run with `reinforcement.endpoint`; before [`Trainer::run`].
    pub fn connect(&mut self, clients: Box<dyn Clients>) {
        self.rows.connect(clients);
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

    /// Carries out `phases` in order, until the run returns to an earlier checkpoint.
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

    /// Computes the log-probabilities of the reference model that are still missing.
    fn compute_reference(&mut self) -> Result<()> {
        if !self.rows.needs_reference() {
            return Ok(());
        }
        let Run { model, step, .. } = &mut *self.run;
        self.rows.compute_reference(model, step)
    }

    /// Calls `show` for each observer at this moment of the run.
    fn observe(&mut self, show: impl FnMut(&mut dyn Observer, &mut Watched) -> Result<()>) -> Result<()> {
        let Trainer { outputs, run, progress, observers, environment, .. } = self;
        observers.each(environment, run, progress, outputs.files.as_mut(), show)
    }

    /// Sets the file system that writes checkpoints, so that tests can make operations slow or fail.
    pub fn set_fs(&mut self, fs: &'static dyn Fs) {
        self.outputs.saver.set_fs(fs);
    }

    /// Returns the number of tokens per optimizer step, summed over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.environment.config.tokens_per_step()
    }

    /// Returns the bytes of the tensors of a checkpoint, written by all ranks.
    pub fn checkpoint_bytes(&self) -> u64 {
        self.environment.resolved.memory.checkpoint_bytes
    }

    /// Returns the number of steps of the run.
    pub fn max_steps(&self) -> u64 {
        self.schedule.max_steps
    }

    /// Returns whether this rank writes the run's files and reports its progress.
    pub fn leads(&self) -> bool {
        self.environment.ranks.leads()
    }

    /// Returns the run's folder.
    pub fn output_dir(&self) -> &Path {
        &self.environment.config.output_dir
    }

    /// Returns the validation losses so far, each with its step.
    pub fn eval_losses(&self) -> &[(u64, f64)] {
        &self.outputs.history.eval_losses
    }
}

/// How a walk through phases ends.
#[derive(PartialEq, Eq)]
enum Walk {
    /// All phases were carried out.
    Completed,
    /// The run returned to an earlier checkpoint, and the remaining phases were skipped.
    RolledBack,
}
