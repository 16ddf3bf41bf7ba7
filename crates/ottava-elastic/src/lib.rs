//! Recovery of a job that loses ranks or hosts: restart processes, keep memory.
//!
//! The launcher starts a [`Keeper`] on each host, and spares have keepers as well. A keeper starts the workers of its host (one per rank), and stores
//! snapshots of their slices in memory that outlives the workers. The keeper of the next place stores a copy. A [`Hub`] decides. Both are pure state
//! machines: a state and an event give the next state and actions. They have no clock and no connections, so tests explore orders of loss, delay and
//! crash, and [`simulate`] runs months of a large job in seconds.
//!
//! **Recovery.** If a host or a rank is lost, the hub announces the next epoch (`Hold`). Workers of the old epoch are stopped without their
//! cooperation, and each keeper reports its memory. The hub chooses the newest step for which each place has a share, and gives the lost places to
//! spares (`Form`). Hosts fetch the shares that they lack, with their digests checked (`Fill`). Then all workers start (`Start`) and train again up to
//! the step that was reached before (`Replay`). Messages of earlier epochs are refused.
//!
//! **Common step.** A host has two buffers for snapshots of a place. The older one is overwritten only after all places have stored and copied the newer
//! one, so a step that all places have always exists. With the loss of a host and of the host with its copies, the job restarts from the newest
//! checkpoint. If there is none, or if no host of the last epoch is left, the job ends with exit code 5, and the launcher starts it again. A share that could
//! not be fetched from a host is not read from this host again in the same recovery: the hub takes the copy, then the older step, then the checkpoint.
//!
//! **End.** If the workers of all hosts end by themselves, the job ends with the first of their exit codes that is not 0. After
//! [`Policy::most_recoveries`] recoveries without a new snapshot or checkpoint, it ends with exit code 5.
//!
//! **Two assumptions.** The launcher starts one hub at a time, with increasing numbers. A new hub forms an epoch without all hosts only after a timeout
//! that is longer than the `silence_timeout` after which keepers without a hub stop their workers.
#![forbid(unsafe_code)]

mod hub;
mod inventory;
mod keeper;
mod message;
mod policy;
pub mod process;
pub mod simulate;
mod warning;

pub use hub::{Hub, HubAction, HubEvent, Phase};
pub use inventory::CommonStep;
pub use keeper::{Keeper, KeeperAction, KeeperEvent, Work};
pub use message::{
    Digest, Epoch, HostId, Membership, Part, Report, Share, Source, Step, Stored, Term, ToHub, ToKeeper, ToPeer, Want,
};
pub use policy::{Policy, Straggler};
pub use warning::Warning;
