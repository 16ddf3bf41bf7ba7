//! Groups of ranks: collectives, and point-to-point messages.
//!
//! A [`Group`] is one rank's handle of a group. A job begins with one group of all ranks: [`Group::solo`] has one rank; the ranks of
//! [`threads::group`] are threads; the ranks of [`process::join`] are processes connected by TCP; [`Group::dry`] only counts calls, for a plan.
//! [`Group::split`] divides a group, and [`Mesh`] has a group for each set of axes of parallel training.
//!
//! All ranks of a group call the same collectives in the same order. Each call carries its number, kind, name, type and size; if those
//! differ between ranks, all get an error that names both sides. Messages are compared in the same way. If a rank ends, open and later
//! calls of all other ranks, in every group, return an error that names it: a job has one fault. Errors give ranks their numbers in the
//! job.
//!
//! Sums are added in rank order in F32 (F64 for F64) and rounded once, so results depend neither on timing nor on the backend.
//!
//! [`Group::with_gpu`] adds calls with GPU tensors by NCCL. They overlap with the compute stream, can be captured in a
//! [`Graph`](crate::cuda::Graph), and are not compared when they are made, which would cost more than the collective;
//! [`Group::compare_gpu_calls`] compares a digest later. Their sums are NCCL's. GPUs of one machine copy to [symmetric](Group::symmetric) memory
//! without NCCL.
//!
//! All groups of a rank share one `Endpoint`: its connections, its watch, its call history and its counters. Sets of axes of a `Mesh` that contain
//! the same ranks share a group; for example, with data parallelism alone the data axis uses the group of all ranks.
//!
//! CPU calls of a job go to the `Hub` (`hub.rs`), which compares and combines them. GPU calls go to NCCL (`nccl.rs`) or, on one host, to peer
//! copies (`symmetric.rs`); they bypass the hub, which serves tests, launch and control, and not speed. A split creates its NCCL communicator in
//! its first call with GPU tensors, with a unique id of its own, since `ncclCommSplit` needs all ranks of the parent. All communicators of a rank
//! share one stream, so their calls start in the order in which the host makes them; only messages of a pipeline have streams of their own
//! (`Group::on_channel`).
//!
//! To add a collective: its kind `Op` with its checks in `call.rs`, its method in `collectives.rs`, its arithmetic in `combine.rs`, its counter in
//! `traffic.rs`, and its GPU call in `nccl.rs`, and in `cuda/nccl.rs` if it needs another function of NCCL. `tests.rs` and `nccl/tests.rs` compare it
//! with plain loops.
//!
//! To add a backend: for CPU tensors a `Link` in a file of this folder; for GPU tensors a library beside `cuda/nccl.rs`, and `gpu.rs`.

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
