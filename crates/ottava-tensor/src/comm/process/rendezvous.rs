//! How the processes of a group find and check each other.

use super::auth::{PROOF, equal, hmac, random_bytes};
use super::frame::{self, HANDSHAKE_LIMIT, Kind};
use super::wire::Hello;
use crate::comm::fault::this_process;
use crate::comm::limits::Limits;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The settings with which a process joins its group. All except `rank` are the same on all ranks.
pub struct Rendezvous {
    /// This rank, from 0 to `size - 1`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// `host:port` at which rank 0 listens, on that interface only: `127.0.0.1:port` if all ranks are on one host.
    pub address: String,
    /// The secret of this job. Processes with a different secret are rejected. Never sent or logged.
    pub secret: Vec<u8>,
    /// Names and values, such as hashes of program, configuration and data, that must be the same on all ranks. At most 60 KiB.
    pub identity: Vec<(String, String)>,
    /// How long ranks wait for each other.
    pub limits: Limits,
    /// Callbacks into the program that starts the group.
    pub supervisor: Arc<dyn Supervisor>,
}

/// Callbacks into the program of a rank.
pub trait Supervisor: Send + Sync {
    /// Called several times a second until all ranks have joined; an error (a sentence) ends the rendezvous of this rank.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// The flag that says whether this process was asked to stop, if it has one. It is read until all ranks have joined, where a stop ends the
    /// rendezvous of all ranks, and set, from any thread, when another rank was asked to stop.
    fn stop_flag(&self) -> Option<&AtomicBool> {
        None
    }

    /// Whether this process was asked to stop.
    fn stop_requested(&self) -> bool {
        self.stop_flag().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Asks this process to stop.
    fn request_stop(&self) {
        self.stop_flag().into_iter().for_each(|flag| flag.store(true, Ordering::Relaxed));
    }

    /// Called by rank 0 when another rank is lost; returns what is known about its end, for example "it was killed by signal 9, and its log
    /// is rank-1.log".
    fn describe_end(&self, rank: usize) -> Option<String> {
        let _ = rank;
        None
    }
}

/// Knows nothing.
pub struct Unsupervised;

impl Supervisor for Unsupervised {}

/// Why a rendezvous ends when a rank was asked to stop.
pub(super) const STOPPED: &str = "stopped by a signal before all ranks had joined";

impl Rendezvous {
    pub(super) fn hello(&self) -> Hello {
        Hello { rank: self.rank, size: self.size, process: this_process(), identity: self.identity.clone() }
    }
}

/// A stream whose reads and writes have a deadline, so that an unknown peer cannot block a thread by sending slowly.
struct Until<'a>(&'a TcpStream, Instant);

impl Until<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.set_read_timeout(Some(self.left()?))?;
        (&mut &*self.0).read(buffer)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.set_write_timeout(Some(self.left()?))?;
        (&mut &*self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn expect(stream: &mut Until, kind: Kind) -> io::Result<Vec<u8>> {
    match frame::read(stream, HANDSHAKE_LIMIT)? {
        (got, body) if got == kind => Ok(body),
        (Kind::Denied, _) => Err(ErrorKind::PermissionDenied.into()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Rank 0's side: identifies the peer of `stream`. [`ErrorKind::PermissionDenied`] for a different secret.
pub(super) fn accept(stream: &TcpStream, secret: &[u8], deadline: Instant) -> io::Result<Hello> {
    let mut until = Until(stream, deadline);
    let ours = random_bytes()?;
    frame::write(&mut until, Kind::Challenge, &[&ours])?;
    let body = expect(&mut until, Kind::Hello)?;
    let (proof, rest) = body.split_first_chunk::<PROOF>().ok_or(ErrorKind::InvalidData)?;
    let (theirs, hello) = rest.split_first_chunk::<PROOF>().ok_or(ErrorKind::InvalidData)?;
    if !equal(proof, &hmac(secret, &[b"rank", &ours, theirs, hello])) {
        frame::write(&mut until, Kind::Denied, &[])?;
        return Err(ErrorKind::PermissionDenied.into());
    }
    let hello = Hello::decode(hello).ok_or(ErrorKind::InvalidData)?;
    let process = this_process();
    let proof = hmac(secret, &[b"rank 0", theirs, &ours, process.as_bytes()]);
    frame::write(&mut until, Kind::Accepted, &[&proof, process.as_bytes()])?;
    Ok(hello)
}

/// The other side: introduces `hello` to rank 0 and returns rank 0's process. [`ErrorKind::UnexpectedEof`] if rank 0 closed the connection
/// before its challenge, [`ErrorKind::PermissionDenied`] if the secrets differ.
pub(super) fn introduce(stream: &TcpStream, secret: &[u8], hello: &Hello, deadline: Instant) -> io::Result<String> {
    let mut until = Until(stream, deadline);
    let theirs = expect(&mut until, Kind::Challenge)?;
    let (ours, hello) = (random_bytes()?, hello.encode());
    let proof = hmac(secret, &[b"rank", &theirs, &ours, &hello]);
    frame::write(&mut until, Kind::Hello, &[&proof, &ours, &hello])?;
    let body = expect(&mut until, Kind::Accepted)?;
    let (proof, process) = body.split_first_chunk::<PROOF>().ok_or(ErrorKind::InvalidData)?;
    if !equal(proof, &hmac(secret, &[b"rank 0", &ours, &theirs, process])) {
        return Err(ErrorKind::PermissionDenied.into());
    }
    String::from_utf8(process.to_vec()).map_err(|_| ErrorKind::InvalidData.into())
}
