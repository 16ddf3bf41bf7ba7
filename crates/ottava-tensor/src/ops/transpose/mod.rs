//! Transposition of a matrix of any element type.

pub(super) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{Device, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// `y[c, r] = x[r, c]` for `x` `[R, C]`; moves bytes, so it is exact for every type.
pub fn transpose(x: &Tensor) -> Result<Tensor> {
    let [rows, columns] = x.dims("transpose: x")?;
    let mut y = Tensor::empty(x.device(), &[columns, rows], x.dtype())?;
    match x.device() {
        Device::Cpu => cpu::transpose(x, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::transpose(gpu, x, &mut y)?,
    }
    Ok(y)
}
