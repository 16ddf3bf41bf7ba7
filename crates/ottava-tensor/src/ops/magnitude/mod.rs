//! Magnitudes of the rows of a weight. Weight-decomposed adapters (DoRA) train magnitudes and directions. Liu et al. 2024, arXiv:2402.09353.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Returns `‖w[r]‖` for each row of `w` `[R, C]`, as `[R]` in the type of sums.
pub fn row_norms(w: &Tensor) -> Result<Tensor> {
    finish(&row_squares(w, None)?, None)
}

/// Returns `Σ_c (w[r, c] + change[r, c])²` for each row of `w` `[R, C]`, as `[R]` in the type of sums. `change`, if given, has the shape and type of
/// `w`.
pub fn row_squares(w: &Tensor, change: Option<&Tensor>) -> Result<Tensor> {
    let [rows, columns] = w.dims("row_squares: w")?;
    expect_compute("row_squares: w", w)?;
    if let Some(change) = change {
        change.expect("row_squares: change", &[rows, columns])?;
        change.expect_dtype("row_squares: change", &[w.dtype()])?;
        change.expect_device("row_squares: change", w.device())?;
    }
    let mut squares = Tensor::empty(w.device(), &[rows], real_type(w.dtype()))?;
    dispatch! { w.device(),
        cpu => cpu::squares(w, change, &mut squares),
        gpu => cuda::squares(gpu, w, change, &mut squares)?,
    }
    Ok(squares)
}

/// Returns `magnitude[r] / sqrt(squares[r])` for each row, or 0 if the sum of squares is 0. Both arguments are `[R]`, in F32 or F64.
pub fn magnitude_factors(squares: &Tensor, magnitude: &Tensor) -> Result<Tensor> {
    let [rows] = squares.dims("magnitude_factors: squares")?;
    squares.expect_dtype("magnitude_factors: squares", &[DType::F32, DType::F64])?;
    magnitude.expect("magnitude_factors: magnitude", &[rows])?;
    magnitude.expect_dtype("magnitude_factors: magnitude", &[squares.dtype()])?;
    magnitude.expect_device("magnitude_factors: magnitude", squares.device())?;
    finish(squares, Some(magnitude))
}

/// Returns the norms of rows from their sums of `squares` or, with `magnitude`, the magnitudes divided by the norms.
fn finish(squares: &Tensor, magnitude: Option<&Tensor>) -> Result<Tensor> {
    let mut result = squares.empty_like()?;
    dispatch! { squares.device(),
        cpu => cpu::finish(squares, magnitude, &mut result),
        gpu => cuda::finish(gpu, squares, magnitude, &mut result)?,
    }
    Ok(result)
}

/// Computes `dmagnitude[c] += Σ_t dy[t, c] · x[t, c] / magnitude[c]`, for `dy` and `x` `[T, C]` of one type, and `magnitude` and `dmagnitude` `[C]`
/// in the type of sums. If `magnitude[c]` is 0, adds nothing.
///
/// Let `x` be the output before it is multiplied by `magnitude / norm`, and `dy` the gradient by `x`, which is the gradient by the output times this
/// factor. Then this is the gradient of the magnitude.
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
    dispatch! { dy.device(),
        cpu => cpu::gradient(dy, x, magnitude, dmagnitude),
        gpu => cuda::gradient(gpu, dy, x, magnitude, dmagnitude)?,
    }
    Ok(())
}
