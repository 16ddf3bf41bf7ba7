//! Conversion between floating-point types, without a scale.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::{DType, Device, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// `x` rounded to `dtype`, to nearest even. Both types are of F64 (CPU only), F32, F16 and BF16.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    expect_compute("cast: x", x)?;
    let mut y = Tensor::empty(x.device(), x.shape(), dtype)?;
    expect_compute("cast: result", &y)?;
    match x.device() {
        Device::Cpu => cpu::cast(x, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::cast(gpu, x, &mut y)?,
    }
    Ok(y)
}
