//! The main loop of a keeper: it passes events to the state machine, and carries out what the machine decides.

use super::events::{Input, Times};
use super::hub::{self, HubDoor, HubOptions, Notice};
use super::hub_link::Search;
use super::memory::Memory;
use super::server::{serve_keepers, serve_workers};
use super::transfer::Peers;
use super::wire::{Credentials, Down, Roster, Up, send};
use super::worker_link::{FromWorker, ToWorker, write_line};
use super::workers::{Launch, Resume, Workers, WorkersEnd};
use crate::hub::Hub;
use crate::inventory::overlapping;
use crate::keeper::{Keeper, KeeperAction, KeeperEvent, Work};
use crate::message::{Epoch, HostId, Part, Share, Source, Step, Stored, Term, ToKeeper, ToPeer, Want};
use crate::policy::Policy;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time between looks at the processes of workers.
const TICK: Duration = Duration::from_millis(20);

/// The settings of a keeper. All keepers of a job have the same ones, except `host`.
pub struct KeeperOptions {
    /// The number of this host, from 0. Host 0 has the first hub.
    pub host: HostId,
    /// What the hub does. Its `hosts` are all hosts that the launcher starts.
    pub policy: Policy,
    /// The address of host 0, `host:port`. Port 0 is for a job of one host.
    pub address: String,
    /// The secret of the job.
    pub secret: Vec<u8>,
    /// The program and the settings, which must be the same on all hosts.
    pub identity: String,
    /// The folder for the snapshots of this host.
    pub memory: PathBuf,
    /// The last step to which shares that an earlier keeper left in the folder belong to this run; `None` if none of them does. Shares of later steps are of
    /// a branch that the run has left.
    pub keeps_until: Option<Step>,
    /// The step of the newest complete checkpoint; 0 if the job can start from the beginning.
    pub disk: Option<Step>,
    /// The time limits.
    pub times: Times,
    /// A file that all hosts see. A hub that replaces a lost one writes its address into it, for hosts that start later.
    pub notice: PathBuf,
    /// The flag that is set if the job is asked to stop.
    pub stop: &'static AtomicBool,
}

/// Runs the keeper of a host until the job ends. Returns its exit code. If the job ended because it lost ranks, or a signal stopped it while no rank
/// trained, its snapshots stay in memory, for the job that the launcher starts next.
///
/// Errors if the host cannot listen, or if its memory folder cannot be made or is used by another keeper.
pub fn run(options: &KeeperOptions, workers: &mut dyn Workers) -> io::Result<u8> {
    let memory = Memory::open(&options.memory, options.keeps_until.is_some())?;
    let mut stored = memory.stored()?;
    stored.retain(|stored| Some(stored.share.step) <= options.keeps_until);
    memory.retain(&stored)?;
    let (listener, ip) = listen(options)?;
    let own = listener.local_addr()?;
    let ports = [own.port(), TcpListener::bind((ip, 0))?.local_addr()?.port()];
    let (sender, inputs) = channel();
    let credentials = Credentials { secret: options.secret.clone(), identity: options.identity.clone() };
    let epoch = Arc::new(AtomicU64::new(0));
    let (silence, host) = (options.times.silence, options.host);
    let peers = Peers { host, credentials, memory, silence, inputs: sender.clone(), epoch };
    let door = HubDoor::default();
    serve_keepers(listener, peers.clone(), door.clone())?;
    serve_workers(&peers.memory, sender)?;
    let address = if host == 0 { own.to_string() } else { options.address.clone() };
    let mut host = Host {
        options,
        address,
        machine: Keeper::with_memory(host, stored),
        peers,
        door,
        ports,
        workers,
        streams: Vec::new(),
        hub: None,
        lost: None,
        roster: Roster::default(),
        searches: 0,
        hub_thread: None,
        launches: 0,
        is_told_to_stop: false,
        has_ended: false,
    };
    host.search();
    let code = host.serve(&inputs);
    host.leave();
    if host.has_ended && code != Keeper::LOST {
        host.peers.memory.clear()?;
    }
    Ok(code)
}

/// Listens for other keepers. Host 0 listens at the address of the job, and another host at the interface that reaches host 0.
fn listen(options: &KeeperOptions) -> io::Result<(TcpListener, IpAddr)> {
    let deadline = Instant::now() + options.times.host;
    // The name of host 0 may not be known yet.
    let address = loop {
        match options.address.to_socket_addrs().map(|mut all| all.next()) {
            Ok(Some(address)) => break address,
            Err(error) if Instant::now() > deadline => return Err(error),
            _ => thread::sleep(Duration::from_millis(500)),
        }
    };
    if options.host == 0 {
        let wrong =
            |error| io::Error::other(format!("host 0 cannot listen at {address}, the address of the job: {error}"));
        return Ok((TcpListener::bind(address).map_err(wrong)?, address.ip()));
    }
    let any: SocketAddr = if address.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    // No packet is sent: the system only chooses the interface.
    socket.connect(address)?;
    let ip = socket.local_addr()?.ip();
    Ok((TcpListener::bind((ip, 0))?, ip))
}

struct Host<'a> {
    options: &'a KeeperOptions,
    /// The address of host 0.
    address: String,
    machine: Keeper,
    peers: Peers,
    door: HubDoor,
    ports: [u16; 2],
    workers: &'a mut dyn Workers,
    /// The connections of the workers of this epoch.
    streams: Vec<UnixStream>,
    /// The connection to the hub, with its term.
    hub: Option<(Term, TcpStream)>,
    /// The last hub.
    lost: Option<Term>,
    roster: Roster,
    /// The number of searches for a hub.
    searches: u64,
    hub_thread: Option<JoinHandle<()>>,
    /// The number of times that this keeper started workers.
    launches: u64,
    is_told_to_stop: bool,
    /// Whether the hub has ended the job.
    has_ended: bool,
}

impl Host<'_> {
    fn serve(&mut self, inputs: &Receiver<Input>) -> u8 {
        let mut beat = Instant::now();
        loop {
            let taken = match inputs.recv_timeout(TICK) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Keeper::LOST),
            };
            if let Some(code) = taken.or_else(|| self.look_at_workers()).or_else(|| self.pass_stop_on()) {
                return code;
            }
            if beat.elapsed() >= self.options.times.beat() {
                beat = Instant::now();
                self.tell_hub(&Up::Alive);
            }
        }
    }

    /// Takes an input. Returns the exit code if the job has ended.
    fn take(&mut self, input: Input) -> Option<u8> {
        match input {
            Input::Connected { number, term, stream } if number == self.searches => {
                self.hub = Some((term, stream));
                self.on(KeeperEvent::Connected { term })
            }
            Input::Down { number, message } if number == self.searches => self.on_hub(message),
            Input::HubClosed { number } if number == self.searches => {
                self.lost = self.hub.take().map(|(term, _)| term).or(self.lost);
                tracing::warn!("the connection to the hub on {} has ended", self.roster.name(self.roster.hub));
                let end = self.on(KeeperEvent::HubLost);
                self.search();
                end
            }
            Input::HubMissing { number, reason } if number == self.searches => {
                tracing::error!("{reason}");
                self.on(KeeperEvent::HubMissing)
            }
            Input::Connected { .. } | Input::Down { .. } | Input::HubClosed { .. } | Input::HubMissing { .. } => None,
            Input::BecomeHub { term } => {
                self.become_hub(term);
                None
            }
            Input::FromPeer { host, message } => {
                if let ToPeer::Copy { epoch, stored } = &message {
                    self.admit(*epoch, stored);
                }
                self.on(KeeperEvent::FromPeer { host, message })
            }
            Input::CopyBegun { epoch, place } => self.on(KeeperEvent::Begun { epoch, place }),
            Input::Fetched { epoch, failed } => self.on_fetched(epoch, failed),
            Input::WorkerJoined { epoch, stream } => {
                if epoch == self.machine.epoch() && self.machine.work() == Work::Running {
                    self.streams.push(stream);
                    self.is_told_to_stop = false;
                }
                None
            }
            Input::FromWorker { epoch, message } => self.on_worker(epoch, message),
        }
    }

    fn on_hub(&mut self, message: Down) -> Option<u8> {
        match message {
            Down::Roster(roster) => self.roster = roster,
            Down::Welcome(_) | Down::Alive => {}
            Down::Message(message) => {
                let term = self.hub.as_ref().map(|(term, _)| *term)?;
                if let ToKeeper::Sealed { step, .. } = message {
                    self.tell_workers(ToWorker::Sealed(step));
                }
                self.has_ended |= matches!(message, ToKeeper::End { .. });
                return self.on(KeeperEvent::FromHub { term, message });
            }
        }
        None
    }

    fn on_fetched(&mut self, epoch: Epoch, failed: Option<Want>) -> Option<u8> {
        if let Some(want) = failed {
            return self.on(KeeperEvent::FetchFailed { epoch, want: Some(want) });
        }
        let part = self.machine.part().filter(|part| part.members.epoch == epoch).cloned();
        let shares = part.map_or(Vec::new(), |part| {
            part.wants.iter().for_each(|want| self.admit(epoch, &want.stored));
            self.divided(&part)
        });
        self.on(KeeperEvent::Fetched { epoch, shares })
    }

    /// Returns the shares of the places that this host stores in the epoch of `part`. If the snapshot has another number of places, they are made from
    /// the shares that overlap with them.
    fn divided(&self, Part { members, place, wants, .. }: &Part) -> Vec<Stored> {
        let stored: Vec<Stored> = wants.iter().map(|want| want.stored).collect();
        let Some(old) = stored.first().map(|stored| stored.share.places).filter(|old| *old != members.places()) else {
            return stored;
        };
        let made = members.stored_places(*place).filter_map(|place| {
            let share = Share { step: members.step, epoch: members.epoch, places: members.places(), place };
            let parts = overlapping(place, members.places(), old);
            let parts: Vec<Stored> =
                stored.iter().filter(|stored| parts.contains(&stored.share.place)).copied().collect();
            let made = self.peers.memory.combine(share, &parts);
            // Without the share, only a second loss before the next snapshot costs steps.
            made.map_err(|error| {
                tracing::warn!("the snapshot of step {} for {} hosts: {error}", share.step, share.places)
            })
            .ok()
        });
        made.collect()
    }

    fn on_worker(&mut self, epoch: Epoch, message: FromWorker) -> Option<u8> {
        let place = self.machine.part().filter(|part| part.members.epoch == epoch)?.place;
        match message {
            FromWorker::Joined { .. } => None,
            FromWorker::Started => {
                // The workers have read all files, and keep none of them open that they still need by name.
                warn("the folder of the resumed snapshot", self.peers.memory.clear_resumed(epoch));
                self.on(KeeperEvent::Started { epoch })
            }
            FromWorker::Stepped(step) => self.on(KeeperEvent::Stepped { epoch, step }),
            FromWorker::Begun => self.on(KeeperEvent::Begun { epoch, place }),
            FromWorker::Written { step, folder, listing } => {
                let places = self.machine.part()?.members.places();
                let share = Share { step, epoch, places, place };
                if self.machine.epoch() != epoch || self.machine.work() != Work::Running {
                    return None;
                }
                match self.peers.memory.adopt(&folder, share, &listing) {
                    Ok(digest) => self.on(KeeperEvent::Snapshot { epoch, step, digest }),
                    Err(error) => {
                        tracing::warn!("the snapshot of step {step} in {}: {error}", folder.display());
                        None
                    }
                }
            }
            FromWorker::Saved(step) => {
                self.tell_hub(&Up::Saved(step));
                None
            }
            FromWorker::Slow => {
                self.tell_hub(&Up::Slow);
                None
            }
        }
    }

    /// Makes received bytes a share, before the machine knows of the share.
    fn admit(&self, epoch: Epoch, stored: &Stored) {
        warn("a received snapshot", self.peers.memory.admit(epoch, stored));
    }

    /// Passes an event to the machine. Returns the exit code if the job has ended.
    fn on(&mut self, event: KeeperEvent) -> Option<u8> {
        let (mut events, mut end) = (VecDeque::from([event]), None);
        while let Some(event) = events.pop_front() {
            let before = self.machine.memory().to_vec();
            for action in self.machine.on(event) {
                match action {
                    KeeperAction::Exit(code) => end = Some(code),
                    action => events.extend(self.carry_out(action)),
                }
            }
            self.peers.epoch.store(self.machine.epoch(), Ordering::Relaxed);
            if self.machine.memory() != before {
                warn("an old snapshot", self.peers.memory.retain(self.machine.memory()));
            }
        }
        end
    }

    /// Carries out an action. Returns what happened at once.
    fn carry_out(&mut self, action: KeeperAction) -> Option<KeeperEvent> {
        let roster = || self.roster.clone();
        match action {
            KeeperAction::Send(message) => self.tell_hub(&Up::Message(message)),
            KeeperAction::SendPeer(host, ToPeer::Copy { epoch, stored }) => {
                self.peers.copy(roster(), host, epoch, stored);
            }
            KeeperAction::SendPeer(host, ToPeer::Copied { epoch, stored }) => {
                self.peers.confirm(roster(), host, epoch, stored);
            }
            KeeperAction::StopWorkers => {
                self.streams.clear();
                self.workers.stop();
                warn("an incomplete snapshot", self.peers.memory.discard_new());
            }
            KeeperAction::Fetch(part) => self.peers.fetch(roster(), part),
            KeeperAction::StartWorkers(part) => {
                if let Err(reason) = self.start_workers(&part) {
                    tracing::error!("the workers do not start: {reason}");
                    return Some(KeeperEvent::WorkerLost { epoch: part.members.epoch });
                }
            }
            KeeperAction::Exit(_) => {}
        }
        None
    }

    fn start_workers(&mut self, part: &Part) -> Result<(), String> {
        let Part { members, place, source, .. } = part;
        let first = members.hosts.first().and_then(|host| self.roster.contact(*host));
        let address = first.ok_or("the address of rank 0 is not known")?.ranks_address.clone();
        // After the first launch, there may be checkpoints of this job, which a new run would refuse.
        let is_first = self.launches == 0 && self.lost.is_none() && members.epoch as u32 == 1;
        self.launches += 1;
        let resume = match source {
            Source::Memory => Resume::Memory(self.peers.memory.resume(members.epoch)),
            Source::Disk if is_first => Resume::Start,
            Source::Disk => Resume::Disk,
        };
        let (epoch, places) = (members.epoch, members.places());
        let (socket, snapshots) = (self.peers.memory.socket(), self.peers.memory.new_snapshots());
        self.workers.start(&Launch { epoch, place: *place, places, address, resume, socket, snapshots })
    }

    fn look_at_workers(&mut self) -> Option<u8> {
        if self.machine.work() != Work::Running {
            return None;
        }
        let epoch = self.machine.epoch();
        match self.workers.poll()? {
            WorkersEnd::Lost(words) => {
                tracing::warn!("{words}");
                self.on(KeeperEvent::WorkerLost { epoch })
            }
            WorkersEnd::Ended(code) => self.on(KeeperEvent::WorkersEnded { epoch, code }),
        }
    }

    /// Passes a request to stop on to the workers, which save a checkpoint and end. Without workers, the keeper ends.
    fn pass_stop_on(&mut self) -> Option<u8> {
        if !self.options.stop.load(Ordering::Relaxed) || self.is_told_to_stop {
            return None;
        }
        if self.machine.work() != Work::Running {
            tracing::info!("stopped by a signal while no rank trained");
            return Some(STOPPED);
        }
        self.is_told_to_stop = !self.streams.is_empty();
        self.tell_workers(ToWorker::Stop);
        None
    }

    fn tell_workers(&mut self, message: ToWorker) {
        // A worker that has ended is found by its process.
        self.streams.iter_mut().for_each(|stream| drop(write_line(stream, &message)));
    }

    fn tell_hub(&mut self, message: &Up) {
        if let Some((_, stream)) = &mut self.hub
            && send(stream, message).is_err()
        {
            // Its reader finds the end of the connection.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Starts to look for a hub.
    fn search(&mut self) {
        self.searches += 1;
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string();
        let lost = self.lost.filter(|_| !self.roster.contacts.is_empty()).map(|term| (term, self.roster.clone()));
        let (address, limit) = (self.address.clone(), self.options.times.host);
        let (number, notice, ports) = (self.searches, self.options.notice.clone(), self.ports);
        let after = self.machine.memory().iter().map(|stored| Hub::term_of(stored.share.epoch)).max().unwrap_or(0);
        Search { number, address, lost, after, notice, ports, name, limit }.start(self.peers.clone());
    }

    /// Starts the hub on this host: the first one, or the next one after the loss of a hub.
    fn become_hub(&mut self, term: Term) {
        if self.door.is_open() {
            return;
        }
        let notice = &self.options.notice;
        if self.lost.is_none() {
            let _ = fs::remove_file(notice);
            let (policy, disk) = (self.options.policy.clone(), self.options.disk);
            return self.start_hub(term, policy, disk, self.options.times.host, None);
        }
        let notice = Notice { file: notice.clone(), address: self.own_address().to_string() };
        tracing::warn!("the hub is lost, and starts again on this host");
        let known = &self.options.policy;
        let hosts = (self.roster.contacts.len() as u32).saturating_sub(1);
        let policy = Policy { hosts, quorum: Policy::quorum_of_later_hub(known.hosts), ..known.clone() };
        // Keepers without a hub have stopped their workers by then.
        self.start_hub(term, policy, self.roster.disk, 3 * self.options.times.silence, Some(notice));
    }

    /// Returns the address at which other hosts reach this one.
    fn own_address(&self) -> &str {
        self.roster.contact(self.options.host).map_or("", |contact| &contact.address)
    }

    fn start_hub(&mut self, term: Term, policy: Policy, disk: Option<Step>, join: Duration, notice: Option<Notice>) {
        let (host, times) = (self.options.host, self.options.times);
        let options = HubOptions { policy, term, host, disk, times, join, notice };
        self.hub_thread = Some(hub::start(options, &self.door));
    }

    /// Leaves the job. The hub of this host first tells all keepers that the job has ended.
    fn leave(&mut self) {
        // A hub that has replaced the hub of this host has its own notice there, and may go on.
        let is_own = || fs::read_to_string(&self.options.notice).is_ok_and(|address| address == self.own_address());
        if self.has_ended && self.door.is_open() && is_own() {
            let _ = fs::remove_file(&self.options.notice);
        }
        self.workers.stop();
        if let Some((_, stream)) = self.hub.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(hub) = self.hub_thread.take().filter(|_| self.has_ended) {
            let _ = hub.join();
        }
    }
}

/// The exit code of a process that a signal stopped while there was nothing to save.
const STOPPED: u8 = 130;

fn warn(what: &str, done: io::Result<()>) {
    if let Err(error) = done {
        tracing::warn!("{what}: {error}");
    }
}
