//! The scaling state of a run: one slot per cast, kept in a few plain tensors with names.
//!
//! Casts write statistics to their slots; amaxes of micro-batches are merged by maximum. Histories roll and scales change once per
//! optimizer step, in [`ScalingState::update`], so every cast of a step reads the same scales.

mod amax_group;
mod casts;
mod histogram;
mod measured;
mod probe;
mod routers;
mod scales;
mod state;
mod values;

pub use amax_group::AmaxGroup;
pub use casts::{Casts, Recorder};
pub use histogram::Histogram;
pub use measured::{CastCounts, CastLosses, CastRecord, MergeCounts, OneRank};
pub use probe::{Compared, Comparison, Observer, PrecisionComparison, Probe, Quantity, sampling_step};
pub use routers::{RouterLoad, RouterMetrics, RouterSite};
pub use scales::{NextCast, Scales, Slot, Slots};
pub use state::ScalingState;
pub use values::Values;
