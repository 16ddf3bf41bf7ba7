//! A step as a list of actions: a value that is built once per run, printed by `ottava plan --program`, and checked before it runs.

use crate::error::{Error, Result};
use crate::mode::Pass;
use crate::parallel::Zero;
use serde::Serialize;
use std::fmt::{self, Display};

/// One action of a program. Stages and micro-batches count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Forward of a stage. It reads the token ids of the micro-batch or the output of the preceding stage.
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
        /// Whether it starts to reduce the gradients of each unit over ranks as soon as it has added to them.
        reduces: bool,
    },
    /// Copies the losses to the results of the step.
    StoreLosses {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Waits for the reductions that backward has started, and reduces the gradients of norms and biases and the amaxes of casts.
    Reduce,
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
            Action::Backward { stage, micro_batch, reduces } => {
                let reduces = if *reduces { ", reducing its gradients over ranks" } else { "" };
                write!(f, "backward of stage {stage}, micro-batch {micro_batch}{reduces}")
            }
            Action::StoreLosses { micro_batch } => write!(f, "store the losses of micro-batch {micro_batch}"),
            Action::Reduce => write!(f, "reduce the remaining gradients and the amaxes of casts over ranks"),
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
    /// An optimizer step: forward and backward of one micro-batch after the other, then the update.
    pub fn step(micro_batches: usize, reductions: Reductions) -> Program {
        let of_micro_batch = |micro_batch| {
            let reduces = match reductions {
                Reductions::Never => false,
                Reductions::Last => micro_batch + 1 == micro_batches,
                Reductions::Each => true,
            };
            let [forward, loss, backward] = both_ways(micro_batch, reduces);
            [forward, loss, backward, Action::StoreLosses { micro_batch }]
        };
        let reduce = (reductions != Reductions::Never).then_some(Action::Reduce);
        let end = reduce.into_iter().chain([Action::Norm, Action::Update]);
        Program { pass: Pass::Training, actions: (0..micro_batches).flat_map(of_micro_batch).chain(end).collect() }
    }

    /// The gradients of this rank's micro-batches, which stay in the parameters.
    pub fn gradients(micro_batches: usize) -> Program {
        let of_micro_batch = |micro_batch| both_ways(micro_batch, false);
        Program { pass: Pass::Training, actions: (0..micro_batches).flat_map(of_micro_batch).collect() }
    }

    /// The losses of one micro-batch, without gradients.
    pub fn evaluation() -> Program {
        let actions = vec![Action::Forward { stage: 0, micro_batch: 0 }, Action::Loss { micro_batch: 0 }];
        Program { pass: Pass::Evaluation, actions }
    }

    /// Whether gradients are reduced over ranks.
    pub fn reduces(&self) -> bool {
        self.actions.contains(&Action::Reduce)
    }

    /// Errors with [`Error::Program`], the action and the reason, unless a process with `stages` stages can run all actions in this order,
    /// each stage running each of `micro_batches` micro-batches once.
    pub fn check(&self, stages: usize, micro_batches: usize) -> Result<()> {
        let mut check = Check {
            pass: self.pass,
            phases: vec![Phase::Forward(0); micro_batches],
            stored: vec![false; micro_batches],
            unreduced: vec![false; stages],
            reduces: false,
            last: None,
        };
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

/// Forward, loss and backward of a micro-batch in a model of one stage.
fn both_ways(micro_batch: usize, reduces: bool) -> [Action; 3] {
    let stage = 0;
    [
        Action::Forward { stage, micro_batch },
        Action::Loss { micro_batch },
        Action::Backward { stage, micro_batch, reduces },
    ]
}

/// The progress of a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The number of stages that have run forward.
    Forward(usize),
    /// The loss is computed; the number of stages whose backward is left.
    Backward(usize),
}

/// The state after the actions that were checked so far.
struct Check {
    pass: Pass,
    /// By micro-batch.
    phases: Vec<Phase>,
    /// By micro-batch: whether its losses are stored.
    stored: Vec<bool>,
    /// By stage: whether the last backward did not reduce its gradients.
    unreduced: Vec<bool>,
    /// Whether a backward has started reductions.
    reduces: bool,
    /// The last action of the step's end.
    last: Option<Action>,
}

impl Check {
    fn follow(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Forward { stage, micro_batch } => self.forward(stage, micro_batch),
            Action::Loss { micro_batch } => self.loss(micro_batch),
            Action::Backward { stage, micro_batch, reduces } => self.backward(stage, micro_batch, reduces),
            Action::StoreLosses { micro_batch } => self.store_losses(micro_batch),
            Action::Reduce | Action::Norm | Action::Update => self.end_step(action),
        }
    }

    fn forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), String> {
        let phase = self.phase(micro_batch)?;
        self.expect_stage(stage)?;
        match phase {
            Phase::Forward(done) if done == stage => self.phases[micro_batch] = Phase::Forward(stage + 1),
            Phase::Forward(done) if done < stage => return Err(format!("forward of stage {done} comes first")),
            _ => return Err("the slot of this micro-batch is in use: forward of this stage has run".into()),
        }
        Ok(())
    }

    fn loss(&mut self, micro_batch: usize) -> Result<(), String> {
        let stages = self.unreduced.len();
        match self.phase(micro_batch)? {
            Phase::Forward(done) if done < stages => return Err(format!("forward of stage {done} comes first")),
            Phase::Forward(_) => {}
            Phase::Backward(_) => return Err("it has been computed before".into()),
        }
        self.phases[micro_batch] = Phase::Backward(if self.pass == Pass::Training { stages } else { 0 });
        Ok(())
    }

    fn backward(&mut self, stage: usize, micro_batch: usize, reduces: bool) -> Result<(), String> {
        if self.pass != Pass::Training {
            return Err("an evaluation saves nothing for backward".into());
        }
        let phase = self.phase(micro_batch)?;
        self.expect_stage(stage)?;
        match phase {
            Phase::Forward(_) => return Err("forward and loss of the micro-batch come first".into()),
            Phase::Backward(left) if left > stage + 1 => {
                return Err(format!("backward of stage {} comes first", left - 1));
            }
            Phase::Backward(left) if left <= stage => return Err("it has run before".into()),
            Phase::Backward(_) => self.phases[micro_batch] = Phase::Backward(stage),
        }
        // The loss adds to the gradient of the head, which must be complete when it is reduced.
        let stages = self.unreduced.len();
        let open = self.phases.iter().position(|phase| *phase == Phase::Backward(stages));
        if let (true, Some(other)) = (reduces && stage + 1 == stages, open) {
            return Err(format!("it reduces gradients to which backward of micro-batch {other} still adds"));
        }
        self.unreduced[stage] = !reduces;
        self.reduces |= reduces;
        Ok(())
    }

    fn store_losses(&mut self, micro_batch: usize) -> Result<(), String> {
        if self.pass != Pass::Training {
            return Err("an evaluation has no results to store them in, it returns them".into());
        }
        match self.phase(micro_batch)? {
            Phase::Forward(_) => Err("the loss of the micro-batch comes first".into()),
            Phase::Backward(_) if self.stored[micro_batch] => Err("they have been stored before".into()),
            Phase::Backward(_) => {
                self.stored[micro_batch] = true;
                Ok(())
            }
        }
    }

    /// An action of the step's end, after all micro-batches.
    fn end_step(&mut self, action: Action) -> Result<(), String> {
        if self.pass != Pass::Training {
            return Err("an evaluation has no gradients".into());
        }
        if self.unreduced.len() > 1 {
            return Err(format!(
                "the model is in {} stages, which have no common norm and update",
                self.unreduced.len()
            ));
        }
        self.expect_all_done()?;
        let before = match action {
            Action::Update => Some(Action::Norm),
            Action::Norm if self.reduces => Some(Action::Reduce),
            _ => None,
        };
        if self.last != before {
            return Err(match (before, self.last) {
                (Some(before), _) => format!("the action before it has to be: {before}"),
                (None, last) => format!("it comes after: {}", last.expect("it is not `before`")),
            });
        }
        match (action, self.unreduced.contains(&true), self.stored.iter().position(|stored| !stored)) {
            (Action::Reduce, true, _) => return Err("the last backward does not reduce its gradients".into()),
            (Action::Update, _, Some(other)) => {
                return Err(format!("the losses of micro-batch {other} are not stored"));
            }
            _ => {}
        }
        self.last = Some(action);
        Ok(())
    }

    fn end(&self) -> Result<(), String> {
        self.expect_all_done()?;
        match self.reduces && self.last.is_none() {
            true => Err("backward has started reductions for which no action waits".into()),
            false => Ok(()),
        }
    }

    fn expect_all_done(&self) -> Result<(), String> {
        let unfinished = |phase: &Phase| *phase != Phase::Backward(0);
        match self.phases.iter().position(unfinished) {
            None => Ok(()),
            Some(other) if self.phases[other] == Phase::Forward(0) => Err(format!("micro-batch {other} has not run")),
            Some(other) => Err(format!("micro-batch {other} is still in flight")),
        }
    }

    /// The phase of the micro-batch of an action.
    fn phase(&self, micro_batch: usize) -> Result<Phase, String> {
        if let Some(last) = self.last {
            return Err(format!("it comes after: {last}"));
        }
        let count = self.phases.len();
        self.phases
            .get(micro_batch)
            .copied()
            .ok_or_else(|| format!("micro-batches are 0 to {}", count.saturating_sub(1)))
    }

    fn expect_stage(&self, stage: usize) -> Result<(), String> {
        match stage < self.unreduced.len() {
            true => Ok(()),
            false => Err(format!("stages are 0 to {}", self.unreduced.len().saturating_sub(1))),
        }
    }
}
