//! Where the calls of all ranks meet: collects each collective, compares the calls, combines the data and answers.
//!
//! `threads` shares one hub; in `process` rank 0 has it, and feeds it what the other ranks send.

use super::call::Call;
use super::combine::{Bytes, combine};
use super::fault::{Fault, during, list_ranks};
use super::progress;
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The answer to a call.
pub(super) type Reply = Result<Bytes, Fault>;

/// Delivers an answer. Called with the hub locked, so it must neither block nor call the hub.
pub(super) type Sink = Box<dyn FnOnce(Reply) + Send>;

/// Told of the first fault; as restricted as a [`Sink`].
pub(super) type Observer = Box<dyn Fn(&Fault) + Send>;

/// Told of the first request to stop; as restricted as a [`Sink`].
pub(super) type StopObserver = Box<dyn Fn() + Send>;

/// How often the hub compares open collectives with their deadline, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Hub {
    size: usize,
    /// Ranks of this process: those below.
    local: usize,
    state: Mutex<State>,
}

struct State {
    ranks: Vec<Member>,
    /// Collectives that not all ranks have called yet, by number.
    rounds: BTreeMap<u64, Round>,
    fault: Option<Fault>,
    observers: Vec<Observer>,
    stop: bool,
    stop_observers: Vec<StopObserver>,
}

/// What is known of a rank.
struct Member {
    /// Its process, for messages.
    process: String,
    /// Its last call and that call's number.
    last: Option<(Call, u64)>,
    /// Its reports of progress, and when their number last grew or it last made a call.
    reports: u64,
    active: Instant,
}

struct Round {
    call: Call,
    /// When the first rank came.
    began: Instant,
    parts: Vec<Option<(Vec<u8>, Sink)>>,
}

impl Hub {
    /// A hub for ranks in `processes`, of which the first `local` are this one.
    pub fn new(processes: Vec<String>, local: usize) -> Hub {
        let member = |process| Member { process, last: None, reports: 0, active: Instant::now() };
        let ranks: Vec<_> = processes.into_iter().map(member).collect();
        let size = ranks.len();
        let state = State {
            ranks,
            rounds: BTreeMap::new(),
            fault: None,
            observers: Vec::new(),
            stop: false,
            stop_observers: Vec::new(),
        };
        Hub { size, local, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names the process of `rank`.
    pub fn introduce(&self, rank: usize, process: String) {
        self.lock().ranks[rank].process = process;
    }

    /// `rank` has reported progress so many times.
    pub fn progress(&self, rank: usize, reports: u64) {
        self.lock().progress(rank, reports);
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

    /// Registers an observer of a request to stop, which is told at once if there was one.
    pub fn observe_stop(&self, observer: StopObserver) {
        let mut state = self.lock();
        if state.stop {
            observer();
        } else {
            state.stop_observers.push(observer);
        }
    }

    /// Passes a request to stop on to all ranks, once.
    pub fn stop(&self) {
        let mut state = self.lock();
        if !mem::replace(&mut state.stop, true) {
            mem::take(&mut state.stop_observers).iter().for_each(|observer| observer());
        }
    }

    /// The first fault, if there was one.
    pub fn fault(&self) -> Option<Fault> {
        self.lock().fault.clone()
    }

    /// `rank` ended, or was silent for that time. `details` say what else is known of its end. Fails the group.
    pub fn lose(&self, rank: usize, silent: Option<Duration>, details: Option<String>) {
        let mut state = self.lock();
        let process = state.ranks[rank].process.clone();
        state.fail(Fault::Lost { rank, process, silent, details });
    }

    /// Fails the group.
    pub fn fail(&self, fault: Fault) {
        self.lock().fail(fault);
    }

    /// Fails the group when a rank does not come to a collective for `limit` after another one, and makes no progress either. Checked by a
    /// thread that ends with the hub.
    pub fn enforce(self: &Arc<Self>, limit: Duration) {
        let (hub, pause) = (Arc::downgrade(self), (limit / 8).min(LONGEST_PAUSE));
        let check = move || {
            while let Some(hub) = hub.upgrade() {
                hub.check_deadline(limit);
                drop(hub);
                thread::sleep(pause);
            }
        };
        let started = thread::Builder::new().name("comm deadline".into()).spawn(check);
        started.expect("the system starts a thread");
    }

    fn check_deadline(&self, limit: Duration) {
        let mut state = self.lock();
        for rank in 0..self.local {
            state.progress(rank, progress::reports());
        }
        if let Some(fault) = state.late(limit) {
            state.fail(fault);
        }
    }

    /// Adds what `rank` calls as its collective `number`. The last rank to call it computes the result for all.
    pub fn submit(&self, rank: usize, number: u64, call: Call, bytes: Vec<u8>, sink: Sink) {
        let mut state = self.lock();
        if let Some(fault) = &state.fault {
            return sink(Err(fault.clone()));
        }
        let member = &mut state.ranks[rank];
        (member.active, member.last) = (Instant::now(), Some((call.clone(), number)));
        let empty =
            || Round { call: call.clone(), began: Instant::now(), parts: (0..self.size).map(|_| None).collect() };
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
    fn progress(&mut self, rank: usize, reports: u64) {
        let member = &mut self.ranks[rank];
        if mem::replace(&mut member.reports, reports) != reports {
            member.active = Instant::now();
        }
    }

    /// The oldest open collective, if ranks that are missing there have made no progress for `limit`.
    fn late(&self, limit: Duration) -> Option<Fault> {
        let (&number, round) = self.rounds.first_key_value().filter(|(_, round)| round.began.elapsed() > limit)?;
        let is_late = |&rank: &usize| round.parts[rank].is_none() && self.ranks[rank].active.elapsed() > limit;
        let late: Vec<_> = (0..self.ranks.len()).filter(is_late).collect();
        let waiting: Vec<_> = (0..self.ranks.len()).filter(|&rank| round.parts[rank].is_some()).collect();
        let describe = |&rank: &usize| {
            let Member { process, last, .. } = &self.ranks[rank];
            let last = last
                .as_ref()
                .map_or("its first".into(), |(call, number)| format!("its last was {}", during(call, *number)));
            format!("rank {rank} ({process}) did not come to {} ({last}) within {limit:?}", during(&round.call, number))
        };
        let late: Vec<_> = late.iter().map(describe).collect();
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        (!late.is_empty()).then(|| Fault::Late(format!("{}; {} {wait} there", late.join("; "), list_ranks(&waiting))))
    }

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
