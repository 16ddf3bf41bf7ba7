//! Tensors that an optimizer keeps in fewer bits than it computes with, and what its bits are multiplied by.

use crate::device::{Device, Home};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Values in F16 or E4M3 with one power of two for all: `value = stored · scale_inv`. FP8-LM, Peng et al. 2023, arXiv:2310.18313.
///
/// The power is the largest that keeps the largest absolute value within the type: `2^⌊log2(largest finite / amax)⌋`; 1 for zeros.
#[derive(Clone, Debug)]
pub struct Scaled {
    /// F16 or E4M3.
    pub values: Tensor,
    /// F32 `[1]`. NaN where the values were not finite.
    pub scale_inv: Tensor,
}

impl Scaled {
    /// Zeros of a shape.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType, home: Home) -> Result<Scaled> {
        Ok(Scaled {
            values: Tensor::zeros_in(device, shape, dtype, home)?,
            scale_inv: Tensor::from_slice(device, &[1], &[1f32])?,
        })
    }
}

/// Values in E4M3 whose range is stretched over that of the format, group by group: 128 neighbours of a row share step, power and middle,
/// and `value = ±middle · (|code| · step)^(1/power)`. COAT, Xi et al. 2024, arXiv:2410.19313.
///
/// With the largest absolute value M of a group and the smallest m that is not zero: `middle = √(M · m)`,
/// `power = ⌊16 · log2(448²/2) / log2(M/m)⌋ / 16`, `step = (M/middle)^power / 448`. So the ratio of M to m becomes just below
/// 448²/2, which the codes span, whatever it was. Powers lie from 1/16 to 16, values that are not zero count as at least 2^-125. A group
/// of zeros has 1, 1, 1.
#[derive(Clone, Debug)]
pub struct Expanded {
    /// E4M3, `[rows, columns]`.
    pub codes: Tensor,
    /// F32 `[rows, ⌈columns / 128⌉, 3]`: log2 of the step, the power, log2 of the middle. The step is NaN where a value was not finite.
    pub groups: Tensor,
}

impl Expanded {
    /// Values that share one group.
    pub const GROUP: usize = 128;

    /// Zeros of the shape of a matrix.
    pub fn zeros(device: &Device, shape: &[usize], home: Home) -> Result<Expanded> {
        let codes = Tensor::zeros_in(device, shape, DType::E4M3, home)?;
        let [rows, columns] = codes.dims("expanded values")?;
        // Whatever the curve, a code of zero is zero.
        let groups = Tensor::zeros_in(device, &Expanded::groups_shape(rows, columns), DType::F32, home)?;
        Ok(Expanded { codes, groups })
    }

    /// Shape of the groups of a matrix.
    pub const fn groups_shape(rows: usize, columns: usize) -> [usize; 3] {
        [rows, columns.div_ceil(Expanded::GROUP), 3]
    }
}
