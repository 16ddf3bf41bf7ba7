//! Ranks are processes connected by TCP, in a star around rank 0.
//!
//! Made for tests, launch and control: all data passes through rank 0. The secret is checked at the rendezvous, by HMAC of random
//! challenges in both directions; later messages are neither encrypted nor signed, so the network must be trusted. A thread of each
//! connection sends heartbeats, so that long computation between collectives does not count as silence.

mod auth;
mod client;
mod connection;
mod frame;
mod rendezvous;
mod server;
#[cfg(test)]
pub(super) mod tests;
pub(super) mod wire;

pub use auth::random_bytes;
pub use rendezvous::{Rendezvous, Supervisor, Unsupervised};

use super::group::Group;
use crate::error::{Error, Result};
use std::net::TcpListener;

/// Has the system continue this process, if it is stopped (SIGSTOP), when the thread that started it ends, so that it detects this and ends
/// too.
pub fn wake_with_parent() {
    // SAFETY: asks for a signal that does nothing to a process that runs.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
}

/// Asks the child process `pid`, which has not been waited for, to end (SIGTERM).
pub fn ask_to_end(pid: u32) {
    // SAFETY: sends a signal. A child that has not been waited for keeps its number, so no other process gets it.
    unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
}

/// Leads the group of `rendezvous` as rank 0, at the `listener` that its address names. Returns when all ranks have joined.
///
/// Errors as [`join`] does.
pub fn lead(listener: &TcpListener, rendezvous: &Rendezvous) -> Result<Group> {
    server::serve(listener, rendezvous)
}

/// Joins the group of `rendezvous`. Returns when all ranks have joined.
///
/// Errors with [`Error::Value`] for a rank outside the group. Errors with [`Error::Ranks`] on all ranks if a rank has not joined within
/// [`Limits::join`](super::Limits::join), ends, or differs in size or identity; the message names it. A rank with a different secret is the only one to get that
/// error. Errors with [`Error::Io`] when rank 0 cannot listen at the address.
pub fn join(rendezvous: &Rendezvous) -> Result<Group> {
    let Rendezvous { rank, size, ref address, .. } = *rendezvous;
    if rank >= size {
        return Err(Error::Value(format!("rank {rank} is not in a group of {size} ranks")));
    }
    match rank {
        0 if size == 1 => Ok(Group::solo()),
        0 => {
            let listener = TcpListener::bind(address);
            let path = || format!("rank 0 cannot listen at {address}");
            lead(&listener.map_err(|source| Error::Io { path: path(), source })?, rendezvous)
        }
        _ => client::join(rendezvous),
    }
}
