//! Root-mean-square normalisation. Zhang and Sennrich 2019, arXiv:1910.07467.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient, real_type};
use crate::{Device, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// Normalises each row: `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`.
///
/// `x` `[T, C]`, `weight` `[C]`, both of one type; returns `y` like `x` and `rstd` `[T]` in F32 (F64 for F64), which backward needs.
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let [tokens, channels] = x.dims("rmsnorm: x")?;
    expect_compute("rmsnorm: x", x)?;
    weight.expect("rmsnorm: weight", &[channels])?;
    weight.expect_dtype("rmsnorm: weight", &[x.dtype()])?;
    weight.expect_device("rmsnorm: weight", x.device())?;
    let (mut y, mut rstd) = (x.empty_like()?, Tensor::empty(x.device(), &[tokens], real_type(x.dtype()))?);
    match x.device() {
        Device::Cpu => cpu::rmsnorm(x, weight, eps, &mut y, &mut rstd),
        Device::Cuda(gpu) => cuda::rmsnorm(gpu, x, weight, eps, &mut y, &mut rstd)?,
    }
    Ok((y, rstd))
}

/// Gradient of [`rmsnorm`]: with `g = dy · weight` and `n = x · rstd`, `dx = rstd · (g - n · mean(g · n))`; `dweight += Σ_t dy · n`.
///
/// `dweight` `[C]` is F32 (F64 for F64) and is added to. Returns `dx` like `x`.
pub fn rmsnorm_backward(
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    dweight: &mut Tensor,
) -> Result<Tensor> {
    let [tokens, channels] = x.dims("rmsnorm_backward: x")?;
    dy.expect("rmsnorm_backward: dy", x.shape())?;
    dy.expect_dtype("rmsnorm_backward: dy", &[x.dtype()])?;
    weight.expect("rmsnorm_backward: weight", &[channels])?;
    rstd.expect("rmsnorm_backward: rstd", &[tokens])?;
    dweight.expect("rmsnorm_backward: dweight", &[channels])?;
    expect_gradient("rmsnorm_backward: dweight", dweight, x)?;
    let mut dx = x.empty_like()?;
    match x.device() {
        Device::Cpu => cpu::rmsnorm_backward(dy, x, weight, rstd, &mut dx, dweight),
        Device::Cuda(gpu) => cuda::rmsnorm_backward(gpu, dy, x, weight, rstd, &mut dx, dweight)?,
    }
    Ok(dx)
}
