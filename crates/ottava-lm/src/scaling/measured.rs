//! What casts have measured, one by one, for whoever wants to know which tensor loses what.

use super::{Delayed, ScalingState};
use crate::error::Result;
use crate::recipe::{FirstStep, Scaling};
use ottava_tensor::ops::CastStatistics;
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
    /// What it multiplied by in the last step, where that was known before the step.
    pub scale: Option<f32>,
    /// Counted since the model was built.
    pub counts: CastCounts,
}

/// What one cast has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CastCounts {
    /// Elements cast.
    pub elements: i64,
    /// Those beyond the largest finite value after scaling.
    pub saturated: i64,
    /// Those that became zero without being zero.
    pub underflowed: i64,
    /// Steps in which it met an infinity.
    pub non_finite: i64,
}

/// Amaxes and scales of the step that was ended last, which its update replaces; F32 `[n]`.
pub(super) struct LastStep {
    amax: Tensor,
    scale: Tensor,
}

impl LastStep {
    pub(super) fn new(device: &Device, n: usize) -> Result<LastStep> {
        let zeros = || Tensor::zeros(device, &[n], DType::F32);
        Ok(LastStep { amax: zeros()?, scale: zeros()? })
    }

    /// Copies what the update is about to replace. Enqueues work and waits for nothing.
    pub(super) fn keep(&mut self, amax: &Tensor, scale: &Tensor) -> Result<()> {
        self.amax.copy_from(0, amax)?;
        Ok(self.scale.copy_from(0, scale)?)
    }
}

impl ScalingState {
    /// What each cast has measured, in the order of the slots; reads from the device.
    pub fn measured(&self) -> Result<Vec<CastRecord>> {
        let Some(scales) = &self.scales else { return Ok(Vec::new()) };
        let CastStatistics { saturated, underflowed, elements, .. } = &self.statistics;
        let [saturated, underflowed, elements, non_finite] =
            [saturated, underflowed, elements, &scales.non_finite].map(|t| t.to_vec::<i64>());
        let (saturated, underflowed, elements, non_finite) = (saturated?, underflowed?, elements?, non_finite?);
        let (amax, scale) = (self.last_step.amax.to_vec::<f32>()?, self.last_step.scale.to_vec::<f32>()?);
        // In a first step each cast had scales of its own.
        let known = |delayed: &Delayed| delayed.updates > 1 || delayed.first_step == FirstStep::Unscaled;
        let known = self.delayed.as_ref().is_some_and(known);
        let record = |(i, (name, cast)): (usize, &(String, crate::recipe::Cast))| CastRecord {
            name: name.clone(),
            largest: cast.format.max_finite().unwrap_or(f32::MAX),
            amax: amax[i],
            scale: (known && matches!(cast.scaling, Scaling::Delayed { .. })).then_some(scale[i]),
            counts: CastCounts {
                elements: elements[i],
                saturated: saturated[i],
                underflowed: underflowed[i],
                non_finite: non_finite[i],
            },
        };
        Ok(self.slots.iter().enumerate().map(record).collect())
    }
}
