//! What threads tell the main loop of a keeper, and the times that it waits.

use super::wire::Down;
use super::worker_link::FromWorker;
use crate::message::{Epoch, HostId, Term, ToPeer, Want};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The times that keepers and the hub wait for each other.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The time without any message after which a keeper or the hub is lost.
    pub silence: Duration,
    /// The time that the hub waits for missing hosts.
    pub host: Duration,
    /// The time within which hosts fetch their state, and within which workers start.
    pub start: Duration,
}

impl Times {
    /// Returns the time between heartbeats.
    pub(super) fn beat(&self) -> Duration {
        (self.silence / 4).min(Duration::from_secs(1))
    }
}

/// Something that a thread tells the main loop.
pub(super) enum Input {
    /// A connection to a hub is open.
    Connected {
        number: u64,
        term: Term,
        stream: TcpStream,
    },
    Down {
        number: u64,
        message: Down,
    },
    HubClosed {
        number: u64,
    },
    HubMissing {
        number: u64,
        reason: String,
    },
    /// This host has to start the hub, if it has not yet.
    BecomeHub {
        term: Term,
    },
    FromPeer {
        host: HostId,
        message: ToPeer,
    },
    /// The bytes of a copy are about to come.
    CopyBegun {
        epoch: Epoch,
        place: u32,
    },
    /// The shares of an epoch are in the memory of this host, or one of them could not be fetched.
    Fetched {
        epoch: Epoch,
        failed: Option<Want>,
    },
    WorkerJoined {
        epoch: Epoch,
        stream: UnixStream,
    },
    FromWorker {
        epoch: Epoch,
        message: FromWorker,
    },
}
