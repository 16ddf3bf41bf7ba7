//! Element-wise sum: the residual connection.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Result, Tensor};

/// Returns `a + b`, rounded once. `a` and `b` have the same shape and type.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_compute("add: a", a)?;
    b.expect("add: b", a.shape())?;
    b.expect_dtype("add: b", &[a.dtype()])?;
    b.expect_device("add: b", a.device())?;
    let mut y = a.empty_like()?;
    dispatch! { a.device(),
        cpu => cpu::add(a, b, &mut y),
        gpu => cuda::add(gpu, a, b, &mut y)?,
    }
    Ok(y)
}
