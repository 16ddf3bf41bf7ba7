//! Conversion between floating-point types, without a scale.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Returns `x` rounded to `dtype`, to nearest even. Both types must be F64 (CPU only), F32, F16 or BF16.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut y = Tensor::empty(x.device(), x.shape(), dtype)?;
    cast_into(x, &mut y, 0)?;
    Ok(y)
}

/// Casts all elements of `x` as in [`cast`], and writes them to the elements of `y` from `first` on. Elements are in row-major order. Errors if they
/// do not fit.
pub fn cast_into(x: &Tensor, y: &mut Tensor, first: usize) -> Result<()> {
    expect_compute("cast: x", x)?;
    expect_compute("cast: result", y)?;
    y.expect_device("cast: result", x.device())?;
    if y.len().checked_sub(first).is_none_or(|room| x.len() > room) {
        let (shape, into) = (x.shape(), y.shape());
        return Err(Error::Value(format!(
            "cast: elements of shape {shape:?} do not fit into {into:?} from {first} on"
        )));
    }
    dispatch! { x.device(),
        cpu => cpu::cast(x, y, first),
        gpu => cuda::cast(gpu, x, y, first)?,
    }
    Ok(())
}
