//! A small job whose messages, losses and crashes happen in any order that a test chooses.

use crate::faults::{Fault, Move, Settings};
use ottava_elastic::{
    Epoch, HostId, Hub, HubAction, HubEvent, Keeper, KeeperAction, KeeperEvent, Membership, Part, Phase, Share, Source,
    Step, Stored, Term, ToHub, ToKeeper, ToPeer, Want, Warning,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// A task of the process of a keeper.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Task {
    Fetch(Part),
    Start(Arc<Membership>),
    Snapshot(Step),
}

/// What a host gets from its connection to the hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Down {
    Lost,
    Connected(Term),
    Message(Term, ToKeeper),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    keeper: Keeper,
    tasks: VecDeque<Task>,
    /// The hosts of the epoch whose workers run on this host.
    workers: Option<Arc<Membership>>,
    /// The shares whose bytes no longer have their digest.
    corrupt: BTreeSet<Share>,
}

/// The newest snapshot that all places stored and copied, and its hosts that were lost since.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Safe {
    step: Step,
    members: Arc<Membership>,
    lost: BTreeSet<HostId>,
}

/// The state of the job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub hub: Option<Hub>,
    term: Term,
    nodes: BTreeMap<HostId, Node>,
    gone: BTreeSet<HostId>,
    to_hub: BTreeMap<HostId, VecDeque<HubEvent>>,
    to_keeper: BTreeMap<HostId, VecDeque<Down>>,
    to_peer: BTreeMap<(HostId, HostId), VecDeque<ToPeer>>,
    pub disk: Step,
    /// The last step of any epoch.
    pub furthest: Step,
    /// The epoch of the last step.
    stepped: Epoch,
    safe: Option<Safe>,
    formed: Epoch,
    exits: u32,
    /// The reason that the hub gave for the end of the job.
    pub reason: Option<&'static str>,
    /// What must never happen, and happened.
    wrong: Option<String>,
}

/// The digest of the snapshot of a place.
fn digest(share: &Share) -> u64 {
    share.step * 1000 + u64::from(share.places) * 100 + u64::from(share.place)
}

impl World {
    /// Returns a job whose hosts have all started.
    pub fn new(settings: &Settings) -> World {
        let nodes = (0..settings.policy.hosts).map(|host| (host, Node::new(host))).collect();
        let mut world = World {
            hub: None,
            term: 0,
            nodes,
            gone: BTreeSet::new(),
            to_hub: BTreeMap::new(),
            to_keeper: BTreeMap::new(),
            to_peer: BTreeMap::new(),
            disk: 0,
            furthest: 0,
            stepped: 0,
            safe: None,
            formed: 0,
            exits: 0,
            reason: None,
            wrong: None,
        };
        world.start_hub(settings);
        world
    }

    /// Whether the job has completed its last step, or has ended.
    pub fn is_over(&self, settings: &Settings) -> bool {
        self.has_ended() || self.nodes.values().any(|node| node.keeper.reached() >= settings.last)
    }

    /// Whether the job has ended with a code.
    pub fn has_ended(&self) -> bool {
        self.exits > 0 || self.phase().is_some_and(|phase| matches!(phase, Phase::Ended(_)))
    }

    pub fn phase(&self) -> Option<Phase> {
        self.hub.as_ref().map(Hub::phase)
    }

    /// Whether the hub had a reason to end the job.
    pub fn had_to_end(&self, settings: &Settings) -> bool {
        let Some(hub) = &self.hub else { return false };
        let is_here = |host: &HostId| hub.is_connected(*host);
        let connected = (0..settings.policy.hosts).filter(is_here).count();
        let is_too_small = settings.policy.sizes.iter().all(|size| *size as usize > connected);
        let is_anyone_left = hub.members().is_some_and(|members| members.hosts.iter().any(is_here));
        match self.reason {
            Some(reason) if reason.starts_with("fewer hosts") => is_too_small,
            Some(reason) if reason.starts_with("no host") => !is_anyone_left,
            _ => false,
        }
    }

    /// The newest step that all places have sealed.
    pub fn sealed(&self) -> Option<Step> {
        self.hub.as_ref().map(Hub::sealed)
    }

    /// Whether anything but a step can happen.
    pub fn waits(&self) -> bool {
        [self.to_hub.len(), self.to_keeper.len(), self.to_peer.len()] != [0; 3]
    }

    /// The workers of a host end by themselves.
    pub fn end_workers(&mut self, host: HostId, code: u8) {
        let epoch = self.nodes[&host].keeper.epoch();
        self.tell(host, KeeperEvent::WorkersEnded { epoch, code });
    }

    pub fn living(&self) -> Vec<HostId> {
        self.nodes.keys().copied().collect()
    }

    pub fn lost(&self) -> Vec<HostId> {
        self.gone.iter().copied().collect()
    }

    /// Returns the moves that need no fault. A timeout is one only if nothing else can happen.
    pub fn moves(&self, settings: &Settings) -> Vec<Move> {
        fn waiting<K: Copy, V>(queues: &BTreeMap<K, VecDeque<V>>) -> impl Iterator<Item = K> {
            queues.iter().filter(|(_, queue)| !queue.is_empty()).map(|(key, _)| *key)
        }
        let mut moves: Vec<Move> = waiting(&self.to_keeper).map(Move::ToKeeper).collect();
        moves.extend(waiting(&self.to_peer).map(|(from, to)| Move::ToPeer(from, to)));
        moves.extend(self.nodes.iter().filter(|(_, node)| !node.tasks.is_empty()).map(|(host, _)| Move::Task(*host)));
        match self.hub {
            Some(_) => moves.extend(waiting(&self.to_hub).map(Move::ToHub)),
            None => moves.push(Move::NewHub),
        }
        if self.furthest_running() < settings.last && !self.able().is_empty() {
            moves.push(Move::Step);
        }
        let silent = self.hub.iter().flat_map(Hub::silent);
        moves.extend(silent.flat_map(|host| [Move::Heard(host), Move::StaysSilent(host)]));
        if moves.is_empty() {
            moves.push(Move::Timeout);
        }
        moves
    }

    fn furthest_running(&self) -> Step {
        self.nodes.values().map(|node| node.keeper.reached()).max().unwrap_or(0)
    }

    /// Returns the epochs whose members all work, so that they can complete a step.
    fn able(&self) -> BTreeMap<Epoch, Arc<Membership>> {
        let works = |host: &HostId, epoch: Epoch| {
            let node = self.nodes.get(host).filter(|node| node.tasks.is_empty());
            node.and_then(|node| node.workers.as_ref()).is_some_and(|members| members.epoch == epoch)
        };
        let members = self.nodes.values().filter_map(|node| node.workers.clone());
        let members = members.filter(|members| members.hosts.iter().all(|host| works(host, members.epoch)));
        members.map(|members| (members.epoch, members)).collect()
    }

    /// Makes a move, and checks what must hold in every state.
    pub fn make(&mut self, next: Move, settings: &Settings) -> Result<(), String> {
        match next {
            Move::ToHub(host) => {
                let event = self.to_hub.get_mut(&host).and_then(VecDeque::pop_front).expect("an event waits");
                self.tell_hub(event, settings)?;
            }
            Move::ToKeeper(host) => {
                let down = self.to_keeper.get_mut(&host).and_then(VecDeque::pop_front).expect("an event waits");
                self.tell(
                    host,
                    match down {
                        Down::Lost => KeeperEvent::HubLost,
                        Down::Connected(term) => KeeperEvent::Connected { term },
                        Down::Message(term, message) => KeeperEvent::FromHub { term, message },
                    },
                );
            }
            Move::ToPeer(from, to) => {
                let message = self.to_peer.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("a message waits");
                self.tell(to, KeeperEvent::FromPeer { host: from, message });
            }
            Move::Task(host) => self.finish_task(host),
            Move::Step => self.step(settings)?,
            Move::NewHub => self.start_hub(settings),
            Move::Timeout => self.time_out_if_needed(settings)?,
            Move::Heard(host) => {
                let before = self.phase();
                self.tell_hub(HubEvent::Heard(host), settings)?;
                if self.phase() != before {
                    return Err(format!("a host was heard again: {before:?}, then {:?}", self.phase()));
                }
            }
            Move::StaysSilent(host) => {
                let epoch = self.hub.as_ref().map_or(0, Hub::epoch);
                self.tell_hub(HubEvent::StaysSilent(epoch, host), settings)?;
            }
            Move::Fault(fault) => self.fail(fault, settings)?,
        }
        self.to_hub.retain(|_, queue| !queue.is_empty());
        self.to_keeper.retain(|_, queue| !queue.is_empty());
        self.to_peer.retain(|_, queue| !queue.is_empty());
        self.check()
    }

    fn start_hub(&mut self, settings: &Settings) {
        self.term += 1;
        self.hub = Some(Hub::new(settings.policy.clone(), self.term, Some(self.disk)));
        for host in self.living() {
            self.to_keeper.entry(host).or_default().push_back(Down::Connected(self.term));
        }
    }

    fn tell_hub(&mut self, event: HubEvent, settings: &Settings) -> Result<(), String> {
        let Some(hub) = &mut self.hub else { return Ok(()) };
        let term = hub.term();
        for action in hub.on(event) {
            match action {
                HubAction::Send(host, message) if self.nodes.contains_key(&host) => {
                    self.to_keeper.entry(host).or_default().push_back(Down::Message(term, message));
                }
                HubAction::Drop(host) => self.disconnect(host, Some(term)),
                HubAction::Warn(Warning::Ended(reason)) => self.reason = Some(reason),
                HubAction::Send(..) | HubAction::Warn(_) => {}
            }
        }
        self.check_formation(settings)
    }

    /// Closes the connection of a host that lives. The host connects again.
    fn disconnect(&mut self, host: HostId, term: Option<Term>) {
        self.note_lost(host);
        self.to_hub.remove(&host);
        if self.nodes.contains_key(&host) {
            let down = [Some(Down::Lost), term.map(Down::Connected)];
            self.to_keeper.insert(host, down.into_iter().flatten().collect());
        }
    }

    fn note_lost(&mut self, host: HostId) {
        if let Some(safe) = &mut self.safe {
            safe.lost.insert(host);
        }
    }

    fn tell(&mut self, host: HostId, event: KeeperEvent) {
        let Some(node) = self.nodes.get_mut(&host) else { return };
        for action in node.keeper.on(event) {
            let needs_stop = matches!(
                action,
                KeeperAction::Send(ToHub::Report(_)) | KeeperAction::Fetch(_) | KeeperAction::StartWorkers(_)
            );
            if needs_stop && node.workers.is_some() {
                self.wrong = Some(format!("the workers of host {host} still run at {action:?}"));
            }
            match action {
                // Messages on a connection that is closed are lost.
                KeeperAction::Send(message) => {
                    if self.hub.is_some() && !is_cut(&self.to_keeper, host) {
                        self.to_hub.entry(host).or_default().push_back(HubEvent::From(host, message));
                    }
                }
                KeeperAction::SendPeer(to, message) => {
                    self.to_peer.entry((host, to)).or_default().push_back(message);
                }
                KeeperAction::StopWorkers => {
                    node.workers = None;
                    node.tasks.clear();
                }
                KeeperAction::Fetch(part) => node.tasks = [Task::Fetch(part)].into(),
                KeeperAction::StartWorkers(part) => node.tasks = [Task::Start(part.members)].into(),
                KeeperAction::Exit(_) => {
                    self.exits += 1;
                    node.workers = None;
                    node.tasks.clear();
                }
            }
        }
    }

    fn finish_task(&mut self, host: HostId) {
        let node = self.nodes.get_mut(&host).expect("the host lives");
        let event = match node.tasks.pop_front().expect("there is a task") {
            Task::Fetch(part) => {
                let event = self.fetch(host, &part);
                if let (KeeperEvent::Fetched { shares, .. }, Some(node)) = (&event, self.nodes.get_mut(&host)) {
                    node.corrupt.retain(|share| shares.iter().all(|stored| stored.share != *share));
                }
                event
            }
            Task::Start(members) => {
                let epoch = members.epoch;
                node.workers = Some(members);
                KeeperEvent::Started { epoch }
            }
            Task::Snapshot(step) => {
                let Part { members, place, .. } = node.keeper.part().expect("workers have a part");
                let share = Share { step, epoch: members.epoch, places: members.places(), place: *place };
                KeeperEvent::Snapshot { epoch: members.epoch, step, digest: digest(&share) }
            }
        };
        self.tell(host, event);
    }

    fn fetch(&self, host: HostId, part: &Part) -> KeeperEvent {
        let (members, epoch) = (&part.members, part.members.epoch);
        let has = |from: HostId, stored: &Stored| {
            let node = self.nodes.get(&from);
            node.is_some_and(|node| node.keeper.memory().contains(stored) && !node.corrupt.contains(&stored.share))
        };
        let is_wrong = |want: &&Want| !has(want.from, &want.stored) || want.stored.digest != digest(&want.stored.share);
        if let Some(want) = part.wants.iter().find(is_wrong) {
            return KeeperEvent::FetchFailed { epoch, want: Some(*want) };
        }
        let shares = match part.wants.iter().all(|want| want.stored.share.places == members.places()) {
            true => part.wants.iter().filter(|want| want.from != host).map(|want| want.stored).collect(),
            false => {
                let places = [Some(part.place), members.copied_place(part.place)];
                let share = |place| Share { step: members.step, epoch, places: members.places(), place };
                let stored = |share| Stored { share, digest: digest(&share) };
                places.into_iter().flatten().map(share).map(stored).collect()
            }
        };
        KeeperEvent::Fetched { epoch, shares: if part.source == Source::Disk { Vec::new() } else { shares } }
    }

    fn step(&mut self, settings: &Settings) -> Result<(), String> {
        let Some((epoch, members)) = self.able().pop_last() else { return Err("no epoch can step".into()) };
        if epoch < self.stepped {
            return Err(format!("epoch {epoch:#x} completes a step after epoch {:#x} did", self.stepped));
        }
        self.stepped = epoch;
        let of = |host: &HostId| &self.nodes[host].keeper;
        let step = of(&members.hosts[0]).reached() + 1;
        if let Some(host) = members.hosts.iter().find(|host| of(host).reached() + 1 != step) {
            return Err(format!("host {host} is not at step {}", step - 1));
        }
        let takes = settings.policy.snapshots
            && step.is_multiple_of(settings.interval)
            && members.hosts.iter().all(|host| of(host).has_room());
        self.furthest = self.furthest.max(step);
        for host in &members.hosts {
            self.tell(*host, KeeperEvent::Stepped { epoch, step });
            if takes {
                self.nodes.get_mut(host).expect("a member lives").tasks.push_back(Task::Snapshot(step));
            }
        }
        if step.is_multiple_of(settings.save_steps) {
            self.disk = self.disk.max(step);
            self.tell_hub(HubEvent::Saved(step), settings)?;
        }
        Ok(())
    }

    /// Lets the hub time out after everything else has happened. Only hosts that do not join need a timeout: all other losses reach the hub.
    fn time_out_if_needed(&mut self, settings: &Settings) -> Result<(), String> {
        let Some(hub) = &self.hub else { return Err("there is no hub".into()) };
        let is_new = hub.members().is_none();
        match hub.phase() {
            Phase::Form => self.time_out(settings),
            Phase::Hold if is_new => self.time_out(settings),
            phase => Err(format!("nothing happens in {phase:?}")),
        }
    }

    fn time_out(&mut self, settings: &Settings) -> Result<(), String> {
        let timeout = self.hub.as_ref().map(|hub| HubEvent::Timeout(hub.epoch(), hub.phase()));
        timeout.map_or(Ok(()), |timeout| self.tell_hub(timeout, settings))
    }

    fn fail(&mut self, fault: Fault, settings: &Settings) -> Result<(), String> {
        match fault {
            Fault::Host(host, keeps_messages) => self.lose_host(host, keeps_messages),
            Fault::Worker(host) => {
                if let Some(node) = self.nodes.get(&host) {
                    let epoch = node.keeper.epoch();
                    self.tell(host, KeeperEvent::WorkerLost { epoch });
                }
            }
            Fault::Hub => self.lose_hub(),
            Fault::HostAndHub(host) => {
                self.lose_host(host, false);
                self.lose_hub();
            }
            Fault::Pair(host) => {
                let part = self.nodes.get(&host).and_then(|node| node.keeper.part().cloned());
                let copies = part.and_then(|part| part.members.copy_host(part.place));
                self.lose_host(host, false);
                copies.into_iter().for_each(|host| self.lose_host(host, false));
            }
            Fault::Silent(host) => self.tell_hub(HubEvent::Silent(host), settings)?,
            Fault::Return(host) => {
                self.gone.remove(&host);
                self.nodes.insert(host, Node::new(host));
                if let Some(hub) = &self.hub {
                    self.to_keeper.insert(host, [Down::Connected(hub.term())].into());
                }
            }
            Fault::Damage(host) => {
                let share =
                    self.nodes.get(&host).and_then(|node| node.keeper.memory().last()).map(|stored| stored.share);
                if let Some(share) = share {
                    self.note_lost(host);
                    self.tell(host, KeeperEvent::Damaged { share });
                }
            }
            Fault::Corrupt(host) => {
                self.note_lost(host);
                // A new epoch may have dropped older snapshots already, and nothing is known to be safe until it works.
                if self.able().is_empty() {
                    self.safe = None;
                }
                if let Some(node) = self.nodes.get_mut(&host) {
                    let newest = node.keeper.memory().iter().map(|stored| stored.share).max_by_key(|share| share.step);
                    let newest = newest.map(|share| share.step);
                    let of_step = node.keeper.memory().iter().filter(|stored| Some(stored.share.step) == newest);
                    node.corrupt.extend(of_step.map(|stored| stored.share));
                }
            }
            Fault::Slow(host) => self.tell_hub(HubEvent::Slow(host), settings)?,
            Fault::Stuck(host) => self.tell_hub(HubEvent::Stuck(Some(host)), settings)?,
            // A new hub may not form an epoch before keepers without a hub have stopped their workers.
            Fault::EarlyTimeout => {
                let lags =
                    self.to_keeper.values().flatten().any(|down| matches!(down, Down::Lost | Down::Connected(_)));
                if !lags && !matches!(self.phase(), None | Some(Phase::Run | Phase::Replay)) {
                    self.time_out(settings)?;
                }
            }
        }
        Ok(())
    }

    fn lose_host(&mut self, host: HostId, keeps_messages: bool) {
        if self.nodes.remove(&host).is_none() {
            return;
        }
        self.note_lost(host);
        self.gone.insert(host);
        self.to_keeper.remove(&host);
        self.to_peer.retain(|(from, to), _| *to != host && (*from != host || keeps_messages));
        if self.hub.is_some() {
            let queue = self.to_hub.entry(host).or_default();
            if !keeps_messages {
                queue.clear();
            }
            queue.push_back(HubEvent::Closed(host));
        }
    }

    fn lose_hub(&mut self) {
        if self.hub.take().is_some() {
            self.to_hub.clear();
            self.living().into_iter().for_each(|host| self.disconnect_from_hub(host));
        }
    }

    fn disconnect_from_hub(&mut self, host: HostId) {
        self.to_keeper.entry(host).or_default().push_back(Down::Lost);
    }

    /// A formed epoch loses no step of a snapshot that all places stored and copied, unless a host and the host with its copies are both lost.
    fn check_formation(&mut self, settings: &Settings) -> Result<(), String> {
        let Some(hub) = &self.hub else { return Ok(()) };
        let Some(members) = hub.members() else { return Ok(()) };
        if members.epoch == self.formed {
            return Ok(());
        }
        self.formed = members.epoch;
        if !settings.policy.sizes.contains(&members.places()) {
            return Err(format!("an epoch has {} hosts", members.places()));
        }
        if members.hosts.iter().collect::<BTreeSet<_>>().len() != members.hosts.len() {
            return Err(format!("a host has two places: {members:?}"));
        }
        let Some(Safe { step, members: old, lost }) = &self.safe else { return Ok(()) };
        let is_lost = |place: u32| {
            let hosts = [Some(old.hosts[place as usize]), old.copy_host(place)];
            hosts.into_iter().flatten().all(|host| lost.contains(&host) || !hub.is_connected(host))
        };
        if members.step < *step && !(0..old.places()).any(is_lost) {
            return Err(format!("step {step} was sealed, and the job goes back to step {}", members.step));
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(wrong.clone());
        }
        let able = self.able();
        if able.len() > 1 {
            return Err(format!("two epochs work at once: {able:?}"));
        }
        // All hosts of an epoch that starts have its state, and drop the state of earlier epochs.
        let starting = self.hub.as_ref().filter(|hub| hub.phase() == Phase::Start).and_then(Hub::members).cloned();
        let starting = starting.filter(|members| members.hosts.iter().all(|host| self.nodes.contains_key(host)));
        for members in able.values().chain(&starting) {
            for step in (self.safe.as_ref().map_or(1, |safe| safe.step)..=self.furthest).rev() {
                if self.is_stored(members, step) {
                    self.safe = Some(Safe { step, members: Arc::clone(members), lost: BTreeSet::new() });
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether the host of each place stores its share of `step`, and the host of the next place a copy.
    fn is_stored(&self, members: &Membership, step: Step) -> bool {
        let has = |host: HostId, place: u32| {
            let Node { keeper, corrupt, .. } = &self.nodes[&host];
            keeper.memory().iter().any(|Stored { share, .. }| {
                let is_here = share.step == step && share.place == place && share.places == members.places();
                is_here && !corrupt.contains(share)
            })
        };
        (0..members.places()).all(|place| {
            let copies = members.copy_host(place);
            has(members.hosts[place as usize], place) && copies.is_none_or(|host| has(host, place))
        })
    }
}

/// Whether the connection of `host` is closed and not open again.
fn is_cut(to_keeper: &BTreeMap<HostId, VecDeque<Down>>, host: HostId) -> bool {
    to_keeper.get(&host).into_iter().flatten().any(|down| matches!(down, Down::Lost | Down::Connected(_)))
}

impl Node {
    fn new(host: HostId) -> Node {
        Node { keeper: Keeper::new(host), tasks: VecDeque::new(), workers: None, corrupt: BTreeSet::new() }
    }
}
