//! The gated activation `silu(gate) · up`. Shazeer 2020, arXiv:2002.05202.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::{Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// `y = gate / (1 + e^-gate) · up` for `x` `[T, 2F]`, whose rows hold `F` gates, then `F` ups. Returns `[T, F]`.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let [tokens, hidden] = halves(x)?;
    let mut y = Tensor::empty(x.device(), &[tokens, hidden], x.dtype())?;
    match x.device() {
        Device::Cpu => cpu::swiglu(x, &mut y),
        Device::Cuda(gpu) => cuda::swiglu(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// Gradient of [`swiglu`] by its input, `[T, 2F]`, from `dy` `[T, F]`.
pub fn swiglu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    let [tokens, hidden] = halves(x)?;
    dy.expect("swiglu_backward: dy", &[tokens, hidden])?;
    dy.expect_dtype("swiglu_backward: dy", &[x.dtype()])?;
    let mut dx = x.empty_like()?;
    match x.device() {
        Device::Cpu => cpu::swiglu_backward(dy, x, &mut dx),
        Device::Cuda(gpu) => cuda::swiglu_backward(gpu, dy, x, &mut dx)?,
    }
    Ok(dx)
}

fn halves(x: &Tensor) -> Result<[usize; 2]> {
    let [tokens, width] = x.dims("swiglu: x")?;
    expect_compute("swiglu: x", x)?;
    if width % 2 != 0 {
        return Err(Error::Shape {
            what: "swiglu: x".into(),
            expected: "an even width".into(),
            got: vec![tokens, width],
        });
    }
    Ok([tokens, width / 2])
}
