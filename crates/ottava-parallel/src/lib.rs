//! Training on several ranks.
//!
//! ```
//! use ottava_parallel::optim::{Decay, Schedule, SchedulerType};
//!
//! let kind = SchedulerType::Linear(Decay::default());
//! let schedule = Schedule { kind, peak: 1e-3, warmup_steps: 10, max_steps: 100 };
//! assert_eq!(schedule.at(10), 1e-3);
//! assert!(schedule.at(100) < schedule.at(50));
//! ```
//!
//! Only a few places in the code handle ranks. This crate implements data parallelism, ZeRO and pipelines. `TrainStep` calls it, `Trainer` asks it
//! which rank writes files, and each rank writes its part of a checkpoint. Layers, models and optimizers are written for one process: a pass gets the
//! weights of a unit from `Units` (`param/unit.rs`) and reports the gradients that it has computed to `Units`, and a `Param` may hold only a slice of
//! its master weights and moments.
//!
//! | question | files |
//! |---|---|
//! | which ranks there are, and which of them share a tensor | `ranks.rs`, `layer_axes.rs` |
//! | what each rank stores | `slices.rs`, `zero.rs`, `bucket.rs`, `frozen.rs`, `partition.rs`, `load.rs` |
//! | gathers of weights and reductions of gradients, overlapped with compute | `exchange.rs`, `reduction.rs` |
//! | pipelines: schedules, stages of equal cost, messages | `schedule.rs`, `spans.rs`, `pipeline.rs`, `sent.rs` |
//! | maxima of amaxes, norms and casts over ranks | `amaxes.rs`, `norm.rs`, `casts.rs` |
//! | whole weights and whole matrices of divided parameters | `whole.rs`, `whole_weights.rs`, `matrices.rs`, `prepare.rs` |
//! | checksums of replicas | `replicas.rs` |
//! | draws of completions by several ranks | `drawing.rs` |
//!
//! `Ranks` owns the mesh. Decisions that concern all ranks (launches, stops, failures, equal settings) use the group of all ranks. A reduction uses
//! the ranks that share its tensor, which `Ranks::sharing` returns for `Shared::Gradients`, `Shared::Replicas`, `Shared::Tokens`,
//! `Shared::Elements` or `Shared::Model`. In this crate, only `ranks.rs` uses the group of all ranks. Only this crate calls collectives of
//! tensors. A test of the project (`tidy`) checks these two rules.
//!
//! With hierarchical ZeRO (`Ranks::with_shard_groups`), the ranks that share gradients are cut into shard groups, such as the ranks of a host. Slices are divided
//! within a shard group (`Ranks::shard_group`), so all gathers of weights and all scatters of gradients are within the group. Ranks at the same place of
//! all shard groups store the same slices (`Ranks::slice_replicas`), and sum the gradients of the slices once per step.
//!
//! Each cast slot has an `AmaxGroup` (`scaling/amax_group.rs`), the ranks that share its scale. `Amaxes` computes one maximum per group at the end
//! of a step. `Partition::compare_replicas` compares the amax and scale of each cast across ranks, so a wrong group is an error that names the
//! cast.
//!
//! Weights that ranks divide are gathered before a block runs, not after the update. A gather after the update would be exposed; a gather before a
//! block's forward overlaps with compute of the preceding blocks. Stages 1 and 2 keep the gathered weights until the update, and stage 3 frees them
//! after the block; otherwise all stages run the same code. The embedding and the first block are the exception, because no earlier block can hide
//! their gathers: the update computes them first, and gathers them while it updates the other parameters. Codes are transposed in backward, since
//! only backward reads the transpose.
//!
//! A slice may contain only a part of a block that shares a scale. The op `quantize_slice` finds the amaxes of the blocks of a slice, and casts the
//! slice with the maxima of these amaxes over ranks (`Partition::finish_write`).
#![forbid(unsafe_code)]

pub mod optim;

mod amaxes;
mod averages;
mod bucket;
mod casts;
mod drawing;
mod exchange;
mod frozen;
mod layer_axes;
mod load;
mod matrices;
mod norm;
mod partition;
mod pipeline;
mod prepare;
mod ranks;
mod reduction;
mod replicas;
mod schedule;
mod sent;
mod slices;
mod spans;
mod tensor;
mod whole;
mod whole_weights;
mod zero;

pub use exchange::Exchange;
pub use layer_axes::LayerAxes;
pub use partition::{BufferBytes, Partition};
pub use pipeline::{Messages, Pipeline};
pub use ranks::{Ranks, Shared};
pub use reduction::ReduceFormat;
pub use schedule::{Message, Part, Schedule, ScheduleKind, Task};
pub use sent::SentActivations;
pub use slices::{GRANULE, Slices};
pub use spans::{divide, expect_blocks};
pub use whole_weights::WholeWeights;
pub use zero::Zero;
