//! What casts have measured, one by one, for whoever wants to know which tensor loses what.

use crate::error::Result;
use ottava_tensor::{DType, Device, Tensor};

/// What one cast has measured.
#[derive(Clone, Debug, PartialEq)]
pub struct CastRecord {
    /// The cast, as `model.layers.0.mlp.down_proj.input`.
    pub name: String,
    /// Largest finite value of its format.
    pub largest: f32,
    /// Largest absolute value that it met in the last step; NaN is not counted.
    pub amax: f32,
    /// The factor of the last step, where it was known before the step.
    pub scale: Option<f32>,
    /// Counted since the model was built.
    pub counts: CastCounts,
}

/// What one cast has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CastCounts {
    /// Elements cast.
    pub elements: i64,
    /// Elements beyond the largest finite value after scaling.
    pub saturated: i64,
    /// Elements that became zero without being zero.
    pub underflowed: i64,
    /// Steps in which the cast met an infinity.
    pub non_finite: i64,
}

/// How often casts lost something.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CastLosses {
    /// Share of elements beyond the largest finite value.
    pub saturated: f64,
    /// Share of elements that became zero.
    pub underflowed: f64,
    /// The casts that met an infinity.
    pub non_finite: Vec<String>,
}

/// Amaxes and scales of the last finished step, which its update replaces; F32 `[n]`.
pub(super) struct LastStep {
    pub(super) amax: Tensor,
    pub(super) scale: Tensor,
}

impl LastStep {
    pub(super) fn new(device: &Device, n: usize) -> Result<LastStep> {
        let zeros = || Tensor::zeros(device, &[n], DType::F32);
        Ok(LastStep { amax: zeros()?, scale: zeros()? })
    }

    /// Copies what the update is about to replace. Enqueues work and waits for nothing.
    pub(super) fn record(&mut self, amax: &Tensor, scale: &Tensor) -> Result<()> {
        self.amax.copy_from(0, amax)?;
        Ok(self.scale.copy_from(0, scale)?)
    }
}
