//! Checks that a process can run the actions of a program in their order.

use super::action::Action;
use ottava_parallel::{Message, Part};
use ottava_recipe::mode::Pass;
use std::collections::BTreeSet;

/// The neighbour of a stage of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbour {
    /// There is no neighbour: the model starts or ends with this stage.
    Nothing,
    /// The neighbour is a stage of the same process.
    Here,
    /// The neighbour is a stage of another rank.
    OtherRank,
}

/// The neighbours of each stage of a process: the preceding stage and the next stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places(Vec<[Neighbour; 2]>);

impl Places {
    /// Returns the places of the stages of `rank` in a pipeline of `ranks` ranks with `stages` stages each. Stages are numbered as
    /// [`Schedule::number`](ottava_parallel::Schedule::number) numbers them.
    pub fn new(ranks: usize, rank: usize, stages: usize) -> Places {
        let beside = |is_end| match (is_end, ranks) {
            (true, _) => Neighbour::Nothing,
            (false, 1) => Neighbour::Here,
            (false, _) => Neighbour::OtherRank,
        };
        let place = |stage| {
            let is_last = stage + 1 == stages && rank + 1 == ranks;
            [beside(stage == 0 && rank == 0), beside(is_last)]
        };
        Places((0..stages).map(place).collect())
    }

    /// Returns the actions of micro-batch 0 in the order in which they depend on each other.
    fn route(&self, pass: Pass) -> Vec<Action> {
        let (mut route, micro_batch) = (Vec::new(), 0);
        let of_stage = |route: &mut Vec<Action>, stage: usize, message, action, [from, to]: [Neighbour; 2]| {
            if from == Neighbour::OtherRank {
                route.push(Action::Receive { message, stage, micro_batch });
            }
            route.push(action);
            if to == Neighbour::OtherRank {
                route.push(Action::Send { message, stage, micro_batch });
            }
        };
        for (stage, &[before, after]) in self.0.iter().enumerate() {
            of_stage(&mut route, stage, Message::Activation, Action::Forward { stage, micro_batch }, [before, after]);
            if after == Neighbour::Nothing {
                route.push(Action::Loss { micro_batch });
            }
        }
        for (stage, &[before, after]) in self.0.iter().enumerate().rev().filter(|_| pass == Pass::Training) {
            let backward = Action::Backward { stage, micro_batch, part: Part::Both, reduces: false };
            of_stage(&mut route, stage, Message::Gradient, backward, [after, before]);
        }
        route
    }
}

/// The state after the actions that have been checked.
pub(super) struct Check<'a> {
    pass: Pass,
    places: &'a Places,
    route: Vec<Action>,
    /// For each micro-batch, the number of actions of its route that have run.
    done: Vec<usize>,
    /// For each micro-batch, whether its losses are stored.
    stored: Vec<bool>,
    /// The stages and micro-batches whose wgrads have not run yet.
    wgrads: BTreeSet<(usize, usize)>,
    /// For each stage, whether the last backward did not reduce its gradients.
    unreduced: Vec<bool>,
    /// Whether a backward has started reductions.
    reduces: bool,
    /// The last action at the end of the step that has been checked.
    last: Option<Action>,
}

impl Check<'_> {
    pub(super) fn new(pass: Pass, places: &Places, micro_batches: usize) -> Check<'_> {
        Check {
            pass,
            places,
            route: places.route(pass),
            done: vec![0; micro_batches],
            stored: vec![false; micro_batches],
            wgrads: BTreeSet::new(),
            unreduced: vec![false; places.0.len()],
            reduces: false,
            last: None,
        }
    }

    pub(super) fn follow(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Forward { micro_batch, .. }
            | Action::Loss { micro_batch }
            | Action::Send { micro_batch, .. }
            | Action::Receive { micro_batch, .. } => self.advance(action, micro_batch),
            Action::Backward { stage, micro_batch, part: Part::Wgrad, reduces } => {
                self.expect_micro_batch(micro_batch)?;
                if !self.wgrads.remove(&(stage, micro_batch)) {
                    return Err("dgrad of the stage comes first, and leaves its products once".into());
                }
                self.note_reduction(stage, reduces)
            }
            Action::Backward { stage, micro_batch, part, reduces } => {
                if self.pass != Pass::Training {
                    return Err("an evaluation saves nothing for backward".into());
                }
                self.advance(action, micro_batch)?;
                if part == Part::Dgrad {
                    self.wgrads.insert((stage, micro_batch));
                }
                self.note_reduction(stage, reduces)
            }
            Action::StoreLosses { micro_batch } => self.store_losses(micro_batch),
            Action::Reduce | Action::SumTied | Action::Norm | Action::Update => self.end_step(action),
        }
    }

    /// Checks the next action of a micro-batch.
    fn advance(&mut self, action: Action, micro_batch: usize) -> Result<(), String> {
        self.expect_micro_batch(micro_batch)?;
        let (next, of_first) = (self.done[micro_batch], of_micro_batch(action, 0));
        match self.route.iter().position(|other| *other == of_first) {
            None => {
                let stages = self.places.0.len();
                Err(format!("this process has no such action: it has {stages} stages, numbered from 0"))
            }
            Some(at) if at < next => Err("it has run before".into()),
            Some(at) if at > next => Err(format!("before it comes: {}", of_micro_batch(self.route[next], micro_batch))),
            Some(at) => {
                self.done[micro_batch] = at + 1;
                Ok(())
            }
        }
    }

    /// Checks a backward that has added to the gradients of `stage`.
    fn note_reduction(&mut self, stage: usize, reduces: bool) -> Result<(), String> {
        if reduces && self.places.0[stage][1] == Neighbour::Nothing {
            // The loss adds to the gradient of the head. Before this gradient is reduced, the backward of each computed loss must have run.
            let loss = self.route.iter().position(|action| matches!(action, Action::Loss { .. }));
            if let Some(other) = self.done.iter().position(|&done| Some(done) == loss.map(|loss| loss + 1)) {
                return Err(format!("it reduces gradients to which backward of micro-batch {other} still adds"));
            }
        }
        self.unreduced[stage] = !reduces;
        self.reduces |= reduces;
        Ok(())
    }

    fn store_losses(&mut self, micro_batch: usize) -> Result<(), String> {
        if self.pass != Pass::Training {
            return Err("an evaluation has no results to store them in, it returns them".into());
        }
        self.expect_micro_batch(micro_batch)?;
        let has_run = self.route[..self.done[micro_batch]].contains(&Action::Loss { micro_batch: 0 });
        match (has_run, self.stored[micro_batch]) {
            (false, _) => Err("the loss of the micro-batch comes first".into()),
            (true, true) => Err("they have been stored before".into()),
            (true, false) => {
                self.stored[micro_batch] = true;
                Ok(())
            }
        }
    }

    /// Checks an action at the end of the step, after all micro-batches.
    fn end_step(&mut self, action: Action) -> Result<(), String> {
        if self.pass != Pass::Training {
            return Err("an evaluation has no gradients".into());
        }
        self.expect_all_done()?;
        let before = match (action, self.last) {
            (Action::Update, _) => Some(Action::Norm),
            (Action::Norm, Some(Action::SumTied)) => Some(Action::SumTied),
            (Action::Norm | Action::SumTied, _) if self.reduces => Some(Action::Reduce),
            _ => None,
        };
        if self.last != before {
            return Err(match (before, self.last) {
                (Some(before), _) => format!("the action before it has to be: {before}"),
                (None, last) => format!("it comes after: {}", last.expect("it is not `before`")),
            });
        }
        let stores = self.route.contains(&Action::Loss { micro_batch: 0 });
        match (action, self.unreduced.contains(&true), self.stored.iter().position(|stored| stores && !stored)) {
            (Action::Reduce, true, _) => return Err("the last backward does not reduce its gradients".into()),
            (Action::Update, _, Some(other)) => {
                return Err(format!("the losses of micro-batch {other} are not stored"));
            }
            _ => {}
        }
        self.last = Some(action);
        Ok(())
    }

    pub(super) fn end(&self) -> Result<(), String> {
        self.expect_all_done()?;
        match self.reduces && self.last.is_none() {
            true => Err("backward has started reductions for which no action waits".into()),
            false => Ok(()),
        }
    }

    fn expect_all_done(&self) -> Result<(), String> {
        match self.done.iter().position(|&done| done < self.route.len()) {
            Some(other) if self.done[other] == 0 => Err(format!("micro-batch {other} has not run")),
            Some(other) => Err(format!("micro-batch {other} is still in flight")),
            None => match self.wgrads.first() {
                Some((stage, other)) => Err(format!("wgrad of stage {stage}, micro-batch {other} is left")),
                None => Ok(()),
            },
        }
    }

    /// Errors after the end of the step, and if the micro-batch does not exist.
    fn expect_micro_batch(&self, micro_batch: usize) -> Result<(), String> {
        if let Some(last) = self.last {
            return Err(format!("it comes after: {last}"));
        }
        match self.done.len() {
            count if micro_batch < count => Ok(()),
            count => Err(format!("micro-batches are 0 to {}", count.saturating_sub(1))),
        }
    }
}

/// Returns `action` for another micro-batch, in the form in which a route lists it.
fn of_micro_batch(action: Action, micro_batch: usize) -> Action {
    match action {
        Action::Forward { stage, .. } => Action::Forward { stage, micro_batch },
        Action::Backward { stage, .. } => Action::Backward { stage, micro_batch, part: Part::Both, reduces: false },
        Action::Send { message, stage, .. } => Action::Send { message, stage, micro_batch },
        Action::Receive { message, stage, .. } => Action::Receive { message, stage, micro_batch },
        Action::Loss { .. } => Action::Loss { micro_batch },
        other => other,
    }
}
