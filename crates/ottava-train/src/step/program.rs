//! A step as a list of actions. The list is built once per run, printed by `ottava plan --program`, and checked before it runs.

use super::action::Action;
use super::check::{Check, Places};
use ottava_common::error::{Error, Result};
use ottava_parallel::{Schedule, Task, Zero};
use ottava_recipe::mode::Pass;
use serde::Serialize;
use std::fmt::{self, Display};

/// The micro-batches whose backward reduces gradients over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reductions {
    /// No micro-batch: there is one rank, or gradients stay on their rank.
    Never,
    /// The last micro-batch, after the gradients of all micro-batches have been added.
    Last,
    /// Each micro-batch, so no rank keeps whole gradients between micro-batches.
    Each,
}

impl Reductions {
    /// Returns the reductions of a step on `ranks` ranks with ZeRO stage `zero`.
    pub fn for_step(ranks: usize, zero: Zero) -> Reductions {
        match (ranks, zero) {
            (..=1, _) => Reductions::Never,
            (_, Zero::Nothing | Zero::OptimizerStates) => Reductions::Last,
            (_, Zero::Gradients | Zero::Weights) => Reductions::Each,
        }
    }
}

/// The actions of one process, in the order in which they are enqueued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Program {
    /// The purpose of the forward passes: [`Pass::Training`] with backward, [`Pass::Evaluation`] or [`Pass::Reference`] without.
    #[serde(skip)]
    pub pass: Pass,
    /// The actions, in order.
    pub actions: Vec<Action>,
}

impl Program {
    /// Returns an optimizer step of one process: forward and backward of one micro-batch after the other, then the update.
    pub fn step(micro_batches: usize, reductions: Reductions) -> Program {
        Program::step_of(&Schedule::of_one_rank(micro_batches), 0, reductions, false)
    }

    /// Returns an optimizer step of a rank of a pipeline: its tasks, then the update. `is_tied` says whether the rank has an embedding or a head that
    /// shares its weight with another rank.
    pub fn step_of(schedule: &Schedule, rank: usize, reductions: Reductions, is_tied: bool) -> Program {
        let reduces = |micro_batch| match reductions {
            Reductions::Never => false,
            Reductions::Last => micro_batch + 1 == schedule.micro_batches,
            Reductions::Each => true,
        };
        let reduce = (reductions != Reductions::Never).then_some(Action::Reduce);
        let end = reduce.into_iter().chain(is_tied.then_some(Action::SumTied)).chain([Action::Norm, Action::Update]);
        let (mut all, mut computed) = (Vec::new(), None);
        for action in actions(schedule, rank, schedule.tasks(rank), reduces) {
            all.push(action);
            // Losses are stored after the action that follows `Loss`. If the rank runs backward of this micro-batch next, this action is backward.
            all.extend(computed.take().map(|micro_batch| Action::StoreLosses { micro_batch }));
            if let Action::Loss { micro_batch } = action {
                computed = Some(micro_batch);
            }
        }
        all.extend(end);
        Program { pass: Pass::Training, actions: all }
    }

    /// Returns forward and backward of the micro-batches of one process. The gradients stay in the parameters.
    pub fn gradients(micro_batches: usize) -> Program {
        Program::gradients_of(&Schedule::of_one_rank(micro_batches), 0)
    }

    /// Returns forward and backward of the micro-batches on a rank of a pipeline. The gradients stay in the parameters.
    pub fn gradients_of(schedule: &Schedule, rank: usize) -> Program {
        Program { pass: Pass::Training, actions: actions(schedule, rank, schedule.tasks(rank), |_| false) }
    }

    /// Returns the program that computes the losses of one micro-batch without gradients.
    pub fn evaluation() -> Program {
        Program::evaluation_of(&Schedule::of_one_rank(1), 0)
    }

    /// Returns the program of a rank of a pipeline that computes the losses of the micro-batches of a schedule without gradients.
    pub fn evaluation_of(schedule: &Schedule, rank: usize) -> Program {
        Program { pass: Pass::Evaluation, actions: actions(schedule, rank, schedule.forward_tasks(rank), |_| false) }
    }

    /// Returns whether gradients are reduced over ranks.
    pub fn reduces(&self) -> bool {
        self.actions.contains(&Action::Reduce)
    }

    /// Errors with [`Error::Program`], the action and the reason, unless a process with stages at `places` can run all actions in this order and each
    /// stage runs each of `micro_batches` micro-batches once.
    pub fn check(&self, places: &Places, micro_batches: usize) -> Result<()> {
        let mut check = Check::new(self.pass, places, micro_batches);
        for (number, action) in self.actions.iter().enumerate() {
            let refused = |reason| Error::Program(format!("action {number} of the program ({action}): {reason}"));
            check.follow(*action).map_err(refused)?;
        }
        check.end().map_err(|reason| Error::Program(format!("the program ends too early: {reason}")))
    }
}

impl Display for Program {
    /// Writes a line for each action.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.actions.iter().try_for_each(|action| writeln!(f, "{action}"))
    }
}

/// Returns the actions of `tasks` of a rank, with the losses after the last stage of the model. `reduces` says which micro-batches reduce gradients.
fn actions(schedule: &Schedule, rank: usize, tasks: Vec<Task>, reduces: impl Fn(usize) -> bool) -> Vec<Action> {
    let mut actions = Vec::with_capacity(tasks.len());
    for task in tasks {
        actions.push(match task {
            Task::Forward { stage, micro_batch } => Action::Forward { stage, micro_batch },
            Task::Backward { stage, micro_batch, part } => {
                Action::Backward { stage, micro_batch, part, reduces: reduces(micro_batch) }
            }
            Task::Send { message, stage, micro_batch } => Action::Send { message, stage, micro_batch },
            Task::Receive { message, stage, micro_batch } => Action::Receive { message, stage, micro_batch },
        });
        if let Task::Forward { stage, micro_batch } = task
            && schedule.number(rank, stage) + 1 == schedule.all_stages()
        {
            actions.push(Action::Loss { micro_batch });
        }
    }
    actions
}
