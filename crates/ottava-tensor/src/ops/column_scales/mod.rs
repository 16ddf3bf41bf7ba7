//! Per-column scales of Smooth-SwiGLU. The activation is multiplied by the scales, and the next weight by their inverses.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// The factor of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Factor {
    Scale,
    Inverse,
}

/// Returns for each column of `x` `[R, C]` (F32, F16 or BF16) the largest power of two `s` with `s · amax <= 1`, F32 `[C]`.
///
/// An amax of 0 or infinity gives 1; NaN is ignored. Scales are between 2^-126 and 2^126, so their inverses are normal numbers. Powers of
/// two add no rounding error. Source: Fishman et al. 2024, arXiv:2409.12517, section 4; its scales are not rounded to powers of two.
pub fn column_scales(x: &Tensor) -> Result<Tensor> {
    let [_, columns] = x.dims("column_scales: x")?;
    expect_values("column_scales: x", x)?;
    // First holds the amaxes.
    let mut scales = Tensor::zeros(x.device(), &[columns], DType::F32)?;
    dispatch! { x.device(),
        cpu => cpu::column_scales(x, &mut scales),
        gpu => cuda::column_scales(gpu, x, &mut scales)?,
    }
    Ok(scales)
}

/// Computes `y[r, c] = x[r, c] · scales[c]`, rounded once, for `x` `[R, C]` and `scales` `[C]` in F32 (or F64 for F64).
pub fn scale_columns(x: &Tensor, scales: &Tensor) -> Result<Tensor> {
    multiplied(x, scales, Factor::Scale)
}

/// Computes `y[r, c] = x[r, c] · (1 / scales[c])`, rounded once. The types are as in [`scale_columns`].
pub fn unscale_columns(x: &Tensor, scales: &Tensor) -> Result<Tensor> {
    multiplied(x, scales, Factor::Inverse)
}

/// Computes `sum[r, c] += x[r, c] · (1 / scales[c])`, rounded once, for `sum` `[R, C]` (F32, F16 or BF16). `x` `[R, C]` and `scales` `[C]` are F32.
pub fn add_unscaled_columns(sum: &mut Tensor, x: &Tensor, scales: &Tensor) -> Result<()> {
    expect_values("add_unscaled_columns: sum", sum)?;
    x.expect("add_unscaled_columns: x", sum.shape())?;
    x.expect_dtype("add_unscaled_columns: x", &[DType::F32])?;
    x.expect_device("add_unscaled_columns: x", sum.device())?;
    expect_scales(scales, x)?;
    dispatch! { x.device(),
        cpu => cpu::add_unscaled_columns(sum, x, scales),
        gpu => cuda::add_unscaled_columns(gpu, sum, x, scales)?,
    }
    Ok(())
}

fn multiplied(x: &Tensor, scales: &Tensor, factor: Factor) -> Result<Tensor> {
    expect_compute("scale_columns: x", x)?;
    expect_scales(scales, x)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::multiply(x, scales, factor, &mut y),
        gpu => cuda::multiply(gpu, x, scales, factor, &mut y)?,
    }
    Ok(y)
}

fn expect_values(what: &str, x: &Tensor) -> Result<()> {
    x.expect_dtype(what, &[DType::F32, DType::F16, DType::BF16])
}

fn expect_scales(scales: &Tensor, x: &Tensor) -> Result<()> {
    let [_, columns] = x.dims("scale_columns: x")?;
    scales.expect("scale_columns: scales", &[columns])?;
    scales.expect_dtype("scale_columns: scales", &[DType::F32, real_type(x.dtype())])?;
    scales.expect_device("scale_columns: scales", x.device())
}
