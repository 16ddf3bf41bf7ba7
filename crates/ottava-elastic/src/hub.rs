//! The hub: it decides which hosts work, from which step, and when.

use crate::inventory::CommonStep;
use crate::keeper::Keeper;
use crate::message::{
    Epoch, HostId, Membership, Part, Report, Share, Source, Step, Stored, Term, ToHub, ToKeeper, Want,
};
use crate::policy::{Policy, Straggler};
use crate::warning::Warning;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the hub waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Reports of all connected hosts.
    Hold,
    /// Hosts that take the places of lost hosts.
    Form,
    /// Hosts that fetch their state.
    Fill,
    /// Workers that start.
    Start,
    /// Steps that were trained before.
    Replay,
    /// New steps.
    Run,
    /// Nothing: the job has ended with this code.
    Ended(u8),
}

/// Something that happened, as the process of the hub sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HubEvent {
    /// A message of a host. The first message of a connection is a report.
    From(HostId, ToHub),
    /// The connection to a host is closed.
    Closed(HostId),
    /// A host sends no heartbeats.
    Silent(HostId),
    /// A silent host sends heartbeats again.
    Heard(HostId),
    /// A silent host was silent for too long in this epoch.
    StaysSilent(Epoch, HostId),
    /// The hub has waited too long in this phase of this epoch.
    Timeout(Epoch, Phase),
    /// A host is slower than the other hosts.
    Slow(HostId),
    /// A check found that a host that was slow or hung is as fast as the other hosts.
    Checked(HostId),
    /// No step ends, although all hosts send heartbeats. The host that is behind, if it is known.
    Stuck(Option<HostId>),
    /// A checkpoint of this step is complete on disk.
    Saved(Step),
}

/// Something that the process of the hub must do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HubAction {
    /// Send a message to a host.
    Send(HostId, ToKeeper),
    /// Close the connection to a host.
    Drop(HostId),
    /// Tell a person.
    Warn(Warning),
}

/// A connected host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Host {
    /// The report for the current epoch.
    report: Option<Report>,
    /// Whether the host was slow or hung. Such a host is the last choice among spares.
    is_slow: bool,
    /// Whether the host has done what the phase waits for.
    is_done: bool,
    /// The place of the host in the newest epoch.
    place: Option<u32>,
    /// Whether the host sends no heartbeats in this epoch.
    is_silent: bool,
    /// The exit code of the workers of this epoch, if they ended by themselves.
    code: Option<u8>,
    /// How often the host was the first to lose a worker since a snapshot was sealed by all or a checkpoint was complete.
    losses: u32,
}

/// The state of a hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hub {
    policy: Policy,
    term: Term,
    phase: Phase,
    epoch: Epoch,
    hosts: BTreeMap<HostId, Host>,
    members: Option<Arc<Membership>>,
    /// Whether the hub has announced an epoch.
    is_announced: bool,
    /// The number of hosts for which the phase waits.
    awaited: usize,
    /// Whether the wait for hosts is over, so that the job may shrink.
    waited: bool,
    /// The step of the newest complete checkpoint.
    disk: Option<Step>,
    /// The highest step that any epoch reached.
    furthest: Step,
    /// The newest step that each place has sealed.
    sealed: Vec<Step>,
    /// The newest step that all places have sealed.
    sealed_by_all: Step,
    /// The number of places that have sealed no newer step.
    unsealed: usize,
    /// The shares that could not be fetched from these hosts since training last started.
    failed: BTreeSet<(Share, HostId)>,
    /// The number of epochs that were formed since a snapshot was sealed by all or a checkpoint was complete.
    recoveries: u32,
}

/// The number of lost workers, without a new snapshot or checkpoint, after which a spare host takes the place of a host.
const MOST_LOSSES: u32 = 2;

/// The bits of an epoch below the term of its hub. Epochs of different hubs are different, even if a hub knows nothing of an earlier one.
const EPOCHS_OF_TERM: u32 = 32;

impl Hub {
    /// Returns a new hub with a term higher than all earlier ones. `disk` is the step of the newest complete checkpoint; 0 if the job can start from the
    /// beginning.
    pub fn new(policy: Policy, term: Term, disk: Option<Step>) -> Hub {
        Hub {
            policy,
            term,
            phase: Phase::Hold,
            epoch: term << EPOCHS_OF_TERM,
            is_announced: false,
            awaited: 0,
            hosts: BTreeMap::new(),
            members: None,
            waited: false,
            disk,
            furthest: 0,
            sealed: Vec::new(),
            sealed_by_all: 0,
            unsealed: 0,
            failed: BTreeSet::new(),
            recoveries: 0,
        }
    }

    /// Returns the number of the hub that announced `epoch`.
    pub fn term_of(epoch: Epoch) -> Term {
        epoch >> EPOCHS_OF_TERM
    }

    /// Returns the number of this hub.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the current epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns what the hub waits for.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the hosts of the newest epoch that was formed.
    pub fn members(&self) -> Option<&Arc<Membership>> {
        self.members.as_ref()
    }

    /// Returns whether a host is connected.
    pub fn is_connected(&self, host: HostId) -> bool {
        self.hosts.contains_key(&host)
    }

    /// Returns the members that send no heartbeats.
    pub fn silent(&self) -> impl Iterator<Item = HostId> {
        self.hosts.iter().filter(|(_, host)| host.is_silent).map(|(host, _)| *host)
    }

    /// Returns the newest step that all places have sealed.
    pub fn sealed(&self) -> Step {
        self.sealed_by_all
    }

    /// Returns the next state and what must be done. Depends on nothing but the state and the event.
    pub fn on(&mut self, event: HubEvent) -> Vec<HubAction> {
        let mut actions = Vec::new();
        if !matches!(self.phase, Phase::Ended(_)) {
            self.step(event, &mut actions);
        }
        actions
    }

    fn step(&mut self, event: HubEvent, actions: &mut Vec<HubAction>) {
        match event {
            HubEvent::From(host, ToHub::Report(report)) => self.on_report(host, report, actions),
            HubEvent::From(host, message) if self.hosts.contains_key(&host) => self.on_message(host, message, actions),
            HubEvent::From(..) => {}
            HubEvent::Closed(host) => self.lose(host, actions),
            HubEvent::Silent(host) if self.trains() && self.is_member(host) => self.note_silent(host, true),
            HubEvent::Silent(_) => {}
            HubEvent::Heard(host) => self.note_silent(host, false),
            HubEvent::StaysSilent(epoch, host) if epoch == self.epoch && self.is_silent(host) => {
                actions.push(HubAction::Drop(host));
                self.lose(host, actions);
            }
            HubEvent::StaysSilent(..) => {}
            HubEvent::Timeout(epoch, phase) if epoch == self.epoch && phase == self.phase => self.time_out(actions),
            HubEvent::Timeout(..) => {}
            HubEvent::Slow(host) => self.on_slow(host, actions),
            HubEvent::Checked(host) => self.hosts.get_mut(&host).into_iter().for_each(|host| host.is_slow = false),
            HubEvent::Stuck(host) if self.works() => {
                actions.push(HubAction::Warn(Warning::Stuck(host)));
                if let Some(host) = host.and_then(|host| self.hosts.get_mut(&host)) {
                    host.is_slow = true;
                }
                self.hold(actions);
            }
            HubEvent::Stuck(_) => {}
            HubEvent::Saved(step) => {
                if Some(step) > self.disk {
                    self.disk = Some(step);
                    self.note_progress();
                }
                if !self.policy.snapshots {
                    self.improve(actions);
                }
            }
        }
    }

    /// Whether all workers run.
    fn trains(&self) -> bool {
        matches!(self.phase, Phase::Replay | Phase::Run)
    }

    /// Whether workers run or start.
    fn works(&self) -> bool {
        self.trains() || self.phase == Phase::Start
    }

    fn is_member(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_some_and(|host| host.place.is_some())
    }

    fn is_silent(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_some_and(|host| host.is_silent)
    }

    fn note_silent(&mut self, host: HostId, is_silent: bool) {
        if let Some(host) = self.hosts.get_mut(&host) {
            host.is_silent = is_silent;
        }
    }

    /// Returns the phase of training after `step`.
    fn training(&self, step: Step) -> Phase {
        if step < self.furthest { Phase::Replay } else { Phase::Run }
    }

    fn on_report(&mut self, host: HostId, report: Report, actions: &mut Vec<HubAction>) {
        self.furthest = self.furthest.max(report.reached);
        let is_new = !self.hosts.contains_key(&host);
        let known = self.hosts.entry(host).or_default();
        match self.phase {
            Phase::Hold if !self.is_announced => self.hold_if_joined(actions),
            Phase::Hold if is_new => {
                self.awaited += 1;
                actions.push(HubAction::Send(host, ToKeeper::Hold { epoch: self.epoch }));
            }
            Phase::Hold if report.epoch == self.epoch && known.report.is_none() => {
                known.report = Some(report);
                self.awaited -= 1;
                self.form_if_reported(actions);
            }
            // A host that joins may be the one that is missing.
            Phase::Form if is_new => self.hold(actions),
            // In other phases, a new host is a spare.
            _ => {}
        }
    }

    fn on_message(&mut self, host: HostId, message: ToHub, actions: &mut Vec<HubAction>) {
        match message {
            ToHub::Ready { epoch } if epoch == self.epoch && self.phase == Phase::Fill => {
                self.note_ready(host, actions)
            }
            ToHub::Started { epoch } if epoch == self.epoch && self.phase == Phase::Start => self.note_started(host),
            ToHub::Beat { epoch, step } if epoch == self.epoch && self.works() => {
                self.furthest = self.furthest.max(step);
                if self.phase == Phase::Replay {
                    self.phase = self.training(step);
                }
            }
            ToHub::Sealed { epoch, step } if epoch == self.epoch && self.works() => self.seal(host, step, actions),
            // Workers of other hosts are lost as well after the workers of a host have failed by themselves.
            ToHub::WorkerLost { epoch } if epoch == self.epoch && self.works() && self.has_failed() => {
                self.note_end(host, Keeper::LOST, actions);
            }
            ToHub::WorkerLost { epoch } if epoch == self.epoch && self.works() => {
                self.hosts.get_mut(&host).into_iter().for_each(|host| host.losses += 1);
                self.hold(actions);
            }
            ToHub::Failed { epoch, want } if epoch == self.epoch && self.phase == Phase::Fill => {
                self.failed.extend(want.map(|Want { stored, from }| (stored.share, from)));
                self.hold(actions);
            }
            ToHub::WorkersEnded { epoch, code } if epoch == self.epoch && self.works() => {
                self.note_end(host, code, actions);
            }
            _ => {}
        }
    }

    fn note_ready(&mut self, host: HostId, actions: &mut Vec<HubAction>) {
        if self.is_last(host) {
            self.await_members(Phase::Start);
            self.send_members(&ToKeeper::Start { epoch: self.epoch }, actions);
        }
    }

    /// Whether the workers of a member failed by themselves.
    fn has_failed(&self) -> bool {
        self.hosts.values().any(|host| host.place.is_some() && host.code.is_some_and(|code| code != 0))
    }

    /// Ends the job after the workers of all members have ended by themselves. The code is the first one that says more than that ranks were lost, else the
    /// first one that is not 0.
    fn note_end(&mut self, host: HostId, code: u8, actions: &mut Vec<HubAction>) {
        if let Some(known) = self.hosts.get_mut(&host).filter(|host| host.place.is_some()) {
            known.code = Some(code);
        }
        let members = self.hosts.values().filter(|host| host.place.is_some());
        if let Some(codes) = members.map(|host| host.code).collect::<Option<Vec<u8>>>() {
            let own = codes.iter().find(|code| ![0, Keeper::LOST].contains(code));
            self.end(own.or(codes.iter().find(|code| **code != 0)).copied().unwrap_or(0), actions);
        }
    }

    fn note_started(&mut self, host: HostId) {
        if self.is_last(host) {
            // All members have checked the shares of their places and copies.
            self.failed.clear();
            self.phase = self.training(self.members.as_ref().map_or(0, |members| members.step));
        }
    }

    /// Notes that a host has done what the phase waits for. Returns whether it was the last.
    fn is_last(&mut self, host: HostId) -> bool {
        let Some(known) = self.hosts.get_mut(&host).filter(|host| !host.is_done) else { return false };
        known.is_done = true;
        self.awaited -= 1;
        self.awaited == 0
    }

    fn await_members(&mut self, phase: Phase) {
        self.phase = phase;
        self.awaited = self.members.as_ref().map_or(0, |members| members.hosts.len());
        self.hosts.values_mut().for_each(|host| host.is_done = false);
    }

    fn send_members(&self, message: &ToKeeper, actions: &mut Vec<HubAction>) {
        let hosts = self.members.iter().flat_map(|members| &members.hosts);
        actions.extend(hosts.map(|host| HubAction::Send(*host, message.clone())));
    }

    fn seal(&mut self, host: HostId, step: Step, actions: &mut Vec<HubAction>) {
        let place = self.hosts.get(&host).and_then(|host| host.place);
        let Some(sealed) = place.and_then(|place| self.sealed.get_mut(place as usize)) else { return };
        // A place seals a step only after all places have sealed the step before, so each place counts once.
        if *sealed >= step {
            return;
        }
        *sealed = step;
        self.unsealed -= 1;
        if self.unsealed == 0 {
            (self.sealed_by_all, self.unsealed) = (step, self.sealed.len());
            self.note_progress();
            self.send_members(&ToKeeper::Sealed { epoch: self.epoch, step }, actions);
            self.improve(actions);
        }
    }

    /// Notes that the job has got further: recoveries and lost workers count from here on.
    fn note_progress(&mut self) {
        self.recoveries = 0;
        self.hosts.values_mut().for_each(|host| host.losses = 0);
    }

    /// Forms a new epoch at a step that loses no work, if it has more hosts or replaces a slow host.
    fn improve(&mut self, actions: &mut Vec<HubAction>) {
        if !self.works() {
            return;
        }
        let can_grow = self.size_for(self.hosts.len()) > Some(self.sealed.len() as u32);
        let swaps = self.policy.straggler == Straggler::Swap;
        let has_slow = swaps && self.hosts.values().any(|host| host.is_slow && host.place.is_some());
        let has_spare = self.hosts.values().any(|host| !host.is_slow && host.place.is_none());
        if can_grow || (has_slow && has_spare) {
            self.hold(actions);
        }
    }

    fn on_slow(&mut self, host: HostId, actions: &mut Vec<HubAction>) {
        if let Some(known) = self.hosts.get_mut(&host) {
            known.is_slow = true;
            actions.push(HubAction::Warn(Warning::Slow(host)));
        }
    }

    fn lose(&mut self, host: HostId, actions: &mut Vec<HubAction>) {
        let Some(lost) = self.hosts.remove(&host) else { return };
        match self.phase {
            Phase::Hold if !self.is_announced => {}
            Phase::Hold => {
                self.awaited -= usize::from(lost.report.is_none());
                self.form_if_reported(actions);
            }
            Phase::Form => self.form(actions),
            _ if lost.place.is_some() => self.hold(actions),
            _ => {}
        }
    }

    fn time_out(&mut self, actions: &mut Vec<HubAction>) {
        let late = |is_late: fn(&Host) -> bool| {
            self.hosts.iter().filter(|(_, host)| is_late(host)).map(|(host, _)| *host).collect()
        };
        let late: Vec<HostId> = match self.phase {
            Phase::Hold if !self.is_announced => {
                self.waited = true;
                return self.hold(actions);
            }
            Phase::Hold => late(|host| host.report.is_none()),
            Phase::Form => {
                self.waited = true;
                return self.form(actions);
            }
            Phase::Fill | Phase::Start => late(|host| host.place.is_some() && !host.is_done),
            Phase::Replay | Phase::Run | Phase::Ended(_) => Vec::new(),
        };
        for host in late {
            actions.push(HubAction::Drop(host));
            self.lose(host, actions);
        }
    }

    /// Announces the first epoch of this hub after all hosts have joined.
    fn hold_if_joined(&mut self, actions: &mut Vec<HubAction>) {
        if self.hosts.len() >= self.policy.hosts as usize {
            self.hold(actions);
        }
    }

    /// Announces the next epoch, and asks all hosts for reports.
    fn hold(&mut self, actions: &mut Vec<HubAction>) {
        self.epoch += 1;
        (self.phase, self.is_announced) = (Phase::Hold, true);
        self.awaited = self.hosts.len();
        for (host, known) in &mut self.hosts {
            (known.report, known.is_silent, known.code) = (None, false, None);
            actions.push(HubAction::Send(*host, ToKeeper::Hold { epoch: self.epoch }));
        }
        self.form_if_reported(actions);
    }

    fn form_if_reported(&mut self, actions: &mut Vec<HubAction>) {
        if self.awaited == 0 {
            self.form(actions);
        }
    }

    /// Returns the largest number of hosts with which the job can run, if `available` hosts are there.
    fn size_for(&self, available: usize) -> Option<u32> {
        self.policy.sizes.iter().copied().find(|size| *size as usize <= available)
    }

    /// Chooses hosts and step of the next epoch. All connected hosts have reported.
    fn form(&mut self, actions: &mut Vec<HubAction>) {
        self.phase = Phase::Form;
        let reported = self.hosts.values().filter_map(|host| host.report.as_ref()?.members.clone());
        let last = reported.chain(self.members.clone()).max_by_key(|members| members.epoch);
        let before = last.as_ref().map_or(self.policy.sizes[0], |last| last.places());
        let size = self.size_for(self.hosts.len());
        let has_quorum = self.hosts.len() >= self.policy.quorum as usize;
        if (size < Some(before) || !has_quorum) && !self.waited {
            return;
        }
        if !has_quorum {
            return self.fail("too few of all hosts are left: the others may go on without them", actions);
        }
        let Some(size) = size else { return self.fail("fewer hosts are left than the job needs", actions) };
        let is_here = |last: &Arc<Membership>| last.hosts.iter().any(|host| self.hosts.contains_key(host));
        if !last.as_ref().is_none_or(is_here) {
            return self.fail("no host of the last epoch is left to say that its workers stopped", actions);
        }
        if self.recoveries > self.policy.most_recoveries {
            return self.fail("the job recovered too often without a new snapshot or checkpoint", actions);
        }
        self.recoveries += 1;
        let hosts = self.choose_hosts(size, last.as_deref());
        let memories = self.memories();
        let memories = memories.iter().map(|(host, memory)| (*host, memory.as_slice()));
        let common = if self.policy.snapshots { CommonStep::newest(memories) } else { None };
        let is_lost = common.is_none();
        // A checkpoint may be newer than a snapshot that is still being copied.
        let common = common.filter(|common| Some(common.step) >= self.disk);
        let Some(step) = common.as_ref().map(|common| common.step).or(self.disk) else {
            return self.fail("both copies of a snapshot are lost, and there is no checkpoint", actions);
        };
        if self.policy.snapshots && is_lost && last.is_some() {
            actions.push(HubAction::Warn(Warning::CopiesLost(step)));
        }
        if size < before {
            actions.push(HubAction::Warn(Warning::Shrunk(size)));
        }
        self.waited = false;
        (self.sealed, self.sealed_by_all, self.unsealed) = (vec![step; size as usize], step, size as usize);
        let members = Arc::new(Membership { epoch: self.epoch, hosts, step });
        self.members = Some(Arc::clone(&members));
        self.hosts.values_mut().for_each(|host| host.place = None);
        for (place, host) in (0..).zip(&members.hosts) {
            self.hosts.entry(*host).or_default().place = Some(place);
        }
        self.await_members(Phase::Fill);
        let all = Arc::new(common.as_ref().map_or(Vec::new(), CommonStep::all));
        for (place, host) in (0..).zip(&members.hosts) {
            let (source, wants) = match &common {
                Some(common) => (Source::Memory, common.wants(&members, place)),
                None => (Source::Disk, Vec::new()),
            };
            let part = Part { members: Arc::clone(&members), place, source, wants, all: Arc::clone(&all) };
            actions.push(HubAction::Send(*host, ToKeeper::Fill(part)));
        }
    }

    /// Returns the reported shares of each host, without the shares that could not be fetched.
    fn memories(&self) -> Vec<(HostId, Vec<Stored>)> {
        let reports = self.hosts.iter().filter_map(|(host, known)| Some((*host, known.report.as_ref()?)));
        let usable = |host: HostId, report: &Report| {
            report.memory.iter().filter(|stored| !self.failed.contains(&(stored.share, host))).copied().collect()
        };
        reports.map(|(host, report)| (host, usable(host, report))).collect()
    }

    /// Chooses `size` hosts. Hosts of the last epoch keep their places if the number of places stays the same. Slow hosts, and hosts that lost workers again
    /// and again, are the last choice.
    fn choose_hosts(&self, size: u32, last: Option<&Membership>) -> Vec<HostId> {
        let is_slow = |host: &HostId| {
            let Host { is_slow, losses, .. } = self.hosts[host];
            losses >= MOST_LOSSES || is_slow && self.policy.straggler == Straggler::Swap
        };
        let old: Vec<HostId> = last.map_or(Vec::new(), |last| last.hosts.clone());
        let of_old: BTreeSet<HostId> = old.iter().copied().collect();
        let stays = old.iter().copied().filter(|host| self.hosts.contains_key(host));
        let spares = self.hosts.keys().copied().filter(|host| !of_old.contains(host));
        let mut order: Vec<HostId> = stays.chain(spares).collect();
        order.sort_by_key(is_slow);
        order.truncate(size as usize);
        if old.len() != order.len() {
            return order;
        }
        let chosen: BTreeSet<HostId> = order.iter().copied().collect();
        let mut others = order.into_iter().filter(|host| !of_old.contains(host));
        old.into_iter().filter_map(|host| if chosen.contains(&host) { Some(host) } else { others.next() }).collect()
    }

    fn fail(&mut self, reason: &'static str, actions: &mut Vec<HubAction>) {
        actions.push(HubAction::Warn(Warning::Ended(reason)));
        self.end(Keeper::LOST, actions);
    }

    fn end(&mut self, code: u8, actions: &mut Vec<HubAction>) {
        self.phase = Phase::Ended(code);
        let message = ToKeeper::End { code };
        actions.extend(self.hosts.keys().map(|host| HubAction::Send(*host, message.clone())));
    }
}
