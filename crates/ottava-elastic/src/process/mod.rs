//! The processes of the state machines: a keeper on each host, with the hub in one of them.
//!
//! [`run`] is the main loop of a keeper (`host.rs`). All events reach it through one channel: messages of the hub, of other keepers and of workers, and
//! the ends of worker processes. Threads wait for sockets (`server.rs`, `hub_link.rs`) and move bytes (`transfer.rs`); they decide nothing. The hub of the
//! job is a second loop, in a thread of one keeper (`hub.rs`): of host 0 at first. If the host of the hub is lost, the next host in order starts a hub
//! (`hub_link.rs`).
//!
//! Snapshots are folders with the files of a checkpoint (`memory.rs`). A worker is connected to its keeper by a [`WorkerLink`].
//!
//! Connections prove a shared secret at their start, as ranks do. Later messages are neither encrypted nor signed, so the network must be trusted.

mod events;
mod host;
mod hub;
mod hub_link;
mod memory;
mod server;
mod transfer;
mod wire;
mod worker_link;
mod workers;

pub use events::Times;
pub use host::{KeeperOptions, run};
pub use memory::{FileEntry, Listing, reserve};
pub use worker_link::WorkerLink;
pub use workers::{Launch, Resume, Workers, WorkersEnd};
