//! Rank 0: gathers the other ranks, then feeds their calls to the hub.

use super::connection::{Connection, Event, Outgoing, finish};
use super::frame::Kind;
use super::rendezvous::{Rendezvous, accept};
use super::wire::{Hello, decode_call, encode_fault};
use crate::comm::Comm;
use crate::comm::call::Call;
use crate::comm::hub::{Hub, Observer, Reply};
use crate::comm::link::Link;
use crate::comm::threads::Local;
use crate::error::{Error, RankFault, Result};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time in which a connection must prove that it is a rank.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Unproven connections beyond the number of ranks; further ones are closed, and ranks among them try again.
const STRANGERS: usize = 64;

/// How long rank 0 waits for further ranks when the group cannot form, so that they hear why.
const LATECOMERS: Duration = Duration::from_secs(1);

/// How often rank 0 looks for connections.
const POLL: Duration = Duration::from_millis(5);

/// Rank 0's membership.
struct Server {
    local: Local,
    connections: Vec<Connection>,
}

impl Link for Server {
    fn start(&self, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        self.local.start(number, call, bytes)
    }

    fn observe(&self, observer: Observer) {
        self.local.observe(observer);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.local.hub.lose(self.local.rank, None);
        finish(&self.connections);
    }
}

/// The ranks that have joined so far.
struct Gathering<'a> {
    rendezvous: &'a Rendezvous,
    hub: Arc<Hub>,
    hellos: BTreeMap<usize, Hello>,
    connections: Vec<Connection>,
    /// Connections with a wrong secret.
    denied: usize,
}

/// Gathers the ranks of `rendezvous` at `listener`.
pub(super) fn serve(listener: &TcpListener, rendezvous: &Rendezvous) -> Result<Comm> {
    let own = rendezvous.hello();
    let mut processes = vec!["not joined".to_string(); rendezvous.size];
    processes[0] = own.process.clone();
    let hub = Arc::new(Hub::new(processes));
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
        Ok(()) => Ok(Comm::new(0, rendezvous.size, Box::new(server))),
        Err(message) => Err(Error::Ranks { fault: RankFault::Rendezvous, message, recent: Vec::new() }),
    }
}

impl Gathering<'_> {
    /// Returns when all ranks have joined; the error says why they do not form a group.
    fn gather(&mut self, listener: &TcpListener) -> Result<(), String> {
        let Rendezvous { size, limits, ref secret, .. } = *self.rendezvous;
        let mut deadline = Instant::now() + limits.join;
        let (arrived, arrivals) = channel();
        let secret: Arc<[u8]> = secret.as_slice().into();
        let (mut unproven, mut problem) = (0, None);
        listener.set_nonblocking(true).map_err(|e| format!("rank 0 cannot listen: {e}"))?;
        while self.hellos.len() < size && Instant::now() < deadline {
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
                problem = found.or_else(|| self.lost());
                if problem.is_some() {
                    deadline = deadline.min(Instant::now() + LATECOMERS);
                }
            }
        }
        match problem.or_else(|| self.lost()).or_else(|| (self.hellos.len() < size).then(|| self.missing())) {
            Some(problem) => Err(problem),
            None => difference(&self.hellos).map_or(Ok(()), Err),
        }
    }

    /// The rank that was lost since it joined, in words.
    fn lost(&self) -> Option<String> {
        self.hub.fault().map(|fault| fault.error("the rendezvous", Vec::new()).to_string())
    }

    fn missing(&self) -> String {
        let Rendezvous { size, limits, ref address, .. } = *self.rendezvous;
        let missing: Vec<_> = (0..size).filter(|rank| !self.hellos.contains_key(rank)).collect();
        let denied = match self.denied {
            0 => String::new(),
            denied => format!("; {denied} connections had another secret"),
        };
        format!("{} did not join at {address} within {:?}{denied}", ranks(&missing), limits.join)
    }

    /// Adds a process that has proved the secret. The error is why it does not belong to the group; it will be told, too.
    fn add(&mut self, hello: Hello, stream: TcpStream) -> Result<(), String> {
        let (rank, silence) = (hello.rank, self.rendezvous.limits.silence);
        let failed = |e: io::Error| format!("rank 0 cannot serve rank {rank}: {e}");
        if let Some(problem) = self.misfit(&hello) {
            self.connections.push(Connection::open(stream, silence, |_, _| {}).map_err(failed)?);
            return Err(problem);
        }
        self.hub.introduce(rank, hello.process.clone());
        let hub = self.hub.clone();
        let handle = move |event, queue: &Sender<Outgoing>| match event {
            Event::Ended => hub.lose(rank, None),
            Event::Silent => hub.lose(rank, Some(silence)),
            Event::Message(Kind::Call, body) => submit(&hub, rank, &body, queue),
            Event::Message(kind, _) => hub.disagree(format!("rank {rank} sent {kind:?}, which only rank 0 sends")),
        };
        let connection = Connection::open(stream, silence, handle).map_err(failed)?;
        let faults = connection.queue();
        self.hub.observe(Box::new(move |fault| drop(faults.send(Outgoing::new(Kind::Fault, encode_fault(fault))))));
        self.connections.push(connection);
        self.hellos.insert(rank, hello);
        Ok(())
    }

    /// Why a process does not fit into the group.
    fn misfit(&self, hello: &Hello) -> Option<String> {
        let (size, Hello { rank, process, .. }) = (self.rendezvous.size, hello);
        if hello.size != size || *rank >= size {
            return Some(format!("rank {rank} ({process}) belongs to {} ranks, rank 0 to {size}", hello.size));
        }
        let other = self.hellos.get(rank)?;
        Some(format!("two processes are rank {rank}: {} and {process}", other.process))
    }
}

/// Checks a new connection in a thread of its own; false if there is none.
fn check_soon(
    stream: TcpStream,
    secret: Arc<[u8]>,
    deadline: Instant,
    arrived: Sender<Result<(Hello, TcpStream), ErrorKind>>,
) -> bool {
    let deadline = deadline.min(Instant::now() + HANDSHAKE);
    let check = move || {
        let hello = stream.set_nonblocking(false).and_then(|()| accept(&stream, &secret, deadline));
        // Nobody receives it after the rendezvous.
        let _ = arrived.send(hello.map(|hello| (hello, stream)).map_err(|e| e.kind()));
    };
    thread::Builder::new().name("comm handshake".into()).spawn(check).is_ok()
}

/// Passes a call to the hub, whose answer is sent back. A fault is sent to all ranks by the observers.
fn submit(hub: &Hub, rank: usize, body: &[u8], queue: &Sender<Outgoing>) {
    let Some((number, call, bytes)) = decode_call(body) else {
        return hub.disagree(format!("rank {rank} sent a call that rank 0 does not know"));
    };
    let queue = queue.clone();
    let answer = move |reply: Reply| {
        if let Ok(bytes) = reply {
            let data = Some((bytes.all, bytes.range));
            // If the rank is gone, its reader has said so.
            let _ = queue.send(Outgoing { kind: Kind::Result, head: number.to_le_bytes().to_vec(), data });
        }
    };
    hub.submit(rank, number, call, bytes, Box::new(answer));
}

/// "rank 1" or "ranks 1, 3".
fn ranks(ranks: &[usize]) -> String {
    let list: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// The first entry of the identities that differs, with its values by rank.
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
            format!("{values} on {}", ranks(with_value))
        });
        let sides: Vec<_> = sides.collect();
        (sides.len() > 1).then(|| format!("ranks do not run the same job: {name} is {}", sides.join(" and ")))
    })
}
