//! Where the calls of all ranks meet: collects each collective, compares the calls, combines the data and answers.
//!
//! `threads` shares one hub; in `process` rank 0 has it, and feeds it what the other ranks send.

use super::call::Call;
use super::combine::{Bytes, combine};
use super::fault::Fault;
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The answer to a call.
pub(super) type Reply = Result<Bytes, Fault>;

/// Delivers an answer. Called with the hub locked, so it must neither block nor call the hub.
pub(super) type Sink = Box<dyn FnOnce(Reply) + Send>;

/// Told of the first fault; as restricted as a [`Sink`].
pub(super) type Observer = Box<dyn Fn(&Fault) + Send>;

pub(super) struct Hub {
    size: usize,
    state: Mutex<State>,
}

struct State {
    /// The process of each rank, for messages.
    processes: Vec<String>,
    /// Collectives that not all ranks have called yet, by number.
    rounds: BTreeMap<u64, Round>,
    fault: Option<Fault>,
    observers: Vec<Observer>,
}

struct Round {
    call: Call,
    parts: Vec<Option<(Vec<u8>, Sink)>>,
}

impl Hub {
    /// A hub for ranks in `processes`.
    pub fn new(processes: Vec<String>) -> Hub {
        let state = State { processes, rounds: BTreeMap::new(), fault: None, observers: Vec::new() };
        Hub { size: state.processes.len(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names the process of `rank`.
    pub fn introduce(&self, rank: usize, process: String) {
        self.lock().processes[rank] = process;
    }

    /// Registers an observer of a coming fault.
    pub fn observe(&self, observer: Observer) {
        self.lock().observers.push(observer);
    }

    /// Registers an observer of the first fault, which is told at once if there was one.
    pub fn observe_any(&self, observer: Observer) {
        let mut state = self.lock();
        match &state.fault {
            Some(fault) => observer(fault),
            None => state.observers.push(observer),
        }
    }

    /// The first fault, if there was one.
    pub fn fault(&self) -> Option<Fault> {
        self.lock().fault.clone()
    }

    /// `rank` ended, or was silent for that time. Fails the group.
    pub fn lose(&self, rank: usize, silent: Option<Duration>) {
        let mut state = self.lock();
        let process = state.processes[rank].clone();
        state.fail(Fault::Lost { rank, process, silent });
    }

    /// Ranks disagree, as `message` says. Fails the group.
    pub fn disagree(&self, message: String) {
        self.lock().fail(Fault::Desync(message));
    }

    /// Adds what `rank` calls as its collective `number`. The last rank to call it computes the result for all.
    pub fn submit(&self, rank: usize, number: u64, call: Call, bytes: Vec<u8>, sink: Sink) {
        let mut state = self.lock();
        if let Some(fault) = &state.fault {
            return sink(Err(fault.clone()));
        }
        let empty = || Round { call: call.clone(), parts: (0..self.size).map(|_| None).collect() };
        let round = state.rounds.entry(number).or_insert_with(empty);
        let problem = self.problem(rank, number, &call, bytes.len(), round);
        round.parts[rank] = Some((bytes, sink));
        if let Some(problem) = problem {
            return state.fail(Fault::Desync(problem));
        }
        if round.parts.iter().any(Option::is_none) {
            return;
        }
        let round = state.rounds.remove(&number).expect("the round that this call completes");
        drop(state);
        let (parts, sinks): (Vec<_>, Vec<_>) = round.parts.into_iter().flatten().unzip();
        let results = combine(&call, &parts);
        // Locked, so that a rank that leaves after its answer is not reported before the others have theirs.
        let _state = self.lock();
        for (sink, bytes) in sinks.into_iter().zip(results) {
            sink(Ok(bytes));
        }
    }

    /// What is wrong with a call of `rank`, if anything.
    fn problem(&self, rank: usize, number: u64, call: &Call, bytes: usize, round: &Round) -> Option<String> {
        if let Err(problem) = call.check(self.size) {
            return Some(format!("rank {rank}: {problem}"));
        }
        if let Some(expected) = call.sent_bytes(rank, self.size).filter(|&expected| expected != bytes) {
            return Some(format!("rank {rank} sends {bytes} bytes for {call}, expected {expected}"));
        }
        if round.parts[rank].is_some() {
            return Some(format!("rank {rank} calls two collectives {number}, the second is {call}"));
        }
        let other = round.parts.iter().position(Option::is_some).filter(|_| round.call != *call)?;
        let ((low, low_call), (high, high_call)) =
            if other < rank { ((other, &round.call), (rank, call)) } else { ((rank, call), (other, &round.call)) };
        Some(format!("rank {high} calls {high_call} as its collective {number}, rank {low} calls {low_call}"))
    }
}

impl State {
    /// Records the first fault and answers all open calls with it.
    fn fail(&mut self, fault: Fault) {
        if self.fault.is_some() {
            return;
        }
        for observer in &self.observers {
            observer(&fault);
        }
        for (_, sink) in mem::take(&mut self.rounds).into_values().flat_map(|round| round.parts).flatten() {
            sink(Err(fault.clone()));
        }
        self.fault = Some(fault);
    }
}
