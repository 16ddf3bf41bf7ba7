//! The observers of a run: comparisons with BF16, recorded tensors, repeated passes, and alarms.
//!
//! An [`Observer`] sees the run at three moments: before a step with the rows of the step loaded, after the step with its report, and when
//! statistics of casts are logged. It may log what it finds, change decisions in `Progress`, raise an alarm, or ask the run to pause, to go back to an
//! earlier checkpoint or to stop ([`Requests`]). The trainer calls all observers in the order of [`Observers::new`], and follows their requests.
//! All ranks see the same numbers, so all ranks ask for the same.
//!
//! What an observer remembers between steps is in [`AlarmMemory`], which checkpoints save. After a rollback, the observers are new and go on from the
//! memory of the checkpoint.
//!
//! To add an alarm: a detector in `ottava-sentinel`, a key in `settings/alarms.rs`, and an observer in this folder that calls `Watched::raise`. To add a
//! check with passes of its own: a variant of `Check` (`phase.rs`), which the plan rehearses, and its observer.

mod casts;
mod comparison;
mod contract;
mod repetition;
mod rollouts;
mod routers;
mod spikes;
mod tensors;

pub(super) use contract::{Observer, Requests, Watched};

use super::current_run::CurrentRun;
use super::environment::Environment;
use super::files::RunFiles;
use crate::phase::Check;
use casts::Casts;
use comparison::Comparison;
use ottava_checkpoint::Progress;
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::AlarmMemory;
use ottava_settings::RunConfig;
use repetition::Repetition;
use rollouts::Rollouts;
use routers::Routers;
use spikes::Spikes;
use tensors::Tensors;

/// The observers of a run, and what they ask for.
pub(super) struct Observers {
    all: Vec<Box<dyn Observer>>,
    pub(super) requests: Requests,
}

impl Observers {
    /// The observers of the run of `config`, which go on from `memory`. Counts of `casts` up to now belong to no line of their log.
    pub(super) fn new(config: &RunConfig, memory: &AlarmMemory, casts: &[CastRecord]) -> Observers {
        let check = |check| -> Box<dyn Observer> {
            match check {
                Check::Comparison => Box::new(Comparison),
                Check::Tensors => Box::new(Tensors),
                Check::Repetition => Box::new(Repetition),
            }
        };
        let mut all: Vec<_> = Check::of(config).into_iter().map(check).collect();
        all.push(Box::new(Spikes::new(config.alarms.spikes, memory)));
        all.push(Box::new(Routers));
        all.push(Box::new(Rollouts::new(config.alarms.rollout_bounds(), memory)));
        all.push(Box::new(Casts::new(config.alarms.cast_bounds(), memory, casts)));
        Observers { all, requests: Requests::default() }
    }

    /// Shows a moment of the run to each observer, with what is `watched`: environment, run, progress and files.
    pub(super) fn each(
        &mut self,
        environment: &Environment,
        run: &mut CurrentRun,
        progress: &mut Progress,
        files: Option<&mut RunFiles>,
        mut show: impl FnMut(&mut dyn Observer, &mut Watched) -> Result<()>,
    ) -> Result<()> {
        let mut watched = Watched { environment, run, progress, files, requests: &mut self.requests };
        self.all.iter_mut().try_for_each(|observer| show(&mut **observer, &mut watched))
    }

    /// What the observers remember, with what `casts` have counted up to now.
    pub(super) fn memory(&self, casts: &[CastRecord]) -> AlarmMemory {
        let mut memory = AlarmMemory::default();
        self.all.iter().for_each(|observer| observer.remember(casts, &mut memory));
        memory
    }
}
