//! The hub collects the calls of all ranks in all groups. It compares the calls of each collective or message, combines their data and answers.
//!
//! The ranks of `threads` share one hub. In `process`, rank 0 has the hub and passes it the messages of the other ranks.
//!
//! The hub compares the calls of a collective before it computes, and adds in the order of the ranks, so all CPU backends give the same bits.
//!
//! A job has one fault, the first one, which ends the calls of all groups. The hub fails the job with a `Fault` that names one rank: the rank whose
//! connection ended, whose process is silent, or that does not enter a call within `Limits::collective`. A rank that waits in another call is not
//! at fault while a rank that it waits for can continue (`deadlocked`). Heartbeats carry reports of progress, which restart the deadline of their
//! rank. The sender of an announcement (`Group::announce`) has no deadline: a server without requests may let the other ranks wait for hours.

use super::call::{Channel, Op};
use super::combine::{Bytes, combine};
use super::fault::{Fault, list_ranks};
use super::members::{self, Members};
use super::progress;
use super::round::{Arrival, Round};
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A function that is called with the first fault. It is restricted like a [`Sink`](super::round::Sink).
pub(super) type Observer = Box<dyn Fn(&Fault) + Send>;

/// A function that is called on the first stop request. It is restricted like a [`Sink`](super::round::Sink).
pub(super) type StopObserver = Box<dyn Fn() + Send>;

/// The longest time between checks of the deadlines of open collectives.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Hub {
    /// The number of ranks, from rank 0 on, that are in this process.
    local: usize,
    state: Mutex<State>,
}

struct State {
    ranks: Vec<Member>,
    /// The groups, by number.
    groups: BTreeMap<u64, Arc<Members>>,
    /// The open calls, which not all ranks of their channel have made yet, by channel and number.
    rounds: BTreeMap<(Channel, u64), Round>,
    fault: Option<Fault>,
    observers: Vec<Observer>,
    stop: bool,
    stop_observers: Vec<StopObserver>,
}

/// The state of a rank.
struct Member {
    /// The process of the rank, for error messages.
    process: String,
    /// The last call of the rank, from [`Call::numbered`](super::call::Call::numbered).
    last: Option<String>,
    /// The number of progress reports. `active` is the time of the last report or call.
    reports: u64,
    active: Instant,
}

impl Hub {
    /// Creates a hub for the ranks in `processes`. The first `local` ranks are in this process.
    pub fn new(processes: Vec<String>, local: usize) -> Hub {
        let member = |process| Member { process, last: None, reports: 0, active: Instant::now() };
        let ranks: Vec<_> = processes.into_iter().map(member).collect();
        let size = ranks.len();
        let state = State {
            ranks,
            groups: BTreeMap::from([(0, Arc::new(Members::world(size)))]),
            rounds: BTreeMap::new(),
            fault: None,
            observers: Vec::new(),
            stop: false,
            stop_observers: Vec::new(),
        };
        Hub { local, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the process name of `rank`.
    pub fn introduce(&self, rank: usize, process: String) {
        self.lock().ranks[rank].process = process;
    }

    /// Records the number of progress reports of `rank`.
    pub fn progress(&self, rank: usize, reports: u64) {
        self.lock().progress(rank, reports);
    }

    /// Registers an observer of a future fault.
    pub fn observe(&self, observer: Observer) {
        self.lock().observers.push(observer);
    }

    /// Registers an observer of the first fault. If there was a fault, calls the observer at once.
    pub fn observe_any(&self, observer: Observer) {
        let mut state = self.lock();
        match &state.fault {
            Some(fault) => observer(fault),
            None => state.observers.push(observer),
        }
    }

    /// Registers an observer of a stop request. If there was a request, calls the observer at once.
    pub fn observe_stop(&self, observer: StopObserver) {
        let mut state = self.lock();
        if state.stop {
            observer();
        } else {
            state.stop_observers.push(observer);
        }
    }

    /// Forwards the first stop request to all ranks.
    pub fn stop(&self) {
        let mut state = self.lock();
        if !mem::replace(&mut state.stop, true) {
            mem::take(&mut state.stop_observers).iter().for_each(|observer| observer());
        }
    }

    /// Returns the first fault, if there was one.
    pub fn fault(&self) -> Option<Fault> {
        self.lock().fault.clone()
    }

    /// Fails the job, because `rank` ended, or was silent for the time `silent`. `details` describes the end of the rank, if known.
    pub fn lose(&self, rank: usize, silent: Option<Duration>, details: Option<String>) {
        let mut state = self.lock();
        let process = state.ranks[rank].process.clone();
        state.fail(Fault::Lost { rank, process, silent, details });
    }

    /// Fails the job.
    pub fn fail(&self, fault: Fault) {
        self.lock().fail(fault);
    }

    /// Starts a thread that fails the job if a rank neither enters an open call nor reports progress within `limit`. The thread ends with
    /// the hub.
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

    /// Adds an arrival to round `number` of its channel in `group`. When the last rank arrives, the results of all ranks are computed.
    pub fn submit(&self, arrival: Arrival, group: u64, number: u64) {
        let mut state = self.lock();
        if let Some(fault) = &state.fault {
            return (arrival.sink)(Err(fault.clone()));
        }
        let (rank, call) = (arrival.rank, arrival.call.clone());
        let Some(group) = state.groups.get(&group).filter(|group| group.place(rank).is_some()).cloned() else {
            return state.refuse(arrival, format!("rank {rank} calls {call} in a group that it does not belong to"));
        };
        let member = &mut state.ranks[rank];
        (member.active, member.last) = (Instant::now(), Some(call.numbered(number, &group)));
        if let Err(problem) = call.check(&group) {
            return state.refuse(arrival, format!("rank {rank}: {problem}"));
        }
        let key = (call.channel(rank, &group), number);
        let round = state.rounds.entry(key).or_insert_with(|| Round::new(key.0, number, group));
        if let Some(problem) = round.problem(&arrival) {
            return state.refuse(arrival, problem);
        }
        round.add(arrival);
        if round.missing().next().is_some() {
            return;
        }
        let round = state.rounds.remove(&key).expect("the round that this call completes");
        let (group, arrivals) = (round.group, round.arrivals.into_iter().flatten());
        let (parts, sinks): (Vec<_>, Vec<_>) = arrivals.map(|arrival| (arrival.bytes, arrival.sink)).unzip();
        let results = if call.op == Op::Split {
            state.divide(&group, &call.name, &parts)
        } else {
            drop(state);
            let results = combine(&call, &parts);
            // The hub stays locked, so that a rank that leaves after its answer is not reported before the other ranks have their answers.
            state = self.lock();
            results
        };
        for (sink, bytes) in sinks.into_iter().zip(results) {
            sink(Ok(bytes));
        }
        drop(state);
    }
}

impl State {
    fn progress(&mut self, rank: usize, reports: u64) {
        let member = &mut self.ranks[rank];
        if mem::replace(&mut member.reports, reports) != reports {
            member.active = Instant::now();
        }
    }

    /// Creates the groups of a split of `group`, and answers each member with the number and ranks of its new group.
    fn divide(&mut self, group: &Members, name: &str, parts: &[Vec<u8>]) -> Vec<Bytes> {
        let places: Vec<_> = parts.iter().map(|part| members::decode_place(part)).collect();
        let mut answers = BTreeMap::new();
        for ranks in group.divide(&places) {
            let id = self.groups.len() as u64;
            let group = Members { id, name: name.into(), ranks };
            answers.extend(group.ranks.iter().map(|&rank| (rank, Bytes::from(group.encode()))));
            self.groups.insert(id, Arc::new(group));
        }
        group.ranks.iter().filter_map(|rank| answers.remove(rank)).collect()
    }

    /// Returns whether `rank` waits in an open call.
    fn waits(&self, rank: usize) -> bool {
        self.rounds.values().any(|round| round.holds(rank))
    }

    /// Returns the ranks that wait only for each other.
    fn deadlocked(&self) -> BTreeSet<usize> {
        let mut stuck: BTreeSet<_> = (0..self.ranks.len()).filter(|&rank| self.waits(rank)).collect();
        loop {
            let may_end = |round: &Round| round.missing().any(|rank| !stuck.contains(&rank));
            let free = |rank: &usize| self.rounds.values().any(|round| round.holds(*rank) && may_end(round));
            let freed: Vec<_> = stuck.iter().copied().filter(free).collect();
            if freed.is_empty() {
                return stuck;
            }
            stuck.retain(|rank| !freed.contains(rank));
        }
    }

    /// Returns the fault of the oldest open call whose missing ranks have made no progress for `limit`. A rank that waits in another call for a
    /// rank that can continue is not at fault.
    fn late(&self, limit: Duration) -> Option<Fault> {
        let mut overdue: Vec<_> = self.rounds.values().filter(|round| round.began.elapsed() > limit).collect();
        if overdue.is_empty() {
            return None;
        }
        overdue.sort_by_key(|round| round.began);
        let stuck = self.deadlocked();
        let is_late =
            |rank: &usize| self.ranks[*rank].active.elapsed() > limit && (!self.waits(*rank) || stuck.contains(rank));
        overdue.into_iter().find_map(|round| {
            let late: Vec<_> = round.due().filter(is_late).collect();
            (!late.is_empty()).then(|| Fault::Late(self.describe(round, &late, limit)))
        })
    }

    /// Names the `late` ranks of a round and the ranks that wait for them.
    fn describe(&self, round: &Round, late: &[usize], limit: Duration) -> String {
        let first = round.came().next().expect("a round begins with an arrival");
        let describe = |&rank: &usize| {
            let Member { process, last, .. } = &self.ranks[rank];
            let last = last.as_ref().map_or("its first call".into(), |last| format!("its last was {last}"));
            let call = first.call.counterpart(rank, first.rank).numbered(round.number, &round.group);
            format!("rank {rank} ({process}) did not call {call} ({last}) within {limit:?}")
        };
        let late: Vec<_> = late.iter().map(describe).collect();
        let came: Vec<_> = round.came().map(|arrival| arrival.rank).collect();
        let wait = match came.len() {
            1 if !first.waits() => "has sent it",
            1 => "is waiting",
            _ => "are waiting",
        };
        format!("{}; {} {wait}", late.join("; "), list_ranks(&came))
    }

    /// Fails the job because of an arrival.
    fn refuse(&mut self, arrival: Arrival, problem: String) {
        let fault = Fault::Desync(problem);
        self.fail(fault.clone());
        (arrival.sink)(Err(fault));
    }

    /// Records the first fault, and answers all open calls with it.
    fn fail(&mut self, fault: Fault) {
        if self.fault.is_some() {
            return;
        }
        for observer in &self.observers {
            observer(&fault);
        }
        for arrival in mem::take(&mut self.rounds).into_values().flat_map(|round| round.arrivals).flatten() {
            (arrival.sink)(Err(fault.clone()));
        }
        self.fault = Some(fault);
    }
}
