//! A simulated job: hosts, keepers and a hub, connected by messages that take time.

use super::clock::{Clock, Random};
use super::inputs::{DAY, Inputs, Scope};
use super::outcome::Outcome;
use super::training::Training;
use crate::hub::{Hub, HubAction, HubEvent, Phase};
use crate::keeper::{Keeper, KeeperAction, KeeperEvent, Work};
use crate::message::{Epoch, HostId, Part, Source, Step, Term};
use crate::policy::Policy;
use crate::warning::Warning;
use std::collections::VecDeque;

/// Runs the job of `inputs` with random numbers of `seed`.
pub fn run(inputs: &Inputs, seed: u64) -> Outcome {
    let mut job = Job::new(inputs, seed);
    let end = inputs.days * DAY;
    while let Some(event) = job.clock.next_before(end) {
        job.handle(event);
    }
    job.finish()
}

/// What happens at a time.
#[derive(Debug)]
pub(super) enum Event {
    /// A host or a process fails.
    Failure,
    ToHub(Term, HubEvent),
    ToKeeper(HostId, KeeperEvent),
    /// The keeper notices that a worker of an epoch ended.
    WorkerLost(HostId, Epoch),
    /// A lost host is repaired.
    Repaired(HostId),
    /// The launcher starts the job.
    Launch,
    /// The launcher starts a new hub.
    NewHub(Term),
    /// The snapshot or checkpoint for which a change of hosts waits is complete. The number of the start of training.
    Sealed(u64),
    BecomesSlow,
    IsSlow(HostId),
    EndsSlow(HostId),
}

/// The time that a hub waits for reports, for hosts that start, and for a silent host.
const REPORT_TIMEOUT: f64 = 30.0;
const START_TIMEOUT: f64 = 3600.0;

/// The number of recoveries without a snapshot or a checkpoint after which a job ends. The hub learns of both only when training stops.
const MOST_RECOVERIES: u32 = 1000;

/// A simulated job.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub inputs: &'a Inputs,
    pub clock: Clock<Event>,
    pub random: Random,
    pub outcome: Outcome,
    pub hub: Option<Hub>,
    term: Term,
    /// The host of the hub.
    hub_host: HostId,
    /// The keepers by host. A host that is being repaired has none.
    pub keepers: Vec<Option<Keeper>>,
    /// The hosts that are being repaired.
    pub in_repair: Vec<bool>,
    pub is_slow: Vec<bool>,
    /// Training, while it runs.
    pub training: Option<Training>,
    /// The position of training at its last stop, in seconds of work of all hosts.
    pub position: f64,
    /// The number of times that training has started.
    pub starts: u64,
    pub disk: Step,
    stopped_at: f64,
    waits_since: Option<f64>,
    is_launching: bool,
    /// The phase for which the hub's timer runs.
    timer: (u64, Option<Phase>),
}

impl<'a> Job<'a> {
    fn new(inputs: &'a Inputs, seed: u64) -> Job<'a> {
        let hosts = (inputs.hosts + inputs.spares) as usize;
        let mut job = Job {
            inputs,
            clock: Clock::new(inputs.times.latency),
            random: Random::new(seed),
            outcome: Outcome::default(),
            hub: None,
            term: 0,
            hub_host: 0,
            keepers: vec![None; hosts],
            in_repair: vec![false; hosts],
            is_slow: vec![false; hosts],
            training: None,
            position: 0.0,
            starts: 0,
            disk: 0,
            stopped_at: 0.0,
            waits_since: None,
            is_launching: false,
            timer: (0, None),
        };
        job.launch();
        job.next_failure();
        job.next_straggler();
        job
    }

    fn finish(mut self) -> Outcome {
        self.stop_training();
        self.outcome.wall = self.clock.now;
        self.outcome.useful = self.position;
        self.outcome.down += self.clock.now - self.stopped_at;
        self.stop_waiting();
        self.outcome
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Failure => self.fail(),
            Event::ToHub(term, event) => {
                if self.hub.as_ref().is_some_and(|hub| hub.term() == term) {
                    self.tell_hub(event);
                }
            }
            Event::ToKeeper(host, event) => self.tell(host, event),
            Event::WorkerLost(host, epoch) => self.tell(host, KeeperEvent::WorkerLost { epoch }),
            Event::Repaired(host) => self.repair(host),
            Event::Launch => {
                self.is_launching = false;
                self.launch();
            }
            Event::NewHub(term) if term == self.term => self.start_hub(),
            Event::NewHub(_) => {}
            Event::Sealed(start) if start == self.starts && self.training.is_some() => self.report_progress(),
            Event::Sealed(_) => {}
            Event::BecomesSlow => self.become_slow(),
            Event::IsSlow(host) => {
                self.send_hub(HubEvent::Slow(host));
                self.await_seal();
            }
            Event::EndsSlow(host) => {
                self.is_slow[host as usize] = false;
                self.change_speed();
                self.send_hub(HubEvent::Checked(host));
            }
        }
    }

    /// Starts keepers on all hosts, and a hub.
    fn launch(&mut self) {
        let living = self.in_repair.iter().filter(|in_repair| !**in_repair).count() as u32;
        if living < self.inputs.smallest {
            self.start_waiting();
            return;
        }
        self.stop_waiting();
        for host in 0..self.keepers.len() {
            self.keepers[host] = (!self.in_repair[host]).then(|| Keeper::new(host as HostId));
        }
        self.start_hub();
    }

    fn start_hub(&mut self) {
        self.term += 1;
        let Inputs { hosts, smallest, policy, .. } = *self.inputs;
        let living = self.keepers.iter().flatten().count() as u32;
        let policy = Policy {
            sizes: (smallest..=hosts).rev().collect(),
            hosts: living,
            quorum: 0,
            snapshots: self.inputs.snapshots.is_some(),
            straggler: policy,
            most_recoveries: MOST_RECOVERIES,
        };
        self.hub = Some(Hub::new(policy, self.term, Some(self.disk)));
        self.hub_host = self.keepers.iter().position(Option::is_some).unwrap_or(0) as HostId;
        for host in 0..self.keepers.len() as HostId {
            self.tell(host, KeeperEvent::Connected { term: self.term });
        }
        self.start_timer();
    }

    fn next_failure(&mut self) {
        let all = self.keepers.len() as f64 / f64::from(self.inputs.hosts);
        let of_hosts = match self.inputs.apart {
            Some([least, most]) => least + (most - least) * self.random.uniform(),
            None => self.random.exponential(self.inputs.mean_time_between_failures()),
        };
        let delay = of_hosts / all;
        self.clock.after(delay, Event::Failure);
    }

    fn next_straggler(&mut self) {
        if let Some(stragglers) = self.inputs.stragglers {
            let gpus = self.keepers.len() as f64 * f64::from(self.inputs.gpus_per_host);
            let delay = self.random.exponential(DAY / (stragglers.per_1000_gpu_days / 1000.0 * gpus));
            self.clock.after(delay, Event::BecomesSlow);
        }
    }

    /// A random cause strikes a random host. A host that is being repaired cannot fail.
    fn fail(&mut self) {
        self.next_failure();
        let host = self.random.below(self.keepers.len() as u32);
        let causes = &self.inputs.causes;
        let mut drawn = self.random.uniform() * causes.iter().map(|cause| cause.per_1000_gpu_days).sum::<f64>();
        let cause = causes.iter().find(|cause| {
            drawn -= cause.per_1000_gpu_days;
            drawn < 0.0
        });
        let scope = cause.map_or(Scope::Host, |cause| cause.scope);
        let takes_two = scope == Scope::Host && self.random.uniform() < self.inputs.in_pairs;
        if self.keepers[host as usize].is_none() {
            return;
        }
        let works = self.keepers[host as usize].as_ref().is_some_and(|keeper| keeper.work() == Work::Running);
        self.outcome.failures += u64::from(works || scope == Scope::Host);
        match scope {
            Scope::Process if works => {
                self.stop_training();
                let epoch = self.keepers[host as usize].as_ref().map_or(0, Keeper::epoch);
                self.clock.after(self.inputs.times.detect, Event::WorkerLost(host, epoch));
            }
            Scope::Process => {}
            Scope::Host => {
                self.lose_host(host);
                if takes_two {
                    self.lose_host((host + 1) % self.keepers.len() as u32);
                }
            }
        }
    }

    fn lose_host(&mut self, host: HostId) {
        // What the host did before is told before the host is lost.
        match &self.keepers[host as usize] {
            Some(keeper) if keeper.work() == Work::Running => self.stop_training(),
            Some(_) => {}
            None => return,
        }
        self.keepers[host as usize] = None;
        self.in_repair[host as usize] = true;
        self.is_slow[host as usize] = false;
        self.clock.after(self.inputs.times.repair, Event::Repaired(host));
        if self.hub.is_some() && self.hub_host == host {
            self.lose_hub();
        } else {
            let term = self.hub.as_ref().map_or(0, Hub::term);
            self.clock.after(self.inputs.times.detect, Event::ToHub(term, HubEvent::Closed(host)));
        }
    }

    /// The host of the hub is lost. Keepers stop their workers, and the launcher starts a hub on another host.
    fn lose_hub(&mut self) {
        self.outcome.hubs_lost += 1;
        self.stop_training();
        self.hub = None;
        let times = self.inputs.times;
        for host in 0..self.keepers.len() as HostId {
            self.clock.after(times.detect, Event::ToKeeper(host, KeeperEvent::HubLost));
        }
        self.clock.after(times.detect + times.relaunch, Event::NewHub(self.term));
    }

    fn repair(&mut self, host: HostId) {
        self.in_repair[host as usize] = false;
        match &self.hub {
            Some(hub) if !matches!(hub.phase(), Phase::Ended(_)) => {
                let term = hub.term();
                self.keepers[host as usize] = Some(Keeper::new(host));
                self.tell(host, KeeperEvent::Connected { term });
                self.await_seal();
            }
            // The launcher starts the keeper with the next hub.
            None if !self.is_launching && self.keepers.iter().flatten().count() > 0 => {
                self.keepers[host as usize] = Some(Keeper::new(host));
            }
            _ if !self.is_launching => self.launch(),
            _ => {}
        }
    }

    fn become_slow(&mut self) {
        self.next_straggler();
        let Some(stragglers) = self.inputs.stragglers else { return };
        let host = self.random.below(self.keepers.len() as u32);
        if self.keepers[host as usize].is_some() {
            self.outcome.stragglers += 1;
            self.is_slow[host as usize] = true;
            self.change_speed();
            self.clock.after(stragglers.notice, Event::IsSlow(host));
            self.clock.after(stragglers.lasts, Event::EndsSlow(host));
        }
    }

    fn send_hub(&mut self, event: HubEvent) {
        if let Some(hub) = &self.hub {
            self.clock.send(Event::ToHub(hub.term(), event));
        }
    }

    pub(super) fn tell_hub(&mut self, event: HubEvent) {
        let Some(hub) = &mut self.hub else { return };
        let (term, before) = (hub.term(), hub.phase());
        let actions = hub.on(event);
        let after = hub.phase();
        for action in actions {
            match action {
                HubAction::Send(host, message) => {
                    self.clock.send(Event::ToKeeper(host, KeeperEvent::FromHub { term, message }));
                }
                HubAction::Drop(host) => {
                    self.clock.send(Event::ToKeeper(host, KeeperEvent::HubLost));
                    self.clock.send(Event::ToKeeper(host, KeeperEvent::Connected { term }));
                }
                HubAction::Warn(Warning::CopiesLost(_)) => self.outcome.copies_lost += 1,
                HubAction::Warn(_) => {}
            }
        }
        if before != after {
            self.change_phase(after);
        }
        self.start_timer();
    }

    fn change_phase(&mut self, phase: Phase) {
        match phase {
            Phase::Run | Phase::Replay if self.training.is_none() => self.start_training(),
            Phase::Run | Phase::Replay | Phase::Fill | Phase::Start => self.stop_waiting(),
            Phase::Hold => self.stop_training(),
            Phase::Form => {
                self.outcome.exhausted += 1;
                self.start_waiting();
            }
            Phase::Ended(_) => {
                self.stop_training();
                self.outcome.ended += 1;
                self.hub = None;
                self.keepers.iter_mut().for_each(|keeper| *keeper = None);
                self.is_launching = true;
                self.clock.after(self.inputs.times.relaunch, Event::Launch);
            }
        }
    }

    fn start_timer(&mut self) {
        let Some(hub) = &self.hub else { return };
        let (epoch, phase) = (hub.epoch(), hub.phase());
        if self.timer == (epoch, Some(phase)) {
            return;
        }
        self.timer = (epoch, Some(phase));
        let delay = match phase {
            Phase::Hold => REPORT_TIMEOUT,
            Phase::Form => self.inputs.times.wait,
            Phase::Fill | Phase::Start => START_TIMEOUT,
            Phase::Run | Phase::Replay | Phase::Ended(_) => return,
        };
        self.clock.after(delay, Event::ToHub(hub.term(), HubEvent::Timeout(epoch, phase)));
    }

    pub(super) fn tell(&mut self, host: HostId, event: KeeperEvent) {
        let Some(keeper) = &mut self.keepers[host as usize] else { return };
        let times = &self.inputs.times;
        for action in keeper.on(event) {
            match action {
                KeeperAction::Send(message) => self.send_hub(HubEvent::From(host, message)),
                KeeperAction::SendPeer(to, message) => {
                    self.clock.send(Event::ToKeeper(to, KeeperEvent::FromPeer { host, message }));
                }
                KeeperAction::Fetch(part) => self.fetch(host, &part),
                KeeperAction::StartWorkers(part) => {
                    let event = KeeperEvent::Started { epoch: part.members.epoch };
                    self.clock.after(times.start, Event::ToKeeper(host, event));
                }
                KeeperAction::StopWorkers | KeeperAction::Exit(_) => {}
            }
        }
    }

    /// Fetches the shares of a part. The transfer of bytes is not simulated, only its time.
    fn fetch(&mut self, host: HostId, part: &Part) {
        let (members, epoch) = (&part.members, part.members.epoch);
        let is_divided_anew = part.wants.iter().any(|want| want.stored.share.places != members.places());
        let is_local = part.wants.iter().all(|want| want.from == host) && !is_divided_anew;
        let delay = match part.source {
            Source::Disk => self.inputs.times.load,
            Source::Memory if is_local => 0.0,
            Source::Memory => self.inputs.times.fetch,
        };
        let shares = match is_divided_anew {
            true => Training::shares(part).collect(),
            false => part.wants.iter().map(|want| want.stored).collect(),
        };
        self.clock.after(delay, Event::ToKeeper(host, KeeperEvent::Fetched { epoch, shares }));
    }

    /// Sends messages without delay until none is left, and gives the hub what it is sent.
    pub(super) fn settle(&mut self, host: HostId, event: KeeperEvent) -> Vec<HubEvent> {
        let (mut open, mut to_hub): (VecDeque<(HostId, KeeperEvent)>, _) = ([(host, event)].into(), Vec::new());
        while let Some((host, event)) = open.pop_front() {
            let Some(keeper) = &mut self.keepers[host as usize] else { continue };
            for action in keeper.on(event) {
                match action {
                    KeeperAction::Send(message) => to_hub.push(HubEvent::From(host, message)),
                    KeeperAction::SendPeer(to, message) => {
                        open.push_back((to, KeeperEvent::FromPeer { host, message }));
                    }
                    // A snapshot neither starts nor stops anything.
                    _ => {}
                }
            }
        }
        to_hub
    }

    pub(super) fn note_stop(&mut self) {
        self.stopped_at = self.clock.now;
    }

    pub(super) fn note_start(&mut self) {
        self.outcome.down += self.clock.now - self.stopped_at;
        self.stop_waiting();
    }

    fn start_waiting(&mut self) {
        self.waits_since = self.waits_since.or(Some(self.clock.now));
    }

    fn stop_waiting(&mut self) {
        if let Some(since) = self.waits_since.take() {
            self.outcome.waited += self.clock.now - since;
        }
    }
}
