//! The global gradient norm, for clipping and monitoring.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::Gradient;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// Returns `sqrt(Σ x²)` over all elements of all `gradients`, as F32 `[1]`. Squares and sums are F64.
pub fn global_norm(gradients: &[Gradient]) -> Result<Tensor> {
    root_of_sum(&sums_of_squares(gradients)?)
}

/// Returns `Σ x²` over all elements of all `gradients`, as F64 `[1]`: the part of one rank in a norm.
pub fn sum_of_squares(gradients: &[Gradient]) -> Result<Tensor> {
    let partial = sums_of_squares(gradients)?;
    let mut sum = Tensor::empty(partial.device(), &[1], DType::F64)?;
    dispatch! { partial.device(),
        cpu => sum.host_mut()[0] = partial.host::<f64>().iter().sum::<f64>(),
        gpu => cuda::sum(gpu, &partial, &mut sum)?,
    }
    Ok(sum)
}

/// Returns `sqrt(Σ x)` of F64 `partial` `[n]`, added in order, as F32 `[1]`.
pub fn root_of_sum(partial: &Tensor) -> Result<Tensor> {
    partial.expect_dtype("root_of_sum: partial sums", &[DType::F64])?;
    let mut root = Tensor::empty(partial.device(), &[1], DType::F32)?;
    dispatch! { partial.device(),
        cpu => root.host_mut()[0] = partial.host::<f64>().iter().sum::<f64>().sqrt() as f32,
        gpu => cuda::root_of_sum(gpu, partial, &mut root)?,
    }
    Ok(root)
}

/// Returns `norm` (F32 `[1]`), or infinity if `norm` is NaN or above `limit` (F32 `[1]`). An update with an infinite norm changes nothing.
pub fn limit_norm(norm: &Tensor, limit: &Tensor) -> Result<Tensor> {
    for (what, x) in [("limit_norm: norm", norm), ("limit_norm: limit", limit)] {
        x.expect_dtype(what, &[DType::F32])?;
        x.expect(what, &[1])?;
        x.expect_device(what, norm.device())?;
    }
    let mut limited = norm.empty_like()?;
    dispatch! { norm.device(),
        cpu => {
            let (norm, limit) = (norm.host::<f32>()[0], limit.host::<f32>()[0]);
            limited.host_mut()[0] = if norm <= limit { norm } else { f32::INFINITY };
        },
        gpu => cuda::limit_norm(gpu, norm, limit, &mut limited)?,
    }
    Ok(limited)
}

/// Returns partial sums of squares of all `gradients` in their order, F64 `[n]`. On the CPU, each gradient has one sum.
pub fn sums_of_squares(gradients: &[Gradient]) -> Result<Tensor> {
    let first = gradients.first().ok_or_else(|| Error::Value("global_norm: no tensors were given".into()))?.values();
    for gradient in gradients {
        let types: &[DType] = match gradient {
            Gradient::Plain(_) => &[DType::F32, DType::BF16],
            Gradient::Scaled(_) => &[DType::E4M3],
        };
        gradient.values().expect_dtype("global_norm: tensor", types)?;
        gradient.values().expect_device("global_norm: tensor", first.device())?;
    }
    if let Device::Cuda(gpu) = first.device() {
        return cuda::sums_of_squares(gpu, first.device(), gradients);
    }
    let mut sums = Tensor::empty(first.device(), &[gradients.len()], DType::F64)?;
    first.device().on_cpu(|| sums.host_mut().copy_from_slice(&cpu::sums_of_squares(gradients)));
    Ok(sums)
}
