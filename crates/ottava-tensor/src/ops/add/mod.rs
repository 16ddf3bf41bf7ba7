//! Element-wise sum: the residual connection.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::{Device, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// `a + b`, both of one shape and type, rounded once.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_compute("add: a", a)?;
    b.expect("add: b", a.shape())?;
    b.expect_dtype("add: b", &[a.dtype()])?;
    b.expect_device("add: b", a.device())?;
    let mut y = a.empty_like()?;
    match a.device() {
        Device::Cpu => cpu::add(a, b, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::add(gpu, a, b, &mut y)?,
    }
    Ok(y)
}
