//! The server of rank 0. It accepts the other ranks, and then passes their calls to the hub.

use super::connection::{Connection, Event, Outgoing, finish};
use super::frame::{Fields, Kind};
use super::rendezvous::{Rendezvous, STOPPED, accept};
use super::wire::{CallHead, Hello, decode_call, decode_fault, encode_fault};
use crate::comm::call::Call;
use crate::comm::endpoint::Endpoint;
use crate::comm::fault::{Fault, list_ranks};
use crate::comm::group::Group;
use crate::comm::hub::{Hub, Observer};
use crate::comm::link::{Link, Reporter};
use crate::comm::members::Members;
use crate::comm::round::{Arrival, Reply};
use crate::comm::threads::Local;
use crate::error::{Error, RankFault, Result};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The time within which a connection must authenticate.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The number of unauthenticated connections that are allowed beyond the number of ranks. Further connections are closed, and their ranks retry.
const STRANGERS: usize = 64;

/// The time that rank 0 waits for further ranks if the group cannot be formed, to send them the reason.
const LATECOMERS: Duration = Duration::from_secs(1);

/// The time between reports of the missing ranks.
pub(super) const NOTICE: Duration = Duration::from_secs(10);

/// The time between checks for connections.
const POLL: Duration = Duration::from_millis(5);

/// Rank 0's membership in the job.
struct Server {
    local: Local,
    connections: Vec<Connection>,
}

impl Link for Server {
    fn start(&self, group: &Members, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        self.local.start(group, number, call, bytes)
    }

    fn observe(&self, observer: Observer) {
        self.local.observe(observer);
    }

    fn reporter(&self) -> Arc<dyn Reporter> {
        self.local.reporter()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.local.hub.lose(self.local.rank, None, None);
        finish(&self.connections);
    }
}

/// The ranks that have joined so far.
struct Gathering<'a> {
    rendezvous: &'a Rendezvous,
    hub: Arc<Hub>,
    hellos: BTreeMap<usize, Hello>,
    connections: Vec<Connection>,
    /// The number of connections with a wrong secret.
    denied: usize,
}

/// Accepts the ranks of `rendezvous` at `listener`.
pub(super) fn serve(listener: &TcpListener, rendezvous: &Rendezvous) -> Result<Group> {
    let own = rendezvous.hello();
    let mut processes = vec!["not joined".to_string(); rendezvous.size];
    processes[0] = own.process.clone();
    let hub = Arc::new(Hub::new(processes, 1));
    let supervisor = rendezvous.supervisor.clone();
    hub.observe_stop(Box::new(move || supervisor.request_stop()));
    let hellos = BTreeMap::from([(0, own)]);
    let mut gathering = Gathering { rendezvous, hub: hub.clone(), hellos, connections: Vec::new(), denied: 0 };
    let result = gathering.gather(listener);
    let (kind, text) = match &result {
        Ok(()) => (Kind::Welcome, String::new()),
        Err(message) => (Kind::Refused, message.clone()),
    };
    for connection in &gathering.connections {
        connection.send(Outgoing::new(kind, text.clone().into_bytes()));
    }
    let server = Server { local: Local { hub, rank: 0 }, connections: gathering.connections };
    match result {
        Ok(()) => {
            server.local.hub.enforce(rendezvous.limits.collective);
            Ok(Group::world(Endpoint::new(0, rendezvous.size, Box::new(server), rendezvous.limits)))
        }
        Err(message) => Err(Error::Ranks { fault: RankFault::Rendezvous, message, recent: Vec::new() }),
    }
}

impl Gathering<'_> {
    /// Returns when all ranks have joined. The error is the reason why the ranks do not form a group.
    fn gather(&mut self, listener: &TcpListener) -> Result<(), String> {
        let Rendezvous { size, limits, ref secret, ref supervisor, .. } = *self.rendezvous;
        let mut deadline = Instant::now() + limits.join;
        let (arrived, arrivals) = channel();
        let secret: Arc<[u8]> = secret.as_slice().into();
        let (mut unproven, mut problem) = (0, None);
        listener.set_nonblocking(true).map_err(|e| format!("rank 0 cannot listen: {e}"))?;
        let mut notice = Instant::now() + NOTICE;
        while self.hellos.len() < size && Instant::now() < deadline {
            if Instant::now() >= notice {
                notice += NOTICE;
                self.tell_who_is_missing(listener);
            }
            if let Ok((stream, _)) = listener.accept() {
                if unproven < size + STRANGERS && check_soon(stream, secret.clone(), deadline, arrived.clone()) {
                    unproven += 1;
                }
                continue;
            }
            let found = match arrivals.recv_timeout(POLL) {
                Ok(Ok((hello, stream))) => {
                    unproven -= 1;
                    self.add(hello, stream).err()
                }
                Ok(Err(kind)) => {
                    unproven -= 1;
                    self.denied += usize::from(kind == ErrorKind::PermissionDenied);
                    None
                }
                Err(_) => None,
            };
            if problem.is_none() {
                problem = self.stopped().or(found).or_else(|| self.lost()).or_else(|| supervisor.check().err());
                if problem.is_some() {
                    deadline = deadline.min(Instant::now() + LATECOMERS);
                }
            }
        }
        let absent = || {
            let (missing, denied) = self.missing();
            let (address, limit) = (&self.rendezvous.address, limits.join);
            (self.hellos.len() < size).then(|| format!("{missing} did not join at {address} within {limit:?}{denied}"))
        };
        match problem.or_else(|| self.lost()).or_else(absent) {
            Some(problem) => Err(problem),
            None => difference(&self.hellos).map_or(Ok(()), Err),
        }
    }

    /// Returns a sentence if a rank was asked to stop. Forwards the request to all ranks.
    fn stopped(&self) -> Option<String> {
        self.rendezvous.supervisor.stop_requested().then(|| {
            self.hub.stop();
            STOPPED.into()
        })
    }

    /// Returns a sentence about a rank that joined and was then lost, or `None` if no rank was lost.
    fn lost(&self) -> Option<String> {
        self.hub.fault().map(|fault| fault.error("the rendezvous", Vec::new()).to_string())
    }

    /// Returns the ranks that have not joined, and why connections were refused.
    fn missing(&self) -> (String, String) {
        let missing: Vec<_> = (0..self.rendezvous.size).filter(|rank| !self.hellos.contains_key(rank)).collect();
        let denied = match self.denied {
            0 => String::new(),
            denied => format!("; {denied} connections had a different secret"),
        };
        (list_ranks(&missing), denied)
    }

    fn tell_who_is_missing(&self, listener: &TcpListener) {
        let (missing, denied) = self.missing();
        let (local, reach) = match listener.local_addr() {
            Ok(local) if local.ip().is_loopback() => (local.to_string(), ", which other machines cannot reach"),
            Ok(local) => (local.to_string(), ""),
            Err(_) => (self.rendezvous.address.clone(), ""),
        };
        tracing::info!("rank 0 listens at {local}{reach}, and waits for {missing}{denied}");
    }

    /// Adds an authenticated process. The error is the reason why the process does not belong to the group. The reason is also sent to the process.
    fn add(&mut self, hello: Hello, stream: TcpStream) -> Result<(), String> {
        let (rank, limits) = (hello.rank, self.rendezvous.limits);
        let failed = |e: io::Error| format!("rank 0 cannot serve rank {rank}: {e}");
        if let Some(problem) = self.misfit(&hello) {
            self.connections.push(Connection::open(stream, limits, |_, _| {}).map_err(failed)?);
            return Err(problem);
        }
        self.hub.introduce(rank, hello.process.clone());
        let (hub, supervisor) = (self.hub.clone(), self.rendezvous.supervisor.clone());
        let handle = move |event, queue: &Sender<Outgoing>| match event {
            Event::Ended => hub.lose(rank, None, supervisor.describe_end(rank)),
            Event::Silent => hub.lose(rank, Some(limits.silence), supervisor.describe_end(rank)),
            Event::Message(kind, body) => {
                if receive(&hub, rank, kind, &body, queue).is_none() {
                    hub.fail(Fault::Desync(format!("rank {rank} sent {kind:?}, which rank 0 does not understand")));
                }
            }
        };
        let connection = Connection::open(stream, limits, handle).map_err(failed)?;
        let stops = connection.queue();
        self.hub.observe_stop(Box::new(move || drop(stops.send(Outgoing::new(Kind::Stop, Vec::new())))));
        let faults = connection.queue();
        self.hub.observe(Box::new(move |fault| drop(faults.send(Outgoing::new(Kind::Fault, encode_fault(fault))))));
        self.connections.push(connection);
        self.hellos.insert(rank, hello);
        Ok(())
    }

    /// Returns the reason why a process does not belong to the group, or `None` if it belongs to it.
    fn misfit(&self, hello: &Hello) -> Option<String> {
        let (size, Hello { rank, process, .. }) = (self.rendezvous.size, hello);
        if hello.size != size || *rank >= size {
            return Some(format!("rank {rank} ({process}) belongs to {} ranks, rank 0 to {size}", hello.size));
        }
        let other = self.hellos.get(rank)?;
        Some(format!("two processes are rank {rank}: {} and {process}", other.process))
    }
}

/// Checks a new connection in a separate thread. Returns false if no thread can be started.
fn check_soon(
    stream: TcpStream,
    secret: Arc<[u8]>,
    deadline: Instant,
    arrived: Sender<Result<(Hello, TcpStream), ErrorKind>>,
) -> bool {
    let deadline = deadline.min(Instant::now() + HANDSHAKE);
    let check = move || {
        let hello = stream.set_nonblocking(false).and_then(|()| accept(&stream, &secret, deadline));
        // After the rendezvous nobody receives the result.
        let _ = arrived.send(hello.map(|hello| (hello, stream)).map_err(|e| e.kind()));
    };
    thread::Builder::new().name("comm handshake".into()).spawn(check).is_ok()
}

/// Passes a message of `rank` to the hub. Returns `None` if only rank 0 may send such a message, or if its content is malformed.
fn receive(hub: &Hub, rank: usize, kind: Kind, body: &[u8], queue: &Sender<Outgoing>) -> Option<()> {
    match kind {
        Kind::Heartbeat => hub.progress(rank, Fields(body).number()?),
        Kind::Stop => hub.stop(),
        Kind::Fault => hub.fail(decode_fault(body)?),
        Kind::Call => {
            let (CallHead { request, group, number, call }, bytes) = decode_call(body)?;
            let queue = queue.clone();
            // The observers send a fault to all ranks.
            let answer = move |reply: Reply| {
                if let Ok(bytes) = reply {
                    let data = Some((bytes.all, bytes.range));
                    // If the rank has ended, its reader has reported the end.
                    let _ = queue.send(Outgoing { kind: Kind::Result, head: request.to_le_bytes().to_vec(), data });
                }
            };
            hub.submit(Arrival { rank, call, bytes, sink: Box::new(answer) }, group, number);
        }
        _ => return None,
    }
    Some(())
}

/// Describes the first entry of the identities that differs, with its values by rank.
fn difference(hellos: &BTreeMap<usize, Hello>) -> Option<String> {
    let names = hellos.values().flat_map(|hello| hello.identity.iter().map(|(name, _)| name));
    names.into_iter().find_map(|name| {
        let mut by_value: Vec<(Vec<&str>, Vec<usize>)> = Vec::new();
        for (&rank, hello) in hellos {
            let values = hello.identity.iter().filter(|(other, _)| other == name);
            let values: Vec<_> = values.map(|(_, value)| value.as_str()).collect();
            match by_value.iter_mut().find(|(other, _)| *other == values) {
                Some((_, with_value)) => with_value.push(rank),
                None => by_value.push((values, vec![rank])),
            }
        }
        let sides = by_value.iter().map(|(values, with_value)| {
            let values = if values.is_empty() { "missing".into() } else { format!("`{}`", values.join("`, `")) };
            format!("{values} on {}", list_ranks(with_value))
        });
        let sides: Vec<_> = sides.collect();
        (sides.len() > 1).then(|| format!("ranks do not run the same job: {name} is {}", sides.join(" and ")))
    })
}
