//! The sum of equal parts of a tensor: partial products of several ranks, and the residual connection.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::{Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// `addend + Σ parts[i]`, summed in F32 (F64 for F64) in the order of the parts, the addend last, and rounded once: `parts` `[P, T, C]`,
/// `addend` and result `[T, C]`.
///
/// Errors with [`Error::Value`] if there are no parts.
pub fn sum_parts(parts: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
    let [count, rows, columns] = parts.dims("sum_parts: parts")?;
    expect_compute("sum_parts: parts", parts)?;
    if count == 0 {
        return Err(Error::Value("sum_parts: there are no parts".into()));
    }
    if let Some(addend) = addend {
        addend.expect("sum_parts: addend", &[rows, columns])?;
        addend.expect_dtype("sum_parts: addend", &[parts.dtype()])?;
        addend.expect_device("sum_parts: addend", parts.device())?;
    }
    let mut y = Tensor::empty(parts.device(), &[rows, columns], parts.dtype())?;
    match parts.device() {
        Device::Cpu => cpu::sum_parts(parts, addend, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::sum_parts(gpu, parts, addend, &mut y)?,
    }
    Ok(y)
}
