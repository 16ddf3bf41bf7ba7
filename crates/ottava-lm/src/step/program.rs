//! A step as a list of actions: a value that is built once per run, printed by `ottava plan --program`, and checked before it runs.

use super::check::{Check, Places};
use crate::error::{Error, Result};
use crate::mode::Pass;
use crate::parallel::{Message, Part, Schedule, Task, Zero};
use serde::Serialize;
use std::fmt::{self, Display};

/// One action of a program. The stages of a process and the micro-batches count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Forward of a stage. It reads the token ids of the micro-batch, or the output of the preceding stage.
    Forward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The losses, after forward of the last stage; in training also their gradient, from which backward starts.
    Loss {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Backward of a stage. It consumes the activations that forward saved, and adds to the gradients of the stage's parameters.
    Backward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
        /// The products that it computes.
        part: Part,
        /// Whether it starts to reduce the gradients of each unit over ranks as soon as it has added to them.
        reduces: bool,
    },
    /// Sends the output of a stage to the rank with the next one, or the gradient by its input to the rank with the preceding one.
    Send {
        /// What it sends.
        message: Message,
        /// The stage that has computed it.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives what a stage of another rank sends.
    Receive {
        /// What it receives.
        message: Message,
        /// The stage that reads it.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Copies the losses to the results of the step.
    StoreLosses {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Waits for the reductions that backward has started, and reduces the gradients of norms and biases and the amaxes of casts.
    Reduce,
    /// Adds the gradients of an embedding and of a head that share their weight, which the first and the last stage have.
    SumTied,
    /// The norm of all gradients.
    Norm,
    /// Updates scales, clips the gradients, updates and casts the weights, and drops the gradients.
    Update,
}

impl Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Action::Forward { stage, micro_batch } => write!(f, "forward of stage {stage}, micro-batch {micro_batch}"),
            Action::Loss { micro_batch } => write!(f, "loss of micro-batch {micro_batch}"),
            Action::Backward { stage, micro_batch, part, reduces } => {
                let reduces = if *reduces { ", reducing its gradients over ranks" } else { "" };
                let part = match part {
                    Part::Both => "backward",
                    Part::Dgrad => "dgrad",
                    Part::Wgrad => "wgrad",
                };
                write!(f, "{part} of stage {stage}, micro-batch {micro_batch}{reduces}")
            }
            Action::Send { message, stage, micro_batch } => {
                write!(f, "send the {} of stage {stage}, micro-batch {micro_batch}", message.as_str())
            }
            Action::Receive { message, stage, micro_batch } => {
                write!(f, "receive the {} for stage {stage}, micro-batch {micro_batch}", message.as_str())
            }
            Action::StoreLosses { micro_batch } => write!(f, "store the losses of micro-batch {micro_batch}"),
            Action::Reduce => write!(f, "reduce the remaining gradients and the amaxes of casts over ranks"),
            Action::SumTied => write!(f, "add the gradients of embedding and head, which share their weight"),
            Action::Norm => write!(f, "norm of the gradients"),
            Action::Update => write!(f, "update scales and weights, and cast the weights"),
        }
    }
}

/// The micro-batches whose backward reduces gradients over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reductions {
    /// None: there is one rank, or gradients stay on their rank.
    Never,
    /// The last one, after all have been added.
    Last,
    /// Each one, so that no rank keeps whole gradients between them.
    Each,
}

impl Reductions {
    /// The reductions of a step on `ranks` ranks with ZeRO stage `zero`.
    pub fn for_step(ranks: usize, zero: Zero) -> Reductions {
        match (ranks, zero) {
            (..=1, _) => Reductions::Never,
            (_, Zero::Nothing | Zero::OptimizerStates) => Reductions::Last,
            (_, Zero::Gradients | Zero::Weights) => Reductions::Each,
        }
    }
}

/// Actions of one process, in the order in which they are enqueued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Program {
    /// The purpose of its forward passes: [`Pass::Training`], or [`Pass::Evaluation`] without backward.
    #[serde(skip)]
    pub pass: Pass,
    /// The actions.
    pub actions: Vec<Action>,
}

impl Program {
    /// An optimizer step of one process: forward and backward of one micro-batch after the other, then the update.
    pub fn step(micro_batches: usize, reductions: Reductions) -> Program {
        Program::step_of(&Schedule::of_one_rank(micro_batches), 0, reductions, false)
    }

    /// An optimizer step of a rank of a pipeline: its tasks, then the update. `is_tied` says whether it has an embedding or a head whose
    /// weight another rank also has.
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
            // Losses are stored after the action that follows them, which is backward if it can be.
            all.extend(computed.take().map(|micro_batch| Action::StoreLosses { micro_batch }));
            if let Action::Loss { micro_batch } = action {
                computed = Some(micro_batch);
            }
        }
        all.extend(end);
        Program { pass: Pass::Training, actions: all }
    }

    /// The gradients of the micro-batches of one process, which stay in the parameters.
    pub fn gradients(micro_batches: usize) -> Program {
        Program::gradients_of(&Schedule::of_one_rank(micro_batches), 0)
    }

    /// [`Program::gradients`] of a rank of a pipeline.
    pub fn gradients_of(schedule: &Schedule, rank: usize) -> Program {
        Program { pass: Pass::Training, actions: actions(schedule, rank, schedule.tasks(rank), |_| false) }
    }

    /// The losses of one micro-batch, without gradients.
    pub fn evaluation() -> Program {
        Program::evaluation_of(&Schedule::of_one_rank(1), 0)
    }

    /// The losses of the micro-batches of a schedule without gradients, of a rank of a pipeline.
    pub fn evaluation_of(schedule: &Schedule, rank: usize) -> Program {
        Program { pass: Pass::Evaluation, actions: actions(schedule, rank, schedule.forward_tasks(rank), |_| false) }
    }

    /// Whether gradients are reduced over ranks.
    pub fn reduces(&self) -> bool {
        self.actions.contains(&Action::Reduce)
    }

    /// Errors with [`Error::Program`], the action and the reason, unless a process with stages at `places` can run all actions in this
    /// order, each stage running each of `micro_batches` micro-batches once.
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
    /// A line for each action.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.actions.iter().try_for_each(|action| writeln!(f, "{action}"))
    }
}

/// The actions of `tasks` of a rank, with the losses after the last stage of the model. `reduces` says which micro-batches reduce gradients.
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
