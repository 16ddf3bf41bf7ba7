//! Groups of ranks: their collectives, and messages between two of them.
//!
//! A [`Group`] is one rank's membership in a group. A job begins as one group of all ranks: [`Group::solo`] has one rank, in
//! [`threads::group`] ranks are threads, in [`process::join`] they are processes connected by TCP, and [`Group::dry`] counts for a plan.
//! [`Group::split`] makes further groups of its ranks, and [`Mesh`] those of the axes of parallel training.
//!
//! All ranks of a group call the same collectives in the same order. Each call carries its number, kind, name, type and size; if those
//! differ between ranks, all get an error that names both sides. Messages are compared in the same way. If a rank ends, open and later calls
//! of the others end with an error that names it, in whatever group: a job has one fault. Errors number ranks as in the job.
//!
//! Sums are added in rank order in F32 (F64 for F64) and rounded once, so that a result depends neither on timing nor on the backend.
//!
//! [`Group::with_gpu`] adds calls with GPU tensors by NCCL. They overlap with the compute stream, can be captured in a
//! [`Graph`](crate::cuda::Graph), and are not compared between ranks: that would cost more than the collective. Their sums are NCCL's.

mod call;
mod collectives;
mod combine;
mod dry;
mod endpoint;
mod fault;
mod gpu;
mod group;
mod history;
mod hub;
mod limits;
mod link;
mod members;
mod mesh;
mod messages;
mod nccl;
mod pending;
pub mod process;
mod progress;
mod round;
mod solo;
#[cfg(test)]
mod tests;
pub mod threads;
mod traffic;
mod watch;

pub use call::Reduce;
pub use endpoint::Stopper;
pub use group::Group;
pub use limits::Limits;
pub use mesh::{Axis, Mesh, MeshShape};
pub use pending::Pending;
pub use progress::report_progress;
pub use traffic::{Sent, Traffic};
