//! The scaling state of a run. Each cast has a slot, and the state is a few named tensors with an entry per slot.
//!
//! Casts write statistics to their slots. Amaxes of micro-batches are merged by maximum. Histories roll and scales change once per
//! optimizer step, in [`ScalingState::update`], so all casts of a step read the same scales.
//!
//! Each linear adds three casts to `Slots` when it is built: `….input`, `….weight` and `….grad_output`. The linear owns the slots, and
//! `ScalingState` owns the values. All scales of a model are in one place, since they are saved and updated together: amax and counters
//! (`CastStatistics`) and, for delayed scaling, `history` `[window, slots]` and `scale` `[slots]`. Layers borrow the scales through the `Context`
//! of a call.
//!
//! `Casts` has the inputs of the casts of one pass: read-only `Scales`, a `Recorder` for statistics, and a `Mode`. The recipe's `Scaling` decides how
//! a cast gets its scale (`Scales::known`):
//!
//! - Delayed scaling: the slot's entry of `scale`, constant within a step. Before the first update, the setting `first_step` applies.
//! - Current scaling: `take_scale` computes the scale from the tensor's amax. The operand keeps the scale as a `FrozenScale`, so that a recomputed
//!   operand is cast with the same scale.
//! - Rows and blocks: the cast computes the scales itself, with the same result for a recomputed operand.
//!
//! A cast measures the amax and counts saturated and underflowed elements in its own pass over the values. The scale stays on the device, so no
//! cast waits for the host. `docs/recipes.md` has the formulas.

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
