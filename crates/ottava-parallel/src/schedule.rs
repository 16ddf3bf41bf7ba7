//! Schedules of pipeline parallelism: the order in which a rank runs its stages on the micro-batches of a step.
//!
//! A schedule is a pure function of five numbers, so its properties are tested for all small cases (`schedule/tests.rs`): each micro-batch
//! passes each stage once, memory is bounded, no order of messages deadlocks, and the idle time matches the formula.
//!
//! Every stage runs backward of the micro-batches in ascending order, so gradients are added in the same order as on a single rank.
//!
//! `Schedule::tasks` returns the passes and messages of a rank in order. To add a schedule, change `ScheduleKind`, `Schedule::check`,
//! `Schedule::passes`, `Schedule::bubble` and `Schedule::most_in_flight`, all in this file, and add a row to the table in `docs/parallelism.md`. No
//! caller changes.
//!
//! Backward may be divided into `Part::Dgrad` and `Part::Wgrad`: `Decoder::dgrads` collects the wgrad products in
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

    /// Returns the name in configuration files.
    pub fn as_str(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubble => "zero-bubble",
        }
    }
}

/// The products that a backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// All products.
    Both,
    /// The dgrad products, for which the preceding stage waits. Operands of the wgrad products are kept.
    Dgrad,
    /// The wgrad products, from the operands that [`Part::Dgrad`] kept.
    Wgrad,
}

/// The content of a message between stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// The output of a stage, for the next stage.
    Activation,
    /// The gradient by the input of a stage, for the preceding stage.
    Gradient,
}

impl Message {
    /// Returns the name in error messages.
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
        /// The stage, as an index among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Backward of a stage, or a part of it.
    Backward {
        /// The stage, as an index among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
        /// The products that the pass computes.
        part: Part,
    },
    /// Sends a result of a stage.
    Send {
        /// The content of the message.
        message: Message,
        /// The stage that has computed the content, as an index among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives the next input of a stage.
    Receive {
        /// The content of the message.
        message: Message,
        /// The stage that reads the content, as an index among the stages of this rank.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
}

/// The schedule of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// The kind of the schedule.
    pub kind: ScheduleKind,
    /// The number of ranks in the pipeline.
    pub ranks: usize,
    /// The number of stages per rank. Stage `s` of rank `r` is stage `s · ranks + r` of the model.
    pub stages: usize,
    /// The number of micro-batches in a step.
    pub micro_batches: usize,
}

impl Schedule {
    /// Returns the schedule of one rank with the whole model.
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

    /// Returns the number of stages of the model.
    pub fn all_stages(&self) -> usize {
        self.ranks * self.stages
    }

    /// Returns the index in the model of stage `stage` of `rank`.
    pub fn number(&self, rank: usize, stage: usize) -> usize {
        stage * self.ranks + rank
    }

    /// Returns the tasks of `rank` in a step, in order. Each message is received just before the task that reads it, and sent just after the task
    /// that computes it.
    pub fn tasks(&self, rank: usize) -> Vec<Task> {
        self.with_messages(rank, self.passes(rank))
    }

    /// Returns the tasks of forward passes without backward, for an evaluation.
    pub fn forward_tasks(&self, rank: usize) -> Vec<Task> {
        self.with_messages(rank, self.forwards())
    }

    /// Returns the idle time of the busiest rank divided by its compute time. All stages are assumed to take equal time, dgrad and wgrad each the
    /// time of forward, and messages no time. For zero-bubble, the formula holds if there are at least as many micro-batches as ranks.
    pub fn bubble(&self) -> f64 {
        let (idle, micro_batches) = ((self.ranks - 1) as f64, self.micro_batches as f64);
        match self.kind {
            ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward => idle / micro_batches,
            ScheduleKind::Interleaved => idle / (self.stages as f64 * micro_batches),
            ScheduleKind::ZeroBubble => idle / (3.0 * micro_batches),
        }
    }

    /// Returns the maximum number of micro-batches whose activations `rank` holds at a time, counted per stage.
    pub fn most_in_flight(&self, rank: usize) -> usize {
        let all = self.micro_batches * self.stages;
        let most = match self.kind {
            ScheduleKind::GPipe => all,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => self.ranks - rank,
            ScheduleKind::Interleaved => self.warm_up(rank) + 1,
        };
        most.min(all)
    }

    /// Returns the number of forwards of `rank` before its first backward, not counting the forward directly before it.
    fn warm_up(&self, rank: usize) -> usize {
        let after = self.ranks - 1 - rank;
        match self.kind {
            ScheduleKind::GPipe => self.micro_batches,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => after,
            ScheduleKind::Interleaved => 2 * after + (self.stages - 1) * self.ranks,
        }
    }

    /// Returns the forward passes in the order in which every rank runs them. With several stages, micro-batches run in groups. A group has one
    /// micro-batch per rank. One stage runs a group, then the next stage runs the same group.
    fn forwards(&self) -> Vec<Task> {
        self.order().into_iter().map(|(stage, micro_batch)| Task::Forward { stage, micro_batch }).collect()
    }

    /// Returns the stages and micro-batches in the order of forward.
    fn order(&self) -> Vec<(usize, usize)> {
        let micro_batches: Vec<usize> = (0..self.micro_batches).collect();
        let of_group = |group: &[usize]| {
            let pairs = |stage| group.iter().map(move |&micro_batch| (stage, micro_batch)).collect::<Vec<_>>();
            (0..self.stages).flat_map(pairs).collect::<Vec<_>>()
        };
        micro_batches.chunks(self.ranks).flat_map(of_group).collect()
    }

    /// Returns the forward and backward passes of `rank`.
    fn passes(&self, rank: usize) -> Vec<Task> {
        let forwards = self.forwards();
        let splits = self.kind == ScheduleKind::ZeroBubble && self.ranks > 1;
        let part = if splits { Part::Dgrad } else { Part::Both };
        let last = self.stages - 1;
        // Backward runs the stages in reverse order.
        let backward = |(stage, micro_batch)| Task::Backward { stage: last - stage, micro_batch, part };
        let backwards: Vec<Task> = self.order().into_iter().map(backward).collect();
        let wgrad = |micro_batch| Task::Backward { stage: 0, micro_batch, part: Part::Wgrad };
        let warm_up = self.warm_up(rank).min(forwards.len());
        let mut tasks = forwards[..warm_up].to_vec();
        for (i, backward) in backwards.into_iter().enumerate() {
            tasks.extend(forwards.get(warm_up + i));
            tasks.push(backward);
            // A rank defers the wgrads of `rank` micro-batches, so that all ranks have equally many micro-batches in memory. It computes them when it
            // would otherwise wait for gradients.
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
