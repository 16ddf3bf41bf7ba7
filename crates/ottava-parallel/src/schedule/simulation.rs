//! A simulation of the ranks of a pipeline, for tests of schedules.

use super::{Message, Part, Schedule, Task};
use std::collections::HashMap;

/// The content of a message: its kind, the index in the model of the stage that reads it, and the micro-batch.
type Content = (Message, usize, usize);

/// The ranks of a schedule, with the tasks of each rank.
pub struct Simulation {
    schedule: Schedule,
    tasks: Vec<Vec<Task>>,
}

/// The time at which a rank ends its last task, and the time for which it computes.
#[derive(Debug)]
pub struct Times {
    pub end: usize,
    pub busy: usize,
}

/// The maximum number of sends of a channel that may be in progress when a rank starts the next send. As on GPUs, a send ends with
/// its receive.
const OPEN_SENDS: usize = 1;

impl Simulation {
    pub fn new(schedule: Schedule) -> Simulation {
        Simulation { schedule, tasks: (0..schedule.ranks).map(|rank| schedule.tasks(rank)).collect() }
    }

    pub fn of(schedule: Schedule, tasks: Vec<Vec<Task>>) -> Simulation {
        Simulation { schedule, tasks }
    }

    /// Returns the content of a message and its channel: the ranks that send and receive, and the kind.
    fn content(&self, rank: usize, task: Task) -> Option<(Content, (usize, usize, Message))> {
        let ranks = self.schedule.ranks;
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        match task {
            Task::Send { message: Message::Activation, stage, micro_batch } => {
                let reader = self.schedule.number(rank, stage) + 1;
                Some(((Message::Activation, reader, micro_batch), (rank, next, Message::Activation)))
            }
            Task::Send { message: Message::Gradient, stage, micro_batch } => {
                let reader = self.schedule.number(rank, stage) - 1;
                Some(((Message::Gradient, reader, micro_batch), (rank, previous, Message::Gradient)))
            }
            Task::Receive { message, stage, micro_batch } => {
                let reader = self.schedule.number(rank, stage);
                let from = if message == Message::Activation { previous } else { next };
                Some(((message, reader, micro_batch), (from, rank, message)))
            }
            Task::Forward { .. } | Task::Backward { .. } => None,
        }
    }

    /// Errors unless the k-th message sent in each channel is the k-th message received.
    pub fn messages_match(&self) -> Result<(), String> {
        let (mut sent, mut received): (HashMap<_, Vec<Content>>, HashMap<_, Vec<Content>>) = Default::default();
        for (rank, tasks) in self.tasks.iter().enumerate() {
            for &task in tasks {
                let Some((content, channel)) = self.content(rank, task) else { continue };
                let side = if matches!(task, Task::Send { .. }) { &mut sent } else { &mut received };
                side.entry(channel).or_default().push(content);
            }
        }
        for channel in sent.keys().chain(received.keys()) {
            if sent.get(channel) != received.get(channel) {
                return Err(format!("messages of {channel:?} do not match"));
            }
        }
        Ok(())
    }

    /// Runs all ranks. Forward, dgrad and wgrad of a stage take one unit of time each. A message passes when both sides have reached it. The messages
    /// of a channel pass in order. A rank waits for its receives, and for all sends of a channel except the last one.
    ///
    /// Errors in a deadlock.
    pub fn run(&self) -> Result<Vec<Times>, String> {
        let ranks = self.tasks.len();
        let (mut at, mut times) = (vec![0; ranks], (0..ranks).map(|_| Times { end: 0, busy: 0 }).collect::<Vec<_>>());
        // The times at which each send and each receive has started, by channel.
        let mut started: HashMap<_, [Vec<usize>; 2]> = HashMap::new();
        loop {
            let mut goes_on = false;
            for rank in 0..ranks {
                while let Some(&task) = self.tasks[rank].get(at[rank]) {
                    let now = times[rank].end;
                    if let Some((_, channel)) = self.content(rank, task) {
                        let [sends, receives] = started.entry(channel).or_default();
                        let (own, waits) = match task {
                            Task::Send { .. } => (sends, OPEN_SENDS),
                            _ => (receives, 0),
                        };
                        let number = self.before(rank, at[rank], channel);
                        if own.len() == number {
                            own.push(now);
                            goes_on = true;
                        }
                        // The rank waits until message `number - waits` has passed.
                        if let Some(number) = number.checked_sub(waits) {
                            let Some(&[sends, receives]) = started.get(&channel).map(|[s, r]| [s, r]).as_ref() else {
                                break;
                            };
                            let passed = (0..=number).map(|k| Some(*sends.get(k)?.max(receives.get(k)?)));
                            let Some(passed) = passed.collect::<Option<Vec<_>>>() else { break };
                            times[rank].end = now.max(passed.into_iter().max().unwrap_or(0));
                        }
                    } else {
                        let cost = if matches!(task, Task::Backward { part: Part::Both, .. }) { 2 } else { 1 };
                        times[rank] = Times { end: now + cost, busy: times[rank].busy + cost };
                    }
                    at[rank] += 1;
                    goes_on = true;
                }
            }
            if at.iter().zip(&self.tasks).all(|(&at, tasks)| at == tasks.len()) {
                return Ok(times);
            }
            if !goes_on {
                let stuck =
                    at.iter().enumerate().map(|(rank, &at)| format!("rank {rank} at {:?}", self.tasks[rank].get(at)));
                return Err(format!("deadlock: {}", stuck.collect::<Vec<_>>().join(", ")));
            }
        }
    }

    /// Returns the number of messages of `channel` among the tasks of `rank` before task number `at`, on the same side as this task.
    fn before(&self, rank: usize, at: usize, channel: (usize, usize, Message)) -> usize {
        let sends = |task: &Task| matches!(task, Task::Send { .. });
        let side = sends(&self.tasks[rank][at]);
        let same =
            |task: &&Task| sends(task) == side && self.content(rank, **task).is_some_and(|(_, other)| other == channel);
        self.tasks[rank][..at].iter().filter(same).count()
    }

    /// Returns the maximum number of micro-batches whose activations each rank holds, from forward to backward or dgrad.
    pub fn most_in_flight(&self) -> Vec<usize> {
        self.most(|task| match task {
            Task::Forward { .. } => 1,
            Task::Backward { part: Part::Both | Part::Dgrad, .. } => -1,
            _ => 0,
        })
    }

    /// Returns, for each rank, the maximum number of micro-batches whose activations or operands of wgrads the rank holds.
    pub fn most_with_operands(&self) -> Vec<usize> {
        self.most(|task| match task {
            Task::Forward { .. } => 1,
            Task::Backward { part: Part::Both | Part::Wgrad, .. } => -1,
            _ => 0,
        })
    }

    fn most(&self, change: impl Fn(&Task) -> isize) -> Vec<usize> {
        let of_rank = |tasks: &Vec<Task>| {
            let held = tasks.iter().scan(0, |held, task| {
                *held += change(task);
                Some(*held)
            });
            held.max().unwrap_or(0) as usize
        };
        self.tasks.iter().map(of_rank).collect()
    }
}
