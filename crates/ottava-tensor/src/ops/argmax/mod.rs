//! The column of the largest element of each row.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Returns the column of the largest element of each row of F32 `x` `[T, C]`, as I32 `[T]`. Among equal elements, the first column is returned. For a
/// row with an element that is not finite, -1 is returned.
pub fn argmax(x: &Tensor) -> Result<Tensor> {
    let [rows, _] = x.dims("argmax: x")?;
    x.expect_dtype("argmax: x", &[DType::F32])?;
    let mut at = Tensor::empty(x.device(), &[rows], DType::I32)?;
    dispatch! { x.device(),
        cpu => cpu::argmax(x, &mut at),
        gpu => cuda::argmax(gpu, x, &mut at)?,
    }
    Ok(at)
}
