//! Magnitudes of the rows of a weight: what weight-decomposed adapters (DoRA) train beside directions. Liu et al. 2024, arXiv:2402.09353.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient, real_type};
use crate::{Device, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// `‖w[r]‖` for each row of `w` `[R, C]`, `[R]` in the type of sums.
pub fn row_norms(w: &Tensor) -> Result<Tensor> {
    let [rows, _] = w.dims("row_norms: w")?;
    expect_compute("row_norms: w", w)?;
    let mut norms = Tensor::empty(w.device(), &[rows], real_type(w.dtype()))?;
    compute(w, None, &mut norms)?;
    Ok(norms)
}

/// `magnitude[r] / ‖w[r] + change[r]‖` for each row of `w` and `change` `[R, C]` of one type, `[R]` in the type of sums, which `magnitude`
/// `[R]` has too; 0 where the norm is 0.
pub fn magnitude_factors(w: &Tensor, change: &Tensor, magnitude: &Tensor) -> Result<Tensor> {
    let [rows, columns] = w.dims("magnitude_factors: w")?;
    expect_compute("magnitude_factors: w", w)?;
    change.expect("magnitude_factors: change", &[rows, columns])?;
    change.expect_dtype("magnitude_factors: change", &[w.dtype()])?;
    change.expect_device("magnitude_factors: change", w.device())?;
    magnitude.expect("magnitude_factors: magnitude", &[rows])?;
    expect_gradient("magnitude_factors: magnitude", magnitude, w)?;
    let mut factors = magnitude.empty_like()?;
    compute(w, Some((change, magnitude)), &mut factors)?;
    Ok(factors)
}

fn compute(w: &Tensor, scaled: Option<(&Tensor, &Tensor)>, result: &mut Tensor) -> Result<()> {
    match w.device() {
        Device::Cpu => cpu::compute(w, scaled, result),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::compute(gpu, w, scaled, result)?,
    }
    Ok(())
}

/// `dmagnitude[c] += Σ_t dy[t, c] · x[t, c] / magnitude[c]`, for `dy` and `x` `[T, C]` of one type, and `magnitude` and `dmagnitude` `[C]` in
/// the type of sums; nothing where `magnitude` is 0.
///
/// It is the gradient of the magnitude if `dy` is that by `x`, the output without its factor `magnitude / norm`: the gradient by the output
/// times that factor.
pub fn magnitude_gradient(dy: &Tensor, x: &Tensor, magnitude: &Tensor, dmagnitude: &mut Tensor) -> Result<()> {
    let [rows, columns] = dy.dims("magnitude_gradient: dy")?;
    expect_compute("magnitude_gradient: dy", dy)?;
    x.expect("magnitude_gradient: x", &[rows, columns])?;
    x.expect_dtype("magnitude_gradient: x", &[dy.dtype()])?;
    x.expect_device("magnitude_gradient: x", dy.device())?;
    magnitude.expect("magnitude_gradient: magnitude", &[columns])?;
    expect_gradient("magnitude_gradient: magnitude", magnitude, dy)?;
    dmagnitude.expect("magnitude_gradient: dmagnitude", &[columns])?;
    expect_gradient("magnitude_gradient: dmagnitude", dmagnitude, dy)?;
    match dy.device() {
        Device::Cpu => cpu::gradient(dy, x, magnitude, dmagnitude),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::gradient(gpu, dy, x, magnitude, dmagnitude)?,
    }
    Ok(())
}
