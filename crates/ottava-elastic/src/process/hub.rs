//! The loop of the hub: it passes messages and timeouts to the state machine, and carries out what the machine decides.

use super::events::Times;
use super::wire::{Contact, Down, Roster, Up, receive, send};
use crate::hub::{Hub, HubAction, HubEvent, Phase};
use crate::message::{Epoch, HostId, Membership, Step, Term, ToKeeper};
use crate::policy::Policy;
use crate::warning::Warning;
use std::collections::BTreeMap;
use std::fs;
use std::io::BufReader;
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time for which the hub stays after the end of the job, so that all keepers read its last message.
const LINGER: Duration = Duration::from_secs(3);

/// Something that a thread tells the hub.
pub(super) enum HubInput {
    /// A keeper has connected.
    Joined { stream: TcpStream, contact: Contact },
    /// A message on a connection.
    Up { host: HostId, connection: u64, message: Up },
    /// A connection has ended, or was silent for too long.
    Closed { host: HostId, connection: u64 },
}

/// The way to the hub of this process, if there is one.
#[derive(Clone, Default)]
pub(super) struct HubDoor(Arc<Mutex<Option<Sender<HubInput>>>>);

impl HubDoor {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Sender<HubInput>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the hub is in this process.
    pub fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// Sends `input` to the hub. Without a hub, the input is dropped, which closes its connection.
    pub fn send(&self, input: HubInput) {
        if let Some(hub) = &*self.lock() {
            let _ = hub.send(input);
        }
    }
}

/// The settings of a hub.
pub(super) struct HubOptions {
    pub policy: Policy,
    pub term: Term,
    pub host: HostId,
    pub disk: Option<Step>,
    pub times: Times,
    /// The time that the hub waits for all hosts before it forms its first epoch without them.
    pub join: Duration,
    /// The notice of a hub that replaces a lost one.
    pub notice: Option<Notice>,
}

/// A file of the run's folder with the address of a hub, for hosts that start later. It is written when the hub has formed an epoch: a host that is cut off
/// starts a hub of its own, which must not lead others to it.
pub(super) struct Notice {
    pub file: PathBuf,
    pub address: String,
}

/// Starts the hub in a thread, and opens its `door`.
pub(super) fn start(options: HubOptions, door: &HubDoor) -> JoinHandle<()> {
    let (sender, receiver) = channel();
    *door.lock() = Some(sender.clone());
    let door = door.clone();
    let work = move || {
        Server::new(options, sender).serve(&receiver);
        *door.lock() = None;
    };
    thread::Builder::new().name("hub".into()).spawn(work).expect("the system starts a thread")
}

/// A connected keeper.
struct Connection {
    number: u64,
    stream: TcpStream,
}

struct Server {
    hub: Hub,
    times: Times,
    join: Duration,
    roster: Roster,
    connections: BTreeMap<HostId, Connection>,
    count: u64,
    sender: Sender<HubInput>,
    /// The epoch before the first one that the hub announces.
    first: Epoch,
    /// The phase that the hub waits in, and since when.
    waits: (Epoch, Phase, Instant),
    /// The epoch that the log has named.
    named: Epoch,
    /// The notice, until it is written.
    notice: Option<Notice>,
}

impl Server {
    fn new(
        HubOptions { policy, term, host, disk, times, join, notice }: HubOptions,
        sender: Sender<HubInput>,
    ) -> Server {
        let hub = Hub::new(policy, term, disk);
        let waits = (hub.epoch(), hub.phase(), Instant::now());
        let roster = Roster { hub: host, disk, ..Roster::default() };
        let first = hub.epoch();
        let connections = BTreeMap::new();
        Server { hub, times, join, roster, connections, count: 0, sender, first, waits, named: 0, notice }
    }

    fn serve(&mut self, inputs: &Receiver<HubInput>) {
        let (mut beat, mut end) = (Instant::now(), None);
        loop {
            match inputs.recv_timeout(self.times.beat()) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if beat.elapsed() >= self.times.beat() {
                beat = Instant::now();
                let all: Vec<HostId> = self.connections.keys().copied().collect();
                all.into_iter().for_each(|host| self.tell(host, &Down::Alive));
            }
            self.time_out();
            if matches!(self.hub.phase(), Phase::Ended(_)) {
                let end = *end.get_or_insert(Instant::now() + LINGER);
                if self.connections.is_empty() || Instant::now() > end {
                    return;
                }
            }
        }
    }

    fn take(&mut self, input: HubInput) {
        match input {
            HubInput::Joined { stream, contact } => self.welcome(stream, contact),
            HubInput::Up { host, connection, message } if self.is_current(host, connection) => match message {
                Up::Message(message) => self.on(HubEvent::From(host, message)),
                Up::Saved(step) => {
                    self.roster.disk = self.roster.disk.max(Some(step));
                    self.on(HubEvent::Saved(step));
                    self.tell_roster();
                }
                Up::Slow => self.on(HubEvent::Slow(host)),
                Up::Alive => {}
            },
            HubInput::Closed { host, connection } if self.is_current(host, connection) => self.close(host),
            HubInput::Up { .. } | HubInput::Closed { .. } => {}
        }
    }

    fn is_current(&self, host: HostId, connection: u64) -> bool {
        self.connections.get(&host).is_some_and(|open| open.number == connection)
    }

    fn welcome(&mut self, stream: TcpStream, contact: Contact) {
        let host = contact.host;
        // A keeper that connects again has lost its earlier connection, which may still look open.
        if self.connections.contains_key(&host) {
            self.close(host);
        }
        let Ok(reader) = stream.try_clone() else { return };
        self.count += 1;
        let (number, sender) = (self.count, self.sender.clone());
        self.connections.insert(host, Connection { number, stream });
        self.roster.contacts.retain(|known| known.host != host);
        self.roster.contacts.push(contact);
        self.roster.contacts.sort_by_key(|contact| contact.host);
        tracing::info!("{} has joined", self.roster.name(host));
        self.tell(host, &Down::Welcome(self.hub.term()));
        self.tell_roster();
        if let Phase::Ended(code) = self.hub.phase() {
            self.tell(host, &Down::Message(ToKeeper::End { code }));
        }
        let listen = move || {
            let mut reader = BufReader::new(reader);
            while let Ok(message) = receive(&mut reader) {
                if sender.send(HubInput::Up { host, connection: number, message }).is_err() {
                    return;
                }
            }
            let _ = sender.send(HubInput::Closed { host, connection: number });
        };
        if thread::Builder::new().name("hub reader".into()).spawn(listen).is_err() {
            self.close(host);
        }
    }

    fn close(&mut self, host: HostId) {
        if let Some(Connection { stream, .. }) = self.connections.remove(&host) {
            let _ = stream.shutdown(Shutdown::Both);
            if !matches!(self.hub.phase(), Phase::Ended(_)) {
                tracing::warn!("{} is lost: its connection has ended", self.roster.name(host));
            }
            self.on(HubEvent::Closed(host));
            self.forget(host);
        }
    }

    /// Removes a lost host from the list of hosts. It is on the list again after it has connected again.
    fn forget(&mut self, host: HostId) {
        self.roster.contacts.retain(|known| known.host != host);
        self.tell_roster();
    }

    fn on(&mut self, event: HubEvent) {
        for action in self.hub.on(event) {
            match action {
                HubAction::Send(host, message) => self.tell(host, &Down::Message(message)),
                HubAction::Drop(host) => {
                    if let Some(Connection { stream, .. }) = self.connections.remove(&host) {
                        tracing::warn!("{} is lost: it did not answer in time", self.roster.name(host));
                        let _ = stream.shutdown(Shutdown::Both);
                        self.forget(host);
                    }
                }
                HubAction::Warn(warning) => self.warn(&warning),
            }
        }
        self.name_epoch();
        let now = (self.hub.epoch(), self.hub.phase());
        if now != (self.waits.0, self.waits.1) {
            self.waits = (now.0, now.1, Instant::now());
        }
    }

    /// Sends a message. A connection that takes no message in time is closed by its reader.
    fn tell(&mut self, host: HostId, message: &Down) {
        let Some(Connection { stream, .. }) = self.connections.get_mut(&host) else { return };
        if send(stream, message).is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn tell_roster(&mut self) {
        let message = Down::Roster(self.roster.clone());
        let all: Vec<HostId> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|host| self.tell(host, &message));
    }

    /// Tells the machine if it has waited too long in its phase.
    fn time_out(&mut self) {
        let (epoch, phase, since) = self.waits;
        let limit = match phase {
            Phase::Hold if epoch == self.first => self.join,
            Phase::Hold => 2 * self.times.silence,
            Phase::Form => self.times.host,
            Phase::Fill | Phase::Start => self.times.start,
            Phase::Replay | Phase::Run | Phase::Ended(_) => return,
        };
        if since.elapsed() > limit {
            self.waits.2 = Instant::now();
            self.on(HubEvent::Timeout(epoch, phase));
        }
    }

    /// Names the hosts and the first step of a new epoch.
    fn name_epoch(&mut self) {
        let Some(members) = self.hub.members().cloned().filter(|members| members.epoch != self.named) else { return };
        self.named = members.epoch;
        let Membership { hosts, step, .. } = members.as_ref();
        let names: Vec<_> = hosts.iter().map(|host| self.roster.name(*host)).collect();
        tracing::info!("{} train from step {} on", names.join(", "), step + 1);
        if let Some(Notice { file, address }) = self.notice.take()
            && let Err(error) = fs::write(&file, address)
        {
            tracing::warn!("{}, where hosts that start later find the hub: {error}", file.display());
        }
    }

    fn warn(&self, warning: &Warning) {
        match warning {
            Warning::Slow(host) => tracing::warn!("{} is slower than the other hosts", self.roster.name(*host)),
            Warning::Stuck(Some(host)) => tracing::warn!("no step ends: {} is behind", self.roster.name(*host)),
            Warning::Stuck(None) => tracing::warn!("no step ends"),
            Warning::CopiesLost(0) => {
                tracing::warn!(
                    "there is no snapshot of all ranks, and no checkpoint, so the job goes back to its start"
                );
            }
            Warning::CopiesLost(step) => {
                tracing::warn!(
                    "there is no snapshot of all ranks, so the job goes back to the checkpoint of step {step}"
                );
            }
            Warning::Shrunk(hosts) => tracing::warn!("the job goes on with {hosts} hosts"),
            Warning::Ended(reason) => tracing::error!("the job ends: {reason}"),
        }
    }
}
