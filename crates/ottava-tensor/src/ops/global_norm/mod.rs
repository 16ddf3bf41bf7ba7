//! The global gradient norm, for clipping and monitoring.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::Gradient;
use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// `sqrt(Σ x²)` over all elements of all `gradients`, as F32 `[1]`. Squares and sums are F64.
pub fn global_norm(gradients: &[Gradient]) -> Result<Tensor> {
    let first = gradients.first().ok_or_else(|| Error::Value("global_norm: no tensors were given".into()))?.values();
    for gradient in gradients {
        let types: &[DType] = match gradient {
            Gradient::Plain(_) => &[DType::F32, DType::BF16],
            Gradient::Scaled(_) => &[DType::E4M3],
        };
        gradient.values().expect_dtype("global_norm: tensor", types)?;
        gradient.values().expect_device("global_norm: tensor", first.device())?;
    }
    let mut norm = Tensor::empty(first.device(), &[1], DType::F32)?;
    match first.device() {
        Device::Cpu => cpu::global_norm(gradients, &mut norm),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::global_norm(gpu, gradients, &mut norm)?,
    }
    Ok(norm)
}
