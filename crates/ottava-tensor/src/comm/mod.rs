//! Groups of ranks, with collectives and point-to-point messages.
//!
//! A [`Group`] is one rank's handle of a group. A job begins with one group of all ranks. [`Group::solo`] has one rank. The ranks of
//! [`threads::group`] are threads. The ranks of [`process::join`] are processes connected by TCP. [`Group::dry`] only counts calls, for a plan.
//! [`Group::split`] divides a group, and [`Mesh`] has a group for each set of axes of parallel training.
//!
//! All ranks of a group call the same collectives in the same order. Each call carries its number, kind, name, type and size. If these
//! differ between ranks, all ranks get an error that names the two calls. Messages are compared in the same way. If a rank ends, open and later
//! calls of all other ranks, in every group, return an error that names this rank: a job has one fault. Errors number ranks as in the
//! job.
//!
//! Sums are added in rank order in F32 (F64 for F64) and rounded once, so results depend neither on timing nor on the backend.
//!
//! [`Group::with_gpu`] adds calls with GPU tensors by NCCL. These calls overlap with the compute stream and can be captured in a
//! [`Graph`](crate::cuda::Graph). They are not compared when they are made, because the comparison would cost more than the collective.
//! [`Group::compare_gpu_calls`] compares a digest later. NCCL computes their sums, except in [`Group::sum`] and in reduce-scatters of GPUs of one
//! machine. These GPUs copy to [symmetric](Group::symmetric) memory without NCCL.
//!
//! All groups of a rank share one `Endpoint`: its connections, its watch, its call history and its counters. If two sets of axes of a `Mesh` contain
//! the same ranks, they share a group. For example, with only data parallelism the data axis uses the group of all ranks.
//!
//! CPU calls of a job go to the `Hub` (`hub.rs`), which compares and combines them. GPU calls bypass the hub, because the hub is built for tests,
//! launch and control rather than speed: they go to NCCL (`nccl.rs`) or, on one host, to peer copies (`symmetric.rs`). A group from a split creates
//! its NCCL communicator in its first call with GPU tensors, with a separate unique id, because `ncclCommSplit` needs all ranks of the parent. All
//! communicators of a rank share one stream, so their calls start in the order in which the host makes them. Only messages of a pipeline have
//! separate streams (`Group::on_channel`).
//!
//! To add a collective, add its kind `Op` with its checks in `call.rs`, its method in `collectives.rs`, its arithmetic in `combine.rs`, its counter
//! in `traffic.rs`, and its GPU call in `nccl.rs`. If it needs another function of NCCL, add the function in `cuda/nccl.rs`. `tests.rs` and
//! `nccl/tests.rs` compare the collective with plain loops.
//!
//! To add a backend for CPU tensors, add a `Link` in a file of this folder. For GPU tensors, add a library next to `cuda/nccl.rs`, and change
//! `gpu.rs`.

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
mod inbox;
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
mod sum;
mod symmetric;
#[cfg(test)]
mod tests;
pub mod threads;
mod traffic;
mod watch;

pub use call::Reduce;
pub use endpoint::Stopper;
pub use group::Group;
pub use inbox::Inbox;
pub use limits::Limits;
pub use mesh::{Axis, Mesh, MeshShape};
pub use pending::Pending;
pub use progress::report_progress;
pub use symmetric::GPUS_PER_NODE;
pub use traffic::{Pattern, Sent, Traffic};
