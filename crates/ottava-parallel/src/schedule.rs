//! Schedules of pipeline parallelism: the order in which a rank runs its stages on the micro-batches of a step.
//!
//! A schedule is a pure function of five numbers, so its properties are tested for all small cases (`schedule/tests.rs`): each micro-batch
//! passes each stage once, memory is bounded, no order of messages deadlocks, and the idle time is the formula's.
//!
//! Every stage runs the backward of micro-batches in ascending order, so gradients are added in the order of a single rank.
//!
//! `Schedule::tasks` returns the passes and messages of a rank in order. To add a schedule: `ScheduleKind`, `Schedule::check`, `Schedule::passes`,
//! `Schedule::bubble` and `Schedule::most_in_flight`, all in this file, and a row of the table in `docs/parallelism.md`. No caller changes.
//!
//! Backward may be divided into `Part::Dgrad` and `Part::Wgrad`: `Decoder::dgrads` collects the products of the gradients of weights in
//! `DeferredWgrads` of the `Context`, and `Decoder::wgrads` computes them. No action before the end of a step is a collective over stages.

use ottava_common::error::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

/// The kind of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: backward starts as soon as it can, which frees activations (Narayanan et al. 2021, arXiv:2006.09503).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with several stages per rank, which shortens warm-up and drain (Narayanan et al. 2021, arXiv:2104.04473).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// 1F1B whose gradients of weights are computed while a rank would wait: ZB-H1 of Qi et al. 2023, arXiv:2401.10241.
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
}

impl ScheduleKind {
    /// All kinds.
    pub const ALL: [ScheduleKind; 4] =
        [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward, ScheduleKind::Interleaved, ScheduleKind::ZeroBubble];

    /// Its name, as in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubble => "zero-bubble",
        }
    }
}

/// The products of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// All.
    Both,
    /// The products of the gradient by the input, which the preceding stage waits for. Operands of the others are kept.
    Dgrad,
    /// The products of the gradients of weights, from the operands that [`Part::Dgrad`] kept.
    Wgrad,
}

/// What a message between stages carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// The output of a stage, for the next one.
    Activation,
    /// The gradient by the input of a stage, for the preceding one.
    Gradient,
}

impl Message {
    /// Its name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Message::Activation => "activation",
            Message::Gradient => "gradient",
        }
    }
}

/// A task of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// Forward of a stage.
    Forward {
        /// The stage, among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Backward of a stage, or a part of it.
    Backward {
        /// The stage, among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
        /// The products that it computes.
        part: Part,
    },
    /// Sends what a stage has computed.
    Send {
        /// What it sends.
        message: Message,
        /// The stage that has computed it, among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives what a stage reads next.
    Receive {
        /// What it receives.
        message: Message,
        /// The stage that reads it, among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
}

/// The schedule of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Its kind.
    pub kind: ScheduleKind,
    /// Ranks of the pipeline.
    pub ranks: usize,
    /// Stages of each rank. Stage `s` of rank `r` is stage `s · ranks + r` of the model.
    pub stages: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl Schedule {
    /// One rank with the whole model.
    pub fn of_one_rank(micro_batches: usize) -> Schedule {
        Schedule { kind: ScheduleKind::default(), ranks: 1, stages: 1, micro_batches }
    }

    /// Errors with [`Error::Config`] if the kind does not support the numbers.
    pub fn check(&self) -> Result<()> {
        let Schedule { kind, ranks, stages, micro_batches } = *self;
        let name = kind.as_str();
        if kind != ScheduleKind::Interleaved {
            return match stages {
                1 => Ok(()),
                _ => Err(Error::Config(format!(
                    "`parallel.pipeline_stages` is {stages}, and schedule {name} has one stage per rank; set it to 1, or `parallel.pipeline_schedule` to \"interleaved\""
                ))),
            };
        }
        if stages < 2 {
            return Err(Error::Config(
                "`parallel.pipeline_schedule` is \"interleaved\", which has several stages per rank; set `parallel.pipeline_stages` to 2 or more, or the schedule to \"1f1b\"".into(),
            ));
        }
        match micro_batches.is_multiple_of(ranks) {
            true => Ok(()),
            false => Err(Error::Config(format!(
                "schedule {name} runs micro-batches in groups of `parallel.pipeline` = {ranks}, and a step has {micro_batches}; set `training.gradient_accumulation_steps` to a multiple of {ranks}"
            ))),
        }
    }

    /// Stages of the model.
    pub fn all_stages(&self) -> usize {
        self.ranks * self.stages
    }

    /// The number in the model of stage `stage` of `rank`.
    pub fn number(&self, rank: usize, stage: usize) -> usize {
        stage * self.ranks + rank
    }

    /// The tasks of a step of `rank`, in order. Each message is received just before the task that reads it, and sent just after the task
    /// that computes it.
    pub fn tasks(&self, rank: usize) -> Vec<Task> {
        self.with_messages(rank, self.passes(rank))
    }

    /// The tasks of forward passes without backward, as in an evaluation.
    pub fn forward_tasks(&self, rank: usize) -> Vec<Task> {
        self.with_messages(rank, self.forwards())
    }

    /// The time that the busiest rank is idle, divided by its compute time, if all stages take equal time, backward takes twice the time of
    /// forward with equal parts, and messages take none. For zero-bubble, with at least as many micro-batches as ranks.
    pub fn bubble(&self) -> f64 {
        let (idle, micro_batches) = ((self.ranks - 1) as f64, self.micro_batches as f64);
        match self.kind {
            ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward => idle / micro_batches,
            ScheduleKind::Interleaved => idle / (self.stages as f64 * micro_batches),
            ScheduleKind::ZeroBubble => idle / (3.0 * micro_batches),
        }
    }

    /// The most micro-batches whose activations `rank` holds at once, each in one of its stages.
    pub fn most_in_flight(&self, rank: usize) -> usize {
        let all = self.micro_batches * self.stages;
        let most = match self.kind {
            ScheduleKind::GPipe => all,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => self.ranks - rank,
            ScheduleKind::Interleaved => self.warm_up(rank) + 1,
        };
        most.min(all)
    }

    /// The forwards of `rank` before its first backward, without the one directly before it.
    fn warm_up(&self, rank: usize) -> usize {
        let after = self.ranks - 1 - rank;
        match self.kind {
            ScheduleKind::GPipe => self.micro_batches,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => after,
            ScheduleKind::Interleaved => 2 * after + (self.stages - 1) * self.ranks,
        }
    }

    /// Forward passes, in the order in which every rank runs them: with several stages, one stage runs a group of as many micro-batches as
    /// there are ranks, then the next stage runs the same group.
    fn forwards(&self) -> Vec<Task> {
        self.order().into_iter().map(|(stage, micro_batch)| Task::Forward { stage, micro_batch }).collect()
    }

    /// Stages and micro-batches in the order of forward.
    fn order(&self) -> Vec<(usize, usize)> {
        let micro_batches: Vec<usize> = (0..self.micro_batches).collect();
        let of_group = |group: &[usize]| {
            let pairs = |stage| group.iter().map(move |&micro_batch| (stage, micro_batch)).collect::<Vec<_>>();
            (0..self.stages).flat_map(pairs).collect::<Vec<_>>()
        };
        micro_batches.chunks(self.ranks).flat_map(of_group).collect()
    }

    /// Forward and backward passes.
    fn passes(&self, rank: usize) -> Vec<Task> {
        let forwards = self.forwards();
        let splits = self.kind == ScheduleKind::ZeroBubble && self.ranks > 1;
        let part = if splits { Part::Dgrad } else { Part::Both };
        let last = self.stages - 1;
        // Backward takes the stages in reverse.
        let backward = |(stage, micro_batch)| Task::Backward { stage: last - stage, micro_batch, part };
        let backwards: Vec<Task> = self.order().into_iter().map(backward).collect();
        let wgrad = |micro_batch| Task::Backward { stage: 0, micro_batch, part: Part::Wgrad };
        let warm_up = self.warm_up(rank).min(forwards.len());
        let mut tasks = forwards[..warm_up].to_vec();
        for (i, backward) in backwards.into_iter().enumerate() {
            tasks.extend(forwards.get(warm_up + i));
            tasks.push(backward);
            // A rank keeps the wgrads of so many micro-batches back that all ranks have equally many in memory, and computes them while it
            // would wait for gradients.
            if let (true, Some(micro_batch)) = (splits, i.checked_sub(rank)) {
                tasks.push(wgrad(micro_batch));
            }
        }
        if splits {
            tasks.extend((self.micro_batches.saturating_sub(rank)..self.micro_batches).map(wgrad));
        }
        tasks
    }

    /// Adds the messages of `rank` to its passes.
    fn with_messages(&self, rank: usize, passes: Vec<Task>) -> Vec<Task> {
        let (first, last) = (0, self.all_stages() - 1);
        let mut tasks = Vec::with_capacity(3 * passes.len());
        for task in passes {
            let (message, stage, micro_batch, [from, to]) = match task {
                Task::Forward { stage, micro_batch } => (Message::Activation, stage, micro_batch, [first, last]),
                Task::Backward { part: Part::Wgrad, .. } | Task::Send { .. } | Task::Receive { .. } => {
                    tasks.push(task);
                    continue;
                }
                Task::Backward { stage, micro_batch, .. } => (Message::Gradient, stage, micro_batch, [last, first]),
            };
            let number = self.number(rank, stage);
            if number != from {
                tasks.push(Task::Receive { message, stage, micro_batch });
            }
            tasks.push(task);
            if number != to {
                tasks.push(Task::Send { message, stage, micro_batch });
            }
        }
        tasks
    }
}
