//! The largest element of each row.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// The column of the largest element of each row of F32 `x` `[T, C]`, the first among equals; -1 for a row with an element that is not
/// finite. I32 `[T]`.
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
