//! The update of delayed scaling: amax histories roll, and scales are recomputed from them.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// Reduction of an amax history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxReducer {
    /// The largest in the window.
    Max,
    /// The most recent.
    MostRecent,
}

/// Treatment of a non-finite amax. It is counted in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// Ignored, as if nothing had been measured.
    Quarantine,
    /// Enters the history, and the scale is kept while it is in the window: Transformer Engine's rule.
    Keep,
}

/// Parameters of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// Reduction of the history.
    pub reducer: AmaxReducer,
    /// Headroom in powers of two: the target is `largest finite · 2^-margin`.
    pub margin: i32,
    /// Number of updates between computations of a scale, at least 1.
    pub interval: u32,
    /// Treatment of a non-finite amax.
    pub non_finite: NonFinite,
}

impl DelayedScaling {
    fn headroom(&self) -> f32 {
        2f32.powi(-self.margin)
    }
}

/// Amax histories and scales of `n` entries.
pub struct DelayedScales {
    /// F32 `[L, n]`, most recent last; row 0 is a staging row that is zero between updates.
    pub history: Tensor,
    /// F32 `[n]`, initially 1.
    pub scale: Tensor,
    /// Largest finite value of each entry's format, F32 `[n]`.
    pub largest: Tensor,
    /// Updates until the scale is recomputed, I64 `[n]`; initially 0.
    pub wait: Tensor,
    /// Updates so far whose amax was not finite, I64 `[n]`.
    pub non_finite: Tensor,
}

impl DelayedScales {
    /// Empty histories of `window` rows, for formats with these `largest` finite values.
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
/// Each update decrements the wait counter of an entry; at 0 it is due. Let `a` be the measured amax and `A` the maximum of `a` and the old
/// rows `1..L` (or `a` for [`AmaxReducer::MostRecent`]). If `a = 0`, or `a` is non-finite with [`NonFinite::Quarantine`], nothing else
/// changes. Otherwise rows move by one and the last becomes `a`; if the entry is due and `A` is finite and positive,
/// `scale = largest · 2^-margin / A`, at most the largest F32, and the counter becomes `interval - 1`.
/// Source: Transformer Engine, `common/recipe/delayed_scaling.cu`, whose rule this is with an interval of 1 and
/// [`NonFinite::Keep`].
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
