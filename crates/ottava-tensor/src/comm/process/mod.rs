//! Ranks that are processes connected by TCP, in a star around rank 0.
//!
//! This backend is made for tests, launch and control: all data passes through rank 0. The secret is checked at the rendezvous, by HMAC of random
//! challenges in both directions. Later messages are neither encrypted nor signed, so the network must be trusted. A thread of each
//! connection sends heartbeats, so that long computation between collectives is not taken for silence.

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

/// Makes the system continue this process when the thread that started it ends, if the process is stopped (SIGSTOP). So the process detects the end
/// of its parent and ends too.
pub fn wake_with_parent() {
    // SAFETY: requests a signal that has no effect on a running process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
}

/// Asks the child process `pid` to end (SIGTERM). The caller must not have called `wait` for this child yet.
pub fn ask_to_end(pid: u32) {
    // SAFETY: sends a signal. A child that has not been waited for keeps its number, so no other process gets the signal.
    unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
}

/// Leads the group of `rendezvous` as rank 0. `listener` must listen at the address of `rendezvous`. Returns when all ranks have joined.
///
/// Errors like [`join`].
pub fn lead(listener: &TcpListener, rendezvous: &Rendezvous) -> Result<Group> {
    server::serve(listener, rendezvous)
}

/// Joins the group of `rendezvous`. Returns when all ranks have joined.
///
/// Errors with [`Error::Value`] for a rank outside the group. Errors with [`Error::Ranks`] on all ranks if a rank has not joined within
/// [`Limits::join`](super::Limits::join), ends, or differs in size or identity. The message names the rank. If a rank has a different secret, only
/// this rank gets an error. Errors with [`Error::Io`] if rank 0 cannot listen at the address.
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
