//! The Euclidean norm of many tensors taken as one vector: the gradient norm that clipping and monitoring use.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// `sqrt(Σ x²)` over all elements of all F32 and BF16 `tensors`, as F32 `[1]`. Squares and sums are kept in binary64.
pub fn global_norm(tensors: &[&Tensor]) -> Result<Tensor> {
    let first = tensors.first().ok_or_else(|| Error::Value("global_norm: no tensors were given".into()))?;
    for tensor in tensors {
        tensor.expect_dtype("global_norm: tensor", &[DType::F32, DType::BF16])?;
        tensor.expect_device("global_norm: tensor", first.device())?;
    }
    let mut norm = Tensor::empty(first.device(), &[1], DType::F32)?;
    match first.device() {
        Device::Cpu => cpu::global_norm(tensors, &mut norm),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::global_norm(gpu, tensors, &mut norm)?,
    }
    Ok(norm)
}
