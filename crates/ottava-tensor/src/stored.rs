//! Optimizer tensors stored in 8 or 16 bits with scales.

use crate::device::{Device, MemoryKind};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Values in F16 or E4M3 with one power-of-two scale: `value = stored · scale_inv`. FP8-LM, Peng et al. 2023, arXiv:2310.18313.
///
/// The scale is the largest power of two that does not overflow the type: `2^⌊log2(largest finite / amax)⌋`; 1 if all values are 0.
#[derive(Clone, Debug)]
pub struct ScaledTensor {
    /// F16 or E4M3.
    pub values: Tensor,
    /// F32 `[1]`; NaN if a value was not finite.
    pub scale_inv: Tensor,
}

impl ScaledTensor {
    /// Zeros of `shape`.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType, home: MemoryKind) -> Result<ScaledTensor> {
        Ok(ScaledTensor {
            values: Tensor::zeros_in(device, shape, dtype, home)?,
            scale_inv: Tensor::from_slice(device, &[1], &[1f32])?,
        })
    }
}

/// Values in eight bits with a range of their own for each group of 128 neighbours of a row, after COAT's dynamic range expansion (Xi et al.
/// 2024, arXiv:2410.19313).
///
/// Code 0 is zero. Codes 1 to 127 divide the range from the smallest nonzero magnitude of the group to the largest into equal parts on the
/// scale of the bits of F32, a logarithm that is linear between powers of two: the bits of `|value|` are
/// `smallest + (code − 1) · step` with `step = ⌈(largest − smallest) / 126⌉`, at least 1. Magnitudes below 2^-120 become zero or the smallest.
/// COAT raises values to a power and rounds to E4M3, whose codes are spaced in the same way; its power needs a logarithm and an exponential per
/// value and leaves most of the eight smallest codes unused.
#[derive(Clone, Debug)]
pub struct ExpandedTensor {
    /// U8, `[rows, columns]`: the sign in the highest bit, and the code.
    pub codes: Tensor,
    /// I32 `[rows, ⌈columns / 128⌉, 2]`: the bits of the smallest magnitude, and the step. The smallest is NaN and the step 0 if a value was not
    /// finite; then all values are NaN.
    pub groups: Tensor,
}

impl ExpandedTensor {
    /// Values per group.
    pub const GROUP: usize = 128;

    /// Zeros of `shape`, a matrix.
    pub fn zeros(device: &Device, shape: &[usize], home: MemoryKind) -> Result<ExpandedTensor> {
        let codes = Tensor::zeros_in(device, shape, DType::U8, home)?;
        let [rows, columns] = codes.dims("expanded values")?;
        // Code 0 decodes to 0 for any group.
        let groups = Tensor::zeros_in(device, &ExpandedTensor::groups_shape(rows, columns), DType::I32, home)?;
        Ok(ExpandedTensor { codes, groups })
    }

    /// Shape of `groups` for a matrix.
    pub const fn groups_shape(rows: usize, columns: usize) -> [usize; 3] {
        [rows, columns.div_ceil(ExpandedTensor::GROUP), 2]
    }
}
