//! The rendezvous, in which the processes of a group find and check each other.

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
    /// The index of this rank, from 0 to `size - 1`.
    pub rank: usize,
    /// The number of ranks of the group.
    pub size: usize,
    /// The address `host:port` at which rank 0 listens. It listens only on this interface. Use `127.0.0.1:port` if all ranks are on one host.
    pub address: String,
    /// The secret of this job. Processes with a different secret are rejected. It is never sent or logged.
    pub secret: Vec<u8>,
    /// Names and values that must be the same on all ranks, such as hashes of program, configuration and data. At most 60 KiB.
    pub identity: Vec<(String, String)>,
    /// The times that ranks wait for each other.
    pub limits: Limits,
    /// The callbacks into the program that starts the group.
    pub supervisor: Arc<dyn Supervisor>,
}

/// The callbacks into the program of a rank.
pub trait Supervisor: Send + Sync {
    /// Called several times per second until all ranks have joined. An error (a sentence) ends the rendezvous of this rank.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns the flag that is set if this process was asked to stop, if there is such a flag. Until all ranks have joined, the flag is read, and a
    /// stop ends the rendezvous of all ranks. If another rank was asked to stop, the flag is set, from any thread.
    fn stop_flag(&self) -> Option<&AtomicBool> {
        None
    }

    /// Returns whether this process was asked to stop.
    fn stop_requested(&self) -> bool {
        self.stop_flag().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Asks this process to stop.
    fn request_stop(&self) {
        self.stop_flag().into_iter().for_each(|flag| flag.store(true, Ordering::Relaxed));
    }

    /// Called by rank 0 when another rank is lost. Returns what is known about the rank's end, for example "it was killed by signal 9, and its log
    /// is rank-1.log".
    fn describe_end(&self, rank: usize) -> Option<String> {
        let _ = rank;
        None
    }
}

/// A supervisor without callbacks.
pub struct Unsupervised;

impl Supervisor for Unsupervised {}

/// The reason why a rendezvous ends if a rank was asked to stop.
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

/// Identifies the peer of `stream`, on rank 0. Errors with [`ErrorKind::PermissionDenied`] if the secrets differ.
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

/// Introduces `hello` to rank 0, and returns the name of rank 0's process. Errors with [`ErrorKind::UnexpectedEof`] if rank 0 closed the connection
/// before its challenge, and with [`ErrorKind::PermissionDenied`] if the secrets differ.
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
