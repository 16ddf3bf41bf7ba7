//! Saved activations: the values, or E4M3 codes with a power-of-two scale for each group of 16 neighbours of a row.
//!
//! Only elementwise ops and norms read saved activations. So they need no transpose, padding or tensor-core layout, unlike a
//! [`QuantizedTensor`](crate::QuantizedTensor). A power of two takes one byte, while COAT's scale is BF16. Decoding is exact: four significant bits
//! times a power of two are a BF16 value. Xi et al. 2024 (COAT), arXiv:2410.19313, section 5; the power of two is the E8M0 of OCP's MX specification
//! v1.0.
//!
//! `activation_compressing` fuses this cast with the activation. Backward kernels read both forms directly, through `Exact` and `Compressed` of
//! `common.cuh`.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Result, Tensor};

pub(super) use cpu::smallest_scale_inv;

/// The number of neighbours of a row that share a scale. The last group of a row may be shorter.
const GROUP: usize = 16;

/// An activation `[R, C]` in E4M3, with a power-of-two scale per group of 16 values. A group takes 17 bytes, compared with 32 in BF16.
#[derive(Clone, Debug)]
pub struct CompressedTensor {
    pub(super) codes: Tensor,     /* [R, C] */
    pub(super) scale_inv: Tensor, /* [R, ⌈C / 16⌉] */
    dtype: DType,
}

/// Compresses `x` `[R, C]` (F32, F16 or BF16) to `code = satcast(x / scale_inv)`. `scale_inv` is the smallest power of two, at least 2⁻¹²⁶, for which
/// no code of the group exceeds 448.
///
/// A group with an infinity or a NaN decodes to NaN.
pub fn compress(x: &Tensor) -> Result<CompressedTensor> {
    let mut y = prepare(x)?;
    dispatch! { x.device(),
        cpu => cpu::compress(x, &mut y),
        gpu => cuda::compress(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// Checks `x`, and allocates its compressed tensor.
pub(super) fn prepare(x: &Tensor) -> Result<CompressedTensor> {
    let [rows, columns] = x.dims("compress: x")?;
    x.expect_dtype("compress: x", &[DType::F32, DType::F16, DType::BF16])?;
    Ok(CompressedTensor {
        codes: Tensor::empty(x.device(), &[rows, columns], DType::E4M3)?,
        scale_inv: Tensor::empty(x.device(), &[rows, columns.div_ceil(GROUP)], DType::E8M0)?,
        dtype: x.dtype(),
    })
}

/// Returns `code · scale_inv` in the original type. The result is exact, but a value near the largest F16 may have been rounded up to infinity.
pub fn decompress(x: &CompressedTensor) -> Result<Tensor> {
    let mut y = Tensor::empty(x.codes.device(), x.codes.shape(), x.dtype)?;
    dispatch! { x.codes.device(),
        cpu => cpu::decompress(x, &mut y),
        gpu => cuda::decompress(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// An activation saved for backward.
#[derive(Clone, Debug)]
pub enum SavedActivation {
    /// Uncompressed.
    Exact(Tensor),
    /// Compressed by [`compress()`].
    Compressed(CompressedTensor),
}

impl SavedActivation {
    /// Returns the activation, decompressed if necessary.
    pub fn value(&self) -> Result<Tensor> {
        match self {
            SavedActivation::Exact(x) => Ok(x.clone()),
            SavedActivation::Compressed(x) => decompress(x),
        }
    }

    /// Returns the device of the activation.
    pub fn device(&self) -> &Device {
        self.values_or_codes().device()
    }

    /// Returns the type of the values.
    pub fn dtype(&self) -> DType {
        match self {
            SavedActivation::Exact(x) => x.dtype(),
            SavedActivation::Compressed(x) => x.dtype,
        }
    }

    /// Returns the shape. `what` names op and argument in the error if the activation is not a matrix.
    pub(super) fn dims(&self, what: &str) -> Result<[usize; 2]> {
        self.values_or_codes().dims(what)
    }

    /// Returns the values or codes. Kernels check their alignment.
    pub(super) fn values_or_codes(&self) -> &Tensor {
        match self {
            SavedActivation::Exact(x) => x,
            SavedActivation::Compressed(x) => &x.codes,
        }
    }
}

impl From<&Tensor> for SavedActivation {
    fn from(x: &Tensor) -> SavedActivation {
        SavedActivation::Exact(x.clone())
    }
}

impl From<&SavedActivation> for SavedActivation {
    fn from(x: &SavedActivation) -> SavedActivation {
        x.clone()
    }
}
