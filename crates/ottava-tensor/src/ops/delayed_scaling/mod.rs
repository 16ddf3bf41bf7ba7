//! The update of delayed scaling: rolls amax histories and recomputes scales from them.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// How an amax history is reduced to one amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxReducer {
    /// The largest amax in the window.
    Max,
    /// The most recent amax.
    MostRecent,
}

/// What happens to a non-finite amax. It is counted in both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// It is ignored, as if nothing had been measured.
    Quarantine,
    /// It enters the history, and the scale does not change while it is in the window. This is Transformer Engine's rule.
    Keep,
}

/// The parameters of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// The reduction of the history.
    pub reducer: AmaxReducer,
    /// The headroom in powers of two: the target is `largest finite · 2^-margin`.
    pub margin: i32,
    /// The number of updates between computations of a scale, at least 1.
    pub interval: u32,
    /// What happens to a non-finite amax.
    pub non_finite: NonFinite,
}

impl DelayedScaling {
    fn headroom(&self) -> f32 {
        2f32.powi(-self.margin)
    }
}

/// The amax histories and scales of `n` entries.
pub struct DelayedScales {
    /// The amaxes, F32 `[L, n]`, with the most recent in the last row. Row 0 is a staging row, which is zero between updates.
    pub history: Tensor,
    /// The scales, F32 `[n]`, initially 1.
    pub scale: Tensor,
    /// The largest finite value of each entry's format, F32 `[n]`.
    pub largest: Tensor,
    /// The number of updates until the scale is recomputed, I64 `[n]`, initially 0.
    pub wait: Tensor,
    /// The number of updates with a non-finite amax, I64 `[n]`.
    pub non_finite: Tensor,
}

impl DelayedScales {
    /// Returns empty histories of `window` rows, for formats with these `largest` finite values.
    pub fn new(device: &Device, window: usize, largest: &[f32]) -> Result<DelayedScales> {
        let n = largest.len();
        Ok(DelayedScales {
            history: Tensor::zeros(device, &[window, n], DType::F32)?,
            scale: Tensor::from_slice(device, &[n], &vec![1f32; n])?,
            largest: Tensor::from_slice(device, &[n], largest)?,
            wait: Tensor::zeros(device, &[n], DType::I64)?,
            non_finite: Tensor::zeros(device, &[n], DType::I64)?,
        })
    }
}

/// Rolls `n` histories by one step and recomputes their scales. `amax` F32 `[n]` holds the amaxes of the step, and is cleared.
///
/// Each update decrements the wait counter of an entry. At 0, the entry is due. Let `a` be the measured amax, and `A` the maximum of `a` and the old
/// rows `1..L` (or `a` for [`AmaxReducer::MostRecent`]).
///
/// - If `a = 0`, or `a` is non-finite with [`NonFinite::Quarantine`], nothing else changes.
/// - Otherwise rows move by one and the last row becomes `a`. If the entry is due and `A` is finite and positive,
///   `scale = largest · 2^-margin / A`, at most the largest F32, and the counter becomes `interval - 1`.
///
/// With an interval of 1 and [`NonFinite::Keep`], this is the rule of Transformer Engine (`common/recipe/delayed_scaling.cu`).
pub fn delayed_scaling(amax: &mut Tensor, state: &mut DelayedScales, how: DelayedScaling) -> Result<()> {
    let [window, n] = state.history.dims("delayed_scaling: history")?;
    amax.expect("delayed_scaling: amax", &[n])?;
    state.scale.expect("delayed_scaling: scale", &[n])?;
    state.largest.expect("delayed_scaling: largest", &[n])?;
    state.wait.expect("delayed_scaling: wait", &[n])?;
    state.non_finite.expect("delayed_scaling: non_finite", &[n])?;
    if window == 0 {
        return Err(Error::Value("delayed_scaling: a history needs at least one row".into()));
    }
    if how.interval == 0 {
        return Err(Error::Value("delayed_scaling: the interval is 0, it must be at least 1".into()));
    }
    dispatch! { state.history.device().clone(),
        cpu => cpu::delayed_scaling(amax, state, how),
        gpu => cuda::delayed_scaling(&gpu, amax, state, how)?,
    }
    Ok(())
}
