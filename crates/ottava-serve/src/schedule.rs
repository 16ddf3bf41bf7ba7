//! The loop of the engine's thread. It passes completions of requests to the engine, and events of the engine to the clients.
//!
//! The engine holds only as many completions as it computes in a batch (its places); other completions wait here. A request is short if it asks for
//! at most [`SLICE`] tokens over all its completions. Short requests get free places in order of arrival, but long requests keep one place in
//! [`LONG_SHARE`]. Among long requests, a free place goes to the request with the fewest completions in the engine, so requests with many and with
//! few completions take turns.
//!
//! If no place is free, a request without a place takes one from the long request with the most computed tokens, by the rule of [`SLICE`]. The
//! youngest completion of the long request is paused, and recomputed later. So long requests and requests with many completions do not keep short
//! requests waiting.
//!
//! A request is held if its client does not read its events: the engine computes nothing for it until the client reads again.

use crate::backend::Backend;
use crate::error::{ApiError, Result};
use crate::models::ServedModel;
use ottava_engine::{AdapterId, EngineStats, Event, LoadAdapters, Request, RequestId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// The interval at which a thread without work looks whether it goes on.
const POLL: Duration = Duration::from_millis(50);
/// The weight of waiting events at which a request is held.
const HIGH: usize = 4096;
/// The weight of waiting events at which a held request resumes.
const LOW: usize = 1024;

/// The first term of the tokens after which a request yields a place to another request. It yields at twice the tokens of the other request, plus
/// `SLICE`, plus one token per [`PROMPT_SHARE`] tokens of its own prompt, which may have to be recomputed.
const SLICE: usize = 32;
const PROMPT_SHARE: usize = 16;

/// Long requests keep one place in this many.
const LONG_SHARE: usize = 8;

/// The state of the engine's thread that other threads read.
#[derive(Default)]
pub struct Shared {
    stats: Mutex<EngineStats>,
    /// The reason why the engine has ended, if it failed.
    pub failure: OnceLock<String>,
    /// Whether new requests are refused.
    pub stopping: AtomicBool,
}

impl Shared {
    /// Returns the state of the engine after its last step.
    pub fn stats(&self) -> EngineStats {
        *self.stats.lock().expect("no thread panics with it")
    }

    /// Publishes the state of the engine.
    fn set_stats(&self, stats: EngineStats) {
        *self.stats.lock().expect("no thread panics with it") = stats;
    }
}

/// The completions of one HTTP request: `n` completions of each of `requests`, in the order of the prompts.
pub struct Job {
    /// One request for each prompt, with the seed of its first completion.
    pub requests: Vec<Request>,
    /// The number of completions of each prompt.
    pub n: usize,
}

impl Job {
    /// Returns the number of completions.
    pub fn len(&self) -> usize {
        self.requests.len() * self.n
    }

    /// Returns the cost of the job in tokens. A completion costs its new tokens, plus its prompt if the prompt is scored, else a sixteenth of its
    /// prompt.
    fn asked(&self) -> usize {
        let of = |request: &Request| {
            let (prompt, new) = (request.prompt.len(), request.max_new_tokens);
            new.saturating_add(if request.prompt_logprobs.is_some() { prompt } else { prompt / PROMPT_SHARE })
        };
        self.requests.iter().map(of).fold(0, usize::saturating_add).saturating_mul(self.n)
    }

    /// Returns the request for completion `index`, with its own seed.
    fn completion(&self, index: usize) -> Request {
        let mut request = self.requests[index / self.n].clone();
        request.sampling.seed = request.sampling.seed.wrapping_add((index % self.n) as u64);
        request
    }
}

/// Sends the events of one HTTP request to its client.
pub struct Outbox {
    pub sender: mpsc::UnboundedSender<Result<(usize, Event)>>,
    /// The weight of the events that the client has not read.
    pub backlog: Arc<AtomicUsize>,
}

impl Outbox {
    /// Whether a held request with this backlog resumes.
    pub fn is_low(backlog: usize) -> bool {
        backlog <= LOW
    }

    /// Sends an event. Errors if the client has left.
    fn send(&self, index: usize, event: Event) -> std::result::Result<(), ()> {
        self.backlog.fetch_add(weight(&event), Ordering::Relaxed);
        self.sender.send(Ok((index, event))).map_err(drop)
    }
}

/// Returns the weight of an event, in tokens.
pub fn weight(event: &Event) -> usize {
    match event {
        Event::Prompt { logprobs, .. } => logprobs.len().max(1),
        Event::Embedding { .. } | Event::Token { .. } | Event::Finished { .. } => 1,
    }
}

/// Commands of requests to the engine's thread.
pub enum Command {
    /// Compute a job.
    Start { id: u64, job: Job, outbox: Outbox, permit: OwnedSemaphorePermit },
    /// Resume the job, because its client has read events.
    Resume { id: u64 },
    /// End one completion.
    Cancel { id: u64, index: usize },
    /// End all completions.
    End { id: u64 },
    /// Load adapters that are open.
    LoadAdapters { load: LoadAdapters, reply: oneshot::Sender<ottava_common::Result<AdapterId>> },
    /// Free the adapters of a model that new requests cannot name, as soon as no request uses them.
    RemoveAdapters { model: Arc<ServedModel> },
}

/// A job in progress.
struct Group {
    job: Job,
    /// Whether the job asks for at most [`SLICE`] tokens.
    is_short: bool,
    outbox: Outbox,
    /// The number of completions that were passed to the engine so far.
    begun: usize,
    /// The completions in the engine that are neither finished nor paused.
    live: BTreeMap<usize, RequestId>,
    /// The completions that were paused for other requests, the oldest first.
    paused: VecDeque<(usize, RequestId)>,
    /// The number of tokens that the engine has computed for the job.
    tokens: usize,
    held: bool,
    /// The permit, kept until the last completion ends or the group is held for the first time.
    permit: Option<OwnedSemaphorePermit>,
}

impl Group {
    /// Whether the group has completions that could take a place.
    fn waits(&self) -> bool {
        !self.held && (!self.paused.is_empty() || self.begun < self.job.len())
    }

    /// Returns the number of tokens that the group gets at least before it yields a place.
    fn slice(&self) -> usize {
        let longest = self.job.requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
        SLICE + longest / PROMPT_SHARE
    }

    /// Whether all completions of the group have ended.
    fn is_done(&self) -> bool {
        self.live.is_empty() && self.paused.is_empty() && self.begun == self.job.len()
    }
}

/// The state of the engine's thread.
pub struct Schedule<B> {
    backend: B,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    groups: BTreeMap<u64, Group>,
    /// Groups that [wait](Group::waits), in the order of their last turn.
    queue: VecDeque<u64>,
    routes: HashMap<RequestId, (u64, usize)>,
    /// The models whose adapters are freed when no request uses them.
    leaving: Vec<Arc<ServedModel>>,
}

impl<B: Backend> Schedule<B> {
    pub fn new(backend: B, commands: Receiver<Command>, shared: Arc<Shared>) -> Schedule<B> {
        let (groups, queue, routes, leaving) = (BTreeMap::new(), VecDeque::new(), HashMap::new(), Vec::new());
        Schedule { backend, commands, shared, groups, queue, routes, leaving }
    }

    /// Runs until all handles are gone, and then finishes the engine. Returns the errors of [`Backend::step`] and [`Backend::finish`].
    pub fn run(&mut self) -> ottava_common::Result<()> {
        self.run_while(|| Ok(true))?;
        self.backend.finish()
    }

    /// Runs until all handles are gone or `goes_on` returns false. Returns the errors of `goes_on` and [`Backend::step`].
    pub fn run_while(&mut self, mut goes_on: impl FnMut() -> ottava_common::Result<bool>) -> ottava_common::Result<()> {
        while goes_on()? {
            self.remove_adapters();
            // Without work, wait for a command.
            if self.backend.is_idle() && self.queue.is_empty() {
                match self.commands.recv_timeout(POLL) {
                    Ok(command) => self.carry_out(command),
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
            while let Ok(command) = self.commands.try_recv() {
                self.carry_out(command);
            }
            self.fill();
            if !self.backend.is_idle() {
                let events = self.backend.step()?;
                self.deliver(events);
            }
            let mut stats = self.backend.stats();
            let waiting = |group: &Group| group.job.len() - group.begun + group.paused.len();
            stats.waiting += self.groups.values().map(waiting).sum::<usize>();
            self.shared.set_stats(stats);
        }
        Ok(())
    }

    /// Ends all requests in progress with `error`, and empties the engine. Returns the channel of commands, whose later requests wait.
    pub fn end_all(mut self, error: &ApiError) -> ottava_common::Result<Receiver<Command>> {
        let ids: Vec<u64> = self.groups.keys().copied().collect();
        for id in ids {
            // A client that has left reads no error.
            let _ = self.groups[&id].outbox.sender.send(Err(error.clone()));
            self.end(id);
        }
        while !self.backend.is_idle() {
            self.backend.step()?;
        }
        self.shared.set_stats(self.backend.stats());
        Ok(self.commands)
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Start { id, job, outbox, permit } => {
                let (live, paused, permit) = (BTreeMap::new(), VecDeque::new(), Some(permit));
                let is_short = job.asked() <= SLICE;
                let (begun, tokens, held) = (0, 0, false);
                self.groups.insert(id, Group { job, is_short, outbox, begun, live, paused, tokens, held, permit });
                self.queue.push_back(id);
            }
            Command::Resume { id } => {
                let Some(group) = self.groups.get_mut(&id).filter(|group| group.held) else { return };
                group.held = false;
                // Resume the completions in reverse order: the engine runs the completion that was resumed last first.
                group.live.values().rev().for_each(|&request| self.backend.resume(request));
                if group.waits() {
                    self.queue.push_back(id);
                }
            }
            Command::Cancel { id, index } => {
                let Some(group) = self.groups.get(&id) else { return };
                let paused = group.paused.iter().find(|(paused, _)| *paused == index).map(|(_, request)| request);
                let Some(&request) = group.live.get(&index).or(paused) else { return };
                self.backend.cancel(request);
                self.finished(id, index);
            }
            Command::End { id } => self.end(id),
            Command::LoadAdapters { load, reply } => {
                let loaded = self.backend.load_adapters(load);
                if let Err(Ok(id)) = reply.send(loaded) {
                    // The client has left, so nobody can name the adapters.
                    self.backend.remove_adapters(id);
                }
            }
            Command::RemoveAdapters { model } => self.leaving.push(model),
        }
    }

    /// Frees the adapters of models that leave and that no request uses any more. Requests hold their model until they are answered.
    fn remove_adapters(&mut self) {
        let Schedule { backend, groups, leaving, .. } = self;
        leaving.retain(|model| {
            let uses = |group: &Group| group.job.requests.iter().any(|request| request.adapter == model.adapter);
            let is_used = Arc::strong_count(model) > 1 || groups.values().any(uses);
            if let Some(id) = model.adapter.filter(|_| !is_used) {
                backend.remove_adapters(id);
            }
            is_used
        });
    }

    /// Gives free places of the engine to waiting completions, and then takes places from running requests by the rule of [`SLICE`].
    fn fill(&mut self) {
        let stats = self.backend.stats();
        let free = self.backend.max_batch().saturating_sub(stats.running + stats.waiting);
        for _ in 0..free {
            let Some(at) = self.next() else { return };
            self.give_place(at);
        }
        while let Some((at, from)) = self.exchange() {
            self.pause(from);
            self.give_place(at);
        }
    }

    /// Returns the position in the queue of the group that is next.
    fn next(&self) -> Option<usize> {
        let of = |at: usize| self.groups.get(&self.queue[at]);
        let (short, long): (Vec<usize>, Vec<usize>) =
            (0..self.queue.len()).partition(|&at| of(at).is_some_and(|group| group.is_short));
        let has = |&at: &usize| of(at).map_or((0, 0), |group| (group.live.len(), group.tokens));
        let (short, long) = (short.first().copied(), long.into_iter().min_by_key(has));
        if self.long_places() < self.long_share() { long.or(short) } else { short.or(long) }
    }

    /// Returns the position of a group in the queue that has no place, and the long group that yields a place to it.
    fn exchange(&self) -> Option<(usize, u64)> {
        let at = self.next()?;
        let waiting = self.groups.get(&self.queue[at]).filter(|group| group.live.is_empty())?;
        if waiting.is_short && self.long_places() <= self.long_share() {
            return None;
        }
        let running = self.groups.iter().filter(|(_, group)| !group.held && !group.live.is_empty());
        let (&from, most) = running.filter(|(_, group)| !group.is_short).max_by_key(|(_, group)| group.tokens)?;
        (most.tokens >= 2 * waiting.tokens + most.slice()).then_some((at, from))
    }

    /// Returns the number of places that long groups have.
    fn long_places(&self) -> usize {
        let long = self.groups.values().filter(|group| !group.held && !group.is_short);
        long.map(|group| group.live.len()).sum()
    }

    /// Returns the number of places that long groups keep, however many short requests wait. With a single place, long groups keep none.
    fn long_share(&self) -> usize {
        let places = self.backend.max_batch();
        places.div_ceil(LONG_SHARE).min(places.saturating_sub(1))
    }

    /// Pauses the youngest completion of a group to free its place in the batch.
    fn pause(&mut self, id: u64) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some((index, request)) = group.live.pop_last() else { return };
        self.backend.hold(request);
        group.paused.push_back((index, request));
        if !self.queue.contains(&id) {
            self.queue.push_back(id);
        }
    }

    /// Gives a place to the group at position `at` of the queue: resumes a paused completion, or begins a new one.
    fn give_place(&mut self, at: usize) {
        let id = self.queue.remove(at).expect("it is in the queue");
        let Some(group) = self.groups.get_mut(&id) else { return };
        if let Some((index, request)) = group.paused.pop_front() {
            self.backend.resume(request);
            group.live.insert(index, request);
        } else {
            let index = group.begun;
            match self.backend.add(group.job.completion(index)) {
                Ok(request) => {
                    group.begun += 1;
                    group.live.insert(index, request);
                    self.routes.insert(request, (id, index));
                }
                Err(error) => {
                    let _ = group.outbox.sender.send(Err(ApiError::of_request(error)));
                    return self.end(id);
                }
            }
        }
        if group.waits() {
            self.queue.push_back(id);
        }
    }

    /// Sends the events of a step to the clients, and holds requests whose clients do not read.
    fn deliver(&mut self, events: Vec<Event>) {
        let mut grown = BTreeSet::new();
        for event in events {
            let (Event::Prompt { id, .. }
            | Event::Embedding { id, .. }
            | Event::Token { id, .. }
            | Event::Finished { id, .. }) = event;
            let ends = matches!(event, Event::Finished { .. });
            let Some(&(group_id, index)) = self.routes.get(&id) else { continue };
            let Some(group) = self.groups.get_mut(&group_id) else { continue };
            group.tokens += weight(&event);
            match group.outbox.send(index, event) {
                Ok(()) if ends => self.finished(group_id, index),
                Ok(()) => drop(grown.insert(group_id)),
                Err(()) => self.end(group_id),
            }
        }
        for id in grown {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            if group.outbox.backlog.load(Ordering::Relaxed) >= HIGH {
                group.held = true;
                group.permit = None;
                group.live.values().for_each(|&request| self.backend.hold(request));
                self.queue.retain(|&queued| queued != id);
            }
        }
    }

    /// Removes a completion that has ended, and its group after the last completion.
    fn finished(&mut self, id: u64, index: usize) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if let Some(request) = group.live.remove(&index) {
            self.routes.remove(&request);
        }
        if let Some(at) = group.paused.iter().position(|(paused, _)| *paused == index) {
            let (_, request) = group.paused.remove(at).expect("it is there");
            self.routes.remove(&request);
        }
        if !group.waits() {
            self.queue.retain(|&queued| queued != id);
        }
        if group.is_done() {
            self.groups.remove(&id);
        }
    }

    /// Ends all completions of a group and removes it.
    fn end(&mut self, id: u64) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.queue.retain(|&queued| queued != id);
        for request in group.live.into_values().chain(group.paused.into_iter().map(|(_, request)| request)) {
            self.routes.remove(&request);
            self.backend.cancel(request);
        }
    }
}
