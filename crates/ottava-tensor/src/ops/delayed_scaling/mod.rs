//! The update of delayed scaling: histories of amax roll, and scales follow from them.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// How a scale follows from a history of amaxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmaxReducer {
    /// The largest in the window.
    Max,
    /// The newest.
    MostRecent,
}

/// What becomes of an amax that is not finite. It is counted in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// It is passed over, as if nothing had been measured.
    Quarantine,
    /// It enters the history, and the scale stays as long as it is in the window: Transformer Engine's rule.
    Keep,
}

/// Parameters of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// How the history becomes one amax.
    pub reducer: AmaxReducer,
    /// Headroom in powers of two: the target is `largest finite · 2^-margin`.
    pub margin: i32,
    /// Updates from one computation of a scale to the next, at least 1.
    pub interval: u32,
    /// What an infinity does.
    pub non_finite: NonFinite,
}

impl DelayedScaling {
    fn headroom(&self) -> f32 {
        2f32.powi(-self.margin)
    }
}

/// Histories of amax with the scales that follow from them, for `n` entries.
pub struct DelayedScales {
    /// F32 `[L, n]`, newest last; row 0 is a staging row that is zero between updates.
    pub history: Tensor,
    /// F32 `[n]`, 1 in the beginning.
    pub scale: Tensor,
    /// Largest finite value of each entry's format, F32 `[n]`.
    pub largest: Tensor,
    /// Updates that pass before the scale is computed again, I64 `[n]`; 0 in the beginning.
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

/// Rolls `n` histories by one step and recomputes their scales. `amax` F32 `[n]` is what the step measured, and is cleared.
///
/// An entry is due when it has nothing to wait for; otherwise it waits for one update less. With `a` the measured value and `A`
/// the maximum of `a` and the old rows `1..L` (or `a` itself for [`AmaxReducer::MostRecent`]): `a = 0`, or an `a` in
/// [`NonFinite::Quarantine`], changes nothing more; otherwise rows move down by one, the last becomes `a`, and if the entry is due
/// and `A` is finite and positive, `scale = largest · 2^-margin / A`, at most the largest binary32 value, and the entry waits for
/// `interval - 1` updates.
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
        return Err(Error::Value("delayed_scaling: the interval is 0, a scale follows every update at most".into()));
    }
    match state.history.device().clone() {
        Device::Cpu => cpu::delayed_scaling(amax, state, how),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::delayed_scaling(&gpu, amax, state, how)?,
    }
    Ok(())
}
