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

/// Values in E4M3 after dynamic range expansion: each group of 128 neighbours of a row is mapped to the range of E4M3 by a power, with
/// `value = ±middle · (|code| · step)^(1/power)`. COAT, Xi et al. 2024, arXiv:2410.19313.
///
/// With M the largest and m the smallest nonzero absolute value of the group: `middle = √(M · m)`,
/// `power = ⌊16 · log2(448²/2) / log2(M/m)⌋ / 16`, `step = (M/middle)^power / 448`. This maps M/m to just below 448²/2, the range of the
/// codes. Powers are clamped to 1/16..16, nonzero values to at least 2^-125. A group of zeros has step, power and middle 1.
#[derive(Clone, Debug)]
pub struct ExpandedTensor {
    /// E4M3, `[rows, columns]`.
    pub codes: Tensor,
    /// F32 `[rows, ⌈columns / 128⌉, 3]`: log2 of the step, the power, log2 of the middle. The step is NaN if a value was not finite.
    pub groups: Tensor,
}

impl ExpandedTensor {
    /// Values per group.
    pub const GROUP: usize = 128;

    /// Zeros of `shape`, a matrix.
    pub fn zeros(device: &Device, shape: &[usize], home: MemoryKind) -> Result<ExpandedTensor> {
        let codes = Tensor::zeros_in(device, shape, DType::E4M3, home)?;
        let [rows, columns] = codes.dims("expanded values")?;
        // Code 0 decodes to 0 for any group.
        let groups = Tensor::zeros_in(device, &ExpandedTensor::groups_shape(rows, columns), DType::F32, home)?;
        Ok(ExpandedTensor { codes, groups })
    }

    /// Shape of `groups` for a matrix.
    pub const fn groups_shape(rows: usize, columns: usize) -> [usize; 3] {
        [rows, columns.div_ceil(ExpandedTensor::GROUP), 3]
    }
}
