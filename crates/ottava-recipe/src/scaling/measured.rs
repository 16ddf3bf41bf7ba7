//! The measurements of single casts.

use ottava_common::error::Result;
use ottava_tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

/// The measurements of one cast.
#[derive(Clone, Debug, PartialEq)]
pub struct CastRecord {
    /// The name of the cast, for example `model.layers.0.mlp.down_proj.input`.
    pub name: String,
    /// The largest finite value of the cast's format.
    pub largest: f32,
    /// The amax of the last step, ignoring NaN.
    pub amax: f32,
    /// The scale of the last step. `None` if it depended on the tensors of the step.
    pub scale: Option<f32>,
    /// The counts since the model was built.
    pub counts: CastCounts,
}

/// The counts of one cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CastCounts {
    /// The number of cast elements.
    pub elements: i64,
    /// The number of elements beyond the largest finite value after scaling.
    pub saturated: i64,
    /// The number of nonzero elements that became zero.
    pub underflowed: i64,
    /// The number of steps with an infinite amax.
    pub non_finite: i64,
}

impl CastCounts {
    /// Returns the counts since `before`.
    pub fn minus(self, before: CastCounts) -> CastCounts {
        CastCounts {
            elements: self.elements - before.elements,
            saturated: self.saturated - before.saturated,
            underflowed: self.underflowed - before.underflowed,
            non_finite: self.non_finite - before.non_finite,
        }
    }
}

/// The shares of elements that casts saturated or flushed to zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CastLosses {
    /// The share of elements beyond the largest finite value.
    pub saturated: f64,
    /// The share of elements that became zero.
    pub underflowed: f64,
    /// The casts with an infinite amax.
    pub non_finite: Vec<String>,
}

/// The rules for adding the counts of ranks.
pub trait MergeCounts {
    /// Returns whether this rank counts the elements of the cast called `name` in slot `slot`. If all ranks cast the same weight, only one rank
    /// counts.
    fn counts(&self, slot: usize, name: &str) -> bool;

    /// Sums counts over all ranks.
    fn sum(&self, counts: &[i64]) -> Result<Vec<i64>>;

    /// Sums counts of each slot over the ranks with the same layers.
    fn sum_by_slot(&self, counts: &[i64]) -> Result<Vec<i64>>;
}

/// A process without other ranks.
pub struct OneRank;

impl MergeCounts for OneRank {
    fn counts(&self, _: usize, _: &str) -> bool {
        true
    }

    fn sum(&self, counts: &[i64]) -> Result<Vec<i64>> {
        Ok(counts.to_vec())
    }

    fn sum_by_slot(&self, counts: &[i64]) -> Result<Vec<i64>> {
        self.sum(counts)
    }
}

/// The amaxes and scales of the last finished step, which its update replaces, F32 `[n]`.
pub(super) struct LastStep {
    pub(super) amax: Tensor,
    pub(super) scale: Tensor,
}

impl LastStep {
    pub(super) fn new(device: &Device, n: usize) -> Result<LastStep> {
        let zeros = || Tensor::zeros(device, &[n], DType::F32);
        Ok(LastStep { amax: zeros()?, scale: zeros()? })
    }

    /// Copies amaxes and scales before an update replaces them. Enqueues work without waiting.
    pub(super) fn record(&mut self, amax: &Tensor, scale: &Tensor) -> Result<()> {
        self.amax.copy_from(0, amax)?;
        Ok(self.scale.copy_from(0, scale)?)
    }
}
