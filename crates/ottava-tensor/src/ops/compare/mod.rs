//! Sums that say how far a tensor is from a reference: norms, error and direction.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// The number of sums of a comparison: `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²`.
pub const SUMS: usize = 4;

/// Writes the sums of `x` and `reference`, of one size and type (F32, BF16, or on the CPU F64), to row `at` of `sums`, F64 `[n, 4]`: `Σ x²`,
/// `Σ r²`, `Σ x·r` and `Σ (x − r)²`, in F64.
pub fn compare(x: &Tensor, reference: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    x.expect_dtype("compare: x", &[DType::F32, DType::F64, DType::BF16])?;
    reference.expect_dtype("compare: reference", &[x.dtype()])?;
    x.expect_device("compare: x", reference.device())?;
    sums.expect_dtype("compare: sums", &[DType::F64])?;
    if x.len() != reference.len() {
        return Err(Error::Value(format!(
            "compare: a tensor of shape {:?} and its reference of shape {:?} have different sizes",
            x.shape(),
            reference.shape()
        )));
    }
    if (at + 1) * SUMS > sums.len() {
        return Err(Error::Value(format!("compare: row {at} is beyond sums of shape {:?}", sums.shape())));
    }
    match reference.device() {
        Device::Cpu => {
            sums.host_mut::<f64>()[at * SUMS..(at + 1) * SUMS].copy_from_slice(&cpu::compare(x, reference));
            Ok(())
        }
        Device::DryCpu(_) => Ok(()),
        Device::Cuda(gpu) => cuda::compare(gpu, x, reference, sums, at),
    }
}
