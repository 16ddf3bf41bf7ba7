//! The client of a rank other than 0. It joins rank 0, sends calls and receives the answers.

use super::connection::{Connection, Event, Outgoing, finish};
use super::frame::{Fields, Kind};
use super::rendezvous::{Rendezvous, STOPPED, introduce};
use super::server::NOTICE;
use super::wire::{CallHead, Hello, decode_fault, encode_call, encode_fault};
use crate::comm::call::Call;
use crate::comm::combine::Bytes;
use crate::comm::endpoint::Endpoint;
use crate::comm::fault::Fault;
use crate::comm::group::Group;
use crate::comm::hub::Observer;
use crate::comm::link::{Link, Reporter};
use crate::comm::members::Members;
use crate::comm::round::Reply;
use crate::error::{Error, RankFault, Result};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::{mem, slice};

/// The time between attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(20);

/// The time between checks for stop requests.
const CHECK: Duration = Duration::from_millis(100);

/// The maximum time of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// The time by which this rank gives up later than rank 0, so that rank 0 can tell it which rank is missing.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Calls {
    /// The number of requests so far.
    requests: u64,
    /// The requests without an answer, by number.
    open: BTreeMap<u64, Sender<Reply>>,
    fault: Option<Fault>,
    observers: Vec<Observer>,
}

/// The calls of this rank that rank 0 has not answered.
#[derive(Default)]
struct Open(Mutex<Calls>);

impl Open {
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request and returns its number. After a fault, answers the request at once and returns `None`.
    fn add(&self, answer: Sender<Reply>) -> Option<u64> {
        let mut state = self.lock();
        if let Some(fault) = &state.fault {
            // The caller may have dropped the receiver.
            let _ = answer.send(Err(fault.clone()));
            return None;
        }
        state.requests += 1;
        let request = state.requests;
        state.open.insert(request, answer);
        Some(request)
    }

    /// Answers a request. If the `Pending` was dropped, nobody receives the answer.
    fn answer(&self, request: u64, bytes: Bytes) {
        let answer = self.lock().open.remove(&request);
        drop(answer.map(|answer| answer.send(Ok(bytes))));
    }

    /// Answers all open calls with the first fault.
    fn fail(&self, fault: Fault) {
        let mut state = self.lock();
        if state.fault.is_none() {
            state.observers.iter().for_each(|observer| observer(&fault));
            for answer in mem::take(&mut state.open).into_values() {
                let _ = answer.send(Err(fault.clone()));
            }
            state.fault = Some(fault);
        }
    }

    fn observe(&self, observer: Observer) {
        let mut state = self.lock();
        match &state.fault {
            Some(fault) => observer(fault),
            None => state.observers.push(observer),
        }
    }
}

struct Client {
    open: Arc<Open>,
    connection: Connection,
}

impl Reporter for Mutex<Sender<Outgoing>> {
    fn stop(&self) {
        let queue = self.lock().unwrap_or_else(PoisonError::into_inner);
        // After the connection has ended, nobody sends the message.
        let _ = queue.send(Outgoing::new(Kind::Stop, Vec::new()));
    }

    fn fail(&self, fault: Fault) {
        let queue = self.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = queue.send(Outgoing::new(Kind::Fault, encode_fault(&fault)));
    }
}

impl Link for Client {
    fn start(&self, group: &Members, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        let (answer, reply) = channel();
        if let Some(request) = self.open.add(answer) {
            let range = 0..bytes.len();
            let data = Some((Arc::new(bytes), range));
            let head = encode_call(&CallHead { request, group: group.id, number, call });
            self.connection.send(Outgoing { kind: Kind::Call, head, data });
        }
        reply
    }

    fn observe(&self, observer: Observer) {
        self.open.observe(observer);
    }

    fn reporter(&self) -> Arc<dyn Reporter> {
        Arc::new(Mutex::new(self.connection.queue()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        finish(slice::from_ref(&self.connection));
    }
}

/// Joins the group of `rendezvous`. The rank must not be 0.
pub(super) fn join(rendezvous: &Rendezvous) -> Result<Group> {
    let failed = |message: String| Error::Ranks { fault: RankFault::Rendezvous, message, recent: Vec::new() };
    let Rendezvous { rank, size, limits, ref address, .. } = *rendezvous;
    let (stream, process) = reach(rendezvous).map_err(failed)?;
    let open = Arc::new(Open::default());
    let (decided, decision) = channel();
    let (calls, supervisor) = (open.clone(), rendezvous.supervisor.clone());
    let handle = move |event, _: &Sender<Outgoing>| {
        let fault = match event {
            Event::Message(Kind::Result, body) => match Fields(&body).number() {
                Some(request) => {
                    let range = size_of::<u64>()..body.len();
                    return calls.answer(request, Bytes { all: Arc::new(body), range });
                }
                None => None,
            },
            Event::Message(Kind::Welcome, _) => return drop(decided.send(Ok(()))),
            Event::Message(Kind::Refused, body) => {
                return drop(decided.send(Err(String::from_utf8_lossy(&body).into_owned())));
            }
            Event::Message(Kind::Heartbeat, _) => return,
            Event::Message(Kind::Stop, _) => return supervisor.request_stop(),
            Event::Message(Kind::Fault, body) => match decode_fault(&body) {
                // The fault may arrive before rank 0's decision. Rank 0 sends the decision in any case, because a rejected rank ends at once.
                Some(fault) => return calls.fail(fault),
                None => None,
            },
            Event::Message(..) => None,
            Event::Ended => Some(Fault::ended(0, &process)),
            Event::Silent => {
                let silent = Some(limits.silence);
                Some(Fault::Lost { rank: 0, process: process.clone(), silent, details: None })
            }
        };
        let fault = fault.unwrap_or_else(|| Fault::Desync("rank 0 sent a message that this rank does not know".into()));
        // After the rendezvous nobody receives the decision.
        let _ = decided.send(Err(fault.error("the rendezvous", Vec::new()).to_string()));
        calls.fail(fault);
    };
    let connection = Connection::open(stream, limits, handle);
    let connection = connection.map_err(|e| failed(format!("rank {rank} cannot serve its connection: {e}")))?;
    let deadline = Instant::now() + limits.join + GRACE;
    let decision = loop {
        if rendezvous.supervisor.stop_requested() {
            connection.send(Outgoing::new(Kind::Stop, Vec::new()));
            finish(slice::from_ref(&connection));
            break Err(STOPPED.into());
        }
        if let Err(problem) = rendezvous.supervisor.check() {
            break Err(problem);
        }
        match decision.recv_timeout(CHECK) {
            Ok(decision) => break decision,
            Err(_) if Instant::now() < deadline => {}
            Err(_) => {
                let limit = limits.join + GRACE;
                break Err(format!("rank 0 at {address} did not complete the group within {limit:?}"));
            }
        }
    };
    decision.map_err(failed)?;
    Ok(Group::world(Endpoint::new(rank, size, Box::new(Client { open, connection }), limits)))
}

/// Returns an authenticated connection to rank 0, and the name of rank 0's process. Retries until rank 0 listens.
fn reach(rendezvous: &Rendezvous) -> Result<(TcpStream, String), String> {
    let address = &rendezvous.address;
    let deadline = Instant::now() + rendezvous.limits.join;
    let hello = rendezvous.hello();
    let mut notice = Instant::now() + NOTICE;
    loop {
        let error = match attempt(rendezvous, &hello, deadline) {
            Ok(joined) => return Ok(joined),
            Err(error) => error,
        };
        if rendezvous.supervisor.stop_requested() {
            return Err(STOPPED.into());
        }
        rendezvous.supervisor.check()?;
        if Instant::now() >= notice {
            notice += NOTICE;
            tracing::info!("rank {} waits for rank 0, which does not answer at {address}: {error}", rendezvous.rank);
        }
        match error.kind() {
            ErrorKind::PermissionDenied => {
                return Err(format!("rank 0 at {address} has a different secret from rank {}", rendezvous.rank));
            }
            ErrorKind::InvalidData => {
                return Err(format!("the process at {address} is not rank 0 of this version of Ottava"));
            }
            _ if Instant::now() + RETRY >= deadline => {
                let limit = rendezvous.limits.join;
                return Err(format!("rank 0 did not answer at {address} within {limit:?}: {error}"));
            }
            _ => thread::sleep(RETRY),
        }
    }
}

fn attempt(rendezvous: &Rendezvous, hello: &Hello, deadline: Instant) -> io::Result<(TcpStream, String)> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
    for address in rendezvous.address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).clamp(RETRY, CONNECT);
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                let process = introduce(&stream, &rendezvous.secret, hello, deadline)?;
                return Ok((stream, process));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
