//! The reward `command`, which is also an environment.

use super::child::Child;
use super::failure::{Failure, OnError};
use super::protocol::{self, Kind, excerpt};
use crate::deadline::Deadline;
use crate::environment::{Environment, Episode, Step, Steps};
use crate::reward::{Reward, Scores};
use crate::sample::{Place, Sample};
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// A program that scores completions: it reads JSON lines from its standard input, and answers each with a line on its standard output. docs/rewards.md
/// describes the lines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandConfig {
    /// The program and its arguments, without a shell: ["python3", "reward.py"].
    pub command: Vec<String>,
    /// Processes that run at the same time; each scores other batches.
    #[serde(default = "one")]
    pub processes: usize,
    /// The most completions of a request. Programs that compare the completions of a prompt need a multiple of their number.
    #[serde(default = "batch_size")]
    pub batch_size: usize,
    /// Seconds in which a request must be answered; after that, the process is killed.
    #[serde(default = "timeout")]
    pub timeout: f64,
    /// Attempts for each request; each one after the first has a new process.
    #[serde(default = "attempts")]
    pub attempts: u32,
    /// What happens to the completions of a request after its last attempt: "stop" ends the run with the error, "zero" scores them 0, and "skip" does
    /// not score them.
    #[serde(default)]
    pub on_error: OnError,
}

fn one() -> usize {
    1
}

fn batch_size() -> usize {
    64
}

fn timeout() -> f64 {
    60.0
}

fn attempts() -> u32 {
    2
}

impl CommandConfig {
    /// The settings of `command` with the defaults.
    pub fn new(command: &[&str]) -> CommandConfig {
        CommandConfig {
            command: command.iter().map(|word| word.to_string()).collect(),
            processes: one(),
            batch_size: batch_size(),
            timeout: timeout(),
            attempts: attempts(),
            on_error: OnError::default(),
        }
    }

    /// Starts the processes of the reward `name`. Errors with [`Error::Config`] if they cannot be started or a setting is 0.
    pub(crate) fn start(&self, name: &str) -> Result<Program> {
        for (what, value) in
            [("processes", self.processes), ("batch_size", self.batch_size), ("attempts", self.attempts as usize)]
        {
            if value == 0 {
                return Err(Error::Config(format!("`{what}` is 0; it has to be at least 1")));
            }
        }
        let timeout = seconds("timeout", self.timeout)?;
        let start =
            |_| Ok(Worker { child: Some(Child::start(name, &self.command).map_err(Error::Config)?), next_id: 0 });
        let workers = (0..self.processes).map(start).collect::<Result<_>>()?;
        Ok(Program { setup: Setup { name: name.to_string(), config: self.clone(), timeout }, workers })
    }

    /// Starts the command as an environment named `name`; its `samples` are turns. Errors as a reward does.
    pub fn environment(&self, name: &str) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self.start(name)?))
    }
}

/// The time that a setting gives in seconds. Errors with [`Error::Config`] unless it is positive.
pub(super) fn seconds(setting: &str, value: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err(Error::Config(format!("`{setting}` is {value}; it has to be a positive number of seconds"))),
    }
}

/// The running command.
pub(crate) struct Program {
    setup: Setup,
    workers: Vec<Worker>,
}

/// What all processes of a command share.
struct Setup {
    name: String,
    config: CommandConfig,
    timeout: Duration,
}

/// One process, and what it becomes after failures.
struct Worker {
    /// `None` after a failure, until the next request.
    child: Option<Child>,
    next_id: u64,
}

/// Reads an answer to the request with this id, for the samples at these places. Errors with a sentence.
type Read<T> = fn(&[u8], u64, &[Place]) -> Result<T, String>;

/// A request for the part `samples` of a batch, and how its answer is read.
struct Question<'a, S, T> {
    kind: Kind,
    samples: &'a [S],
    places: Vec<Place>,
    read: Read<T>,
}

impl<'a, 'b> Question<'a, Sample<'b>, Scores> {
    fn scores(samples: &'a [Sample<'b>]) -> Self {
        let places = samples.iter().map(Sample::place).collect();
        Question { kind: Kind::Score, samples, places, read: protocol::scores }
    }
}

impl<'a, 'b> Question<'a, Episode<'b>, Steps> {
    fn steps(episodes: &'a [Episode<'b>]) -> Self {
        let places = episodes.iter().map(|episode| episode.sample.place()).collect();
        Question { kind: Kind::Step, samples: episodes, places, read: protocol::steps }
    }
}

impl Program {
    /// The answers to `questions`, in order. Each process takes the next question that is left. Stops early if a failure ends the run.
    fn ask<S: Serialize + Sync, T: Send>(
        &mut self,
        questions: &[Question<S, T>],
        deadline: Deadline,
    ) -> Vec<Result<T, Failure>> {
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let setup = &self.setup;
        let work = |worker: &mut Worker| {
            let mut answers = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(question) = questions.get(number) else { break };
                let answer = worker.ask(setup, question, deadline);
                let ends = matches!(answer, Err(Failure::Ended(_)))
                    || answer.is_err() && setup.config.on_error == OnError::Stop;
                is_over.fetch_or(ends, Ordering::Relaxed);
                answers.push((number, answer));
            }
            answers
        };
        let mut answers: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = self.workers.iter_mut().map(|worker| scope.spawn(|| work(worker))).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("a worker does not panic")).collect()
        });
        answers.sort_by_key(|(number, _)| *number);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }
}

impl Drop for Program {
    /// Asks all processes to end, so that they take their time at the same time.
    fn drop(&mut self) {
        self.workers.iter_mut().filter_map(|worker| worker.child.as_mut()).for_each(Child::close);
    }
}

impl Worker {
    /// The answer to `question`, after attempts with new processes if need be.
    fn ask<S: Serialize, T>(
        &mut self,
        setup: &Setup,
        question: &Question<S, T>,
        deadline: Deadline,
    ) -> Result<T, Failure> {
        let (attempts, mut words) = (setup.config.attempts, String::new());
        for attempt in 1..=attempts {
            deadline.check()?;
            match self.attempt(setup, question, deadline.within(setup.timeout))? {
                Ok(answer) => return Ok(answer),
                Err(fault) => words = fault,
            }
            // A process that has not answered this request would answer it instead of the next one.
            let stderr = self.child.take().map(Child::kill).unwrap_or_default();
            deadline.check()?;
            if !stderr.is_empty() {
                words += &format!("\nThe last lines of its stderr:\n{stderr}");
            }
            tracing::warn!("{}: attempt {attempt} of {attempts}: {words}", setup.name);
        }
        let command = excerpt(setup.config.command.join(" ").as_bytes());
        let last = if attempts == 1 { String::new() } else { format!(" (attempt {attempts} of {attempts})") };
        Err(Failure::Failed(format!("the command `{command}` failed{last}: {words}")))
    }

    /// One attempt, with a new process if there is none. The inner error is a sentence about what went wrong.
    fn attempt<S: Serialize, T>(
        &mut self,
        setup: &Setup,
        question: &Question<S, T>,
        deadline: Deadline,
    ) -> Result<Result<T, String>> {
        let child = match self.child.take() {
            Some(child) => Ok(child),
            None => Child::start(&setup.name, &setup.config.command),
        };
        let child = match child {
            Ok(child) => self.child.insert(child),
            Err(words) => return Ok(Err(words)),
        };
        let id = self.next_id;
        self.next_id += 1;
        let line = child.exchange(protocol::request(id, question.kind, question.samples), deadline)?;
        Ok(line.and_then(|line| (question.read)(&line, id, &question.places)))
    }
}

impl Reward for Program {
    fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scores> {
        let batches: Vec<_> = samples.chunks(self.setup.config.batch_size).collect();
        let questions: Vec<_> = batches.iter().map(|samples| Question::scores(samples)).collect();
        let answers = self.ask(&questions, deadline);
        self.setup.config.on_error.scores(&batches, answers)
    }
}

impl Environment for Program {
    /// After failures that do not end the run, the conversations of a request are over.
    fn step(&mut self, episodes: &[Episode], deadline: Deadline) -> Result<Steps> {
        let batches: Vec<_> = episodes.chunks(self.setup.config.batch_size).collect();
        let questions: Vec<_> = batches.iter().map(|episodes| Question::steps(episodes)).collect();
        let (answers, on_error) = (self.ask(&questions, deadline), self.setup.config.on_error);
        let over = Step { done: true, message: None, reward: on_error.reward() };
        let answers = answers.into_iter().map(|answer| answer.map(|Steps { steps, metrics }| (steps, metrics)));
        let (steps, metrics) = on_error.merge(&batches, answers, over)?;
        Ok(Steps { steps, metrics })
    }
}
