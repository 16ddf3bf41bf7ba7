//! The update of delayed scaling: histories of amax roll, and scales follow from them.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{Device, Error, Result, Tensor};

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

/// Parameters of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// How the history becomes one amax.
    pub reducer: AmaxReducer,
    /// Headroom in powers of two: the target is `largest finite · 2^-margin`.
    pub margin: i32,
}

impl DelayedScaling {
    fn headroom(&self) -> f32 {
        2f32.powi(-self.margin)
    }
}

/// Rolls `n` histories by one step and recomputes their scales.
///
/// `amax` `[n]` is what the step measured and is cleared; `history` `[L, n]`, newest last, row 0 a staging row that is zero
/// between updates; `scale` `[n]`; `largest` `[n]` holds the largest finite value of each entry's format. All F32.
///
/// With `a` the measured value and `A` the maximum of `a` and the old rows `1..L` (or `a` itself for
/// [`AmaxReducer::MostRecent`]): `a = 0` changes nothing; otherwise rows move down by one, the last becomes `a`, and
/// if `A` is finite and positive, `scale = largest · 2^-margin / A`, at most the largest binary32 value.
/// Source: Transformer Engine, `common/recipe/delayed_scaling.cu`.
pub fn delayed_scaling(
    amax: &mut Tensor,
    history: &mut Tensor,
    scale: &mut Tensor,
    largest: &Tensor,
    how: DelayedScaling,
) -> Result<()> {
    let [window, n] = history.dims("delayed_scaling: history")?;
    amax.expect("delayed_scaling: amax", &[n])?;
    scale.expect("delayed_scaling: scale", &[n])?;
    largest.expect("delayed_scaling: largest", &[n])?;
    if window == 0 {
        return Err(Error::Value("delayed_scaling: a history needs at least one row".into()));
    }
    match history.device().clone() {
        Device::Cpu => cpu::delayed_scaling(amax, history, scale, largest, how),
        Device::Cuda(gpu) => cuda::delayed_scaling(&gpu, amax, history, scale, largest, how)?,
    }
    Ok(())
}
