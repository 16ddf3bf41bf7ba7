//! What forward keeps of an activation for backward: its values, or E4M3 codes with a power of two for each 16 neighbours of a row.
//!
//! Only ops that are no products read it, so it is no [`QuantizedTensor`](crate::QuantizedTensor): it has no transpose and no padding,
//! and the tensor cores' layouts of scales mean nothing to it. A power of two takes one byte where COAT keeps a BF16 scale, all values
//! of a group but those near its largest are rounded as by any other scale, and reading back rounds nothing: four significant bits
//! times a power of two are a value of BF16.
//! Xi et al. 2024 (COAT), arXiv:2410.19313, section 5; the power of two is the E8M0 of OCP's MX specification v1.0.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// Neighbours of a row that share a power of two. The last group of a row may be shorter.
const GROUP: usize = 16;

/// An activation `[R, C]` in E4M3, a power of two to each group of 16 values: 17 bytes where BF16 takes 32.
#[derive(Clone, Debug)]
pub struct CompressedTensor {
    codes: Tensor,     /* [R, C] */
    scale_inv: Tensor, /* [R, ⌈C / 16⌉] */
    dtype: DType,
}

/// Compresses `x` `[R, C]` (F32, F16 or BF16): `code = satcast(x / scale_inv)`, where `scale_inv` is the smallest power of two, from 2⁻¹²⁶
/// on, by which none of its group lies beyond 448.
///
/// A group with an infinity or a NaN is NaN as a whole: what is not finite stays so.
pub fn compress(x: &Tensor) -> Result<CompressedTensor> {
    let mut y = prepare(x)?;
    match x.device() {
        Device::Cpu => cpu::compress(x, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::compress(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// Checks `x`, and allocates what it is compressed to.
pub(super) fn prepare(x: &Tensor) -> Result<CompressedTensor> {
    let [rows, columns] = x.dims("compress: x")?;
    x.expect_dtype("compress: x", &[DType::F32, DType::F16, DType::BF16])?;
    Ok(CompressedTensor {
        codes: Tensor::empty(x.device(), &[rows, columns], DType::E4M3)?,
        scale_inv: Tensor::empty(x.device(), &[rows, columns.div_ceil(GROUP)], DType::E8M0)?,
        dtype: x.dtype(),
    })
}

/// `code · scale_inv` in the type that was compressed. Exact but where that is F16 and a value near its end was rounded beyond it, to
/// infinity.
pub fn decompress(x: &CompressedTensor) -> Result<Tensor> {
    let mut y = Tensor::empty(x.codes.device(), x.codes.shape(), x.dtype)?;
    match x.codes.device() {
        Device::Cpu => cpu::decompress(x, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::decompress(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// An activation as forward kept it.
#[derive(Clone, Debug)]
pub enum Saved {
    /// As it was.
    Exact(Tensor),
    /// From [`compress()`].
    Compressed(CompressedTensor),
}

impl Saved {
    /// The activation; a compressed one in a tensor of its own.
    pub fn value(&self) -> Result<Tensor> {
        match self {
            Saved::Exact(x) => Ok(x.clone()),
            Saved::Compressed(x) => decompress(x),
        }
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        self.values_or_codes().device()
    }

    /// Type of its values.
    pub fn dtype(&self) -> DType {
        match self {
            Saved::Exact(x) => x.dtype(),
            Saved::Compressed(x) => x.dtype,
        }
    }

    /// Its shape; `what` names op and argument in the error when that is no matrix.
    pub(super) fn dims(&self, what: &str) -> Result<[usize; 2]> {
        self.values_or_codes().dims(what)
    }

    /// A tensor of its shape, where it lies: what kernels read eight elements of at a time.
    pub(super) fn values_or_codes(&self) -> &Tensor {
        match self {
            Saved::Exact(x) => x,
            Saved::Compressed(x) => &x.codes,
        }
    }
}

impl From<&Tensor> for Saved {
    fn from(x: &Tensor) -> Saved {
        Saved::Exact(x.clone())
    }
}

impl From<&Saved> for Saved {
    fn from(x: &Saved) -> Saved {
        x.clone()
    }
}
