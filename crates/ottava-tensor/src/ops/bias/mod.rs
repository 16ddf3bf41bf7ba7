//! The bias of a linear layer and its gradient.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient};
use crate::{Device, Result, Tensor};

pub(crate) use cuda::SOURCE;
pub(super) use cuda::{add_column_sums, add_partial_sums};

/// `x[t, c] += bias[c]` in place, for `x` `[T, C]` and `bias` `[C]` of one type.
pub fn add_bias(x: &mut Tensor, bias: &Tensor) -> Result<()> {
    let [_, columns] = x.dims("add_bias: x")?;
    expect_compute("add_bias: x", x)?;
    bias.expect("add_bias: bias", &[columns])?;
    bias.expect_dtype("add_bias: bias", &[x.dtype()])?;
    match x.device().clone() {
        Device::Cpu => cpu::add_bias(x, bias),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::add_bias(&gpu, x, bias)?,
    }
    Ok(())
}

/// `dbias[c] += Σ_t dy[t, c]`, for `dy` `[T, C]` and `dbias` `[C]` in F32 (F64 for F64).
pub fn bias_gradient(dy: &Tensor, dbias: &mut Tensor) -> Result<()> {
    let [_, columns] = dy.dims("bias_gradient: dy")?;
    expect_compute("bias_gradient: dy", dy)?;
    dbias.expect("bias_gradient: dbias", &[columns])?;
    expect_gradient("bias_gradient: dbias", dbias, dy)?;
    match dy.device() {
        Device::Cpu => cpu::bias_gradient(dy, dbias),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::bias_gradient(gpu, dy, dbias)?,
    }
    Ok(())
}
