//! Optimizer tensors stored in 8 or 16 bits with scales.

use crate::device::{Device, MemoryKind};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Values in F16 or E4M3 with one power-of-two scale: `value = stored · scale_inv`. FP8-LM, Peng et al. 2023, arXiv:2310.18313.
///
/// The scale is the largest power of two that does not overflow the type: `2^⌊log2(largest finite / amax)⌋`. It is 1 if all values are 0.
#[derive(Clone, Debug)]
pub struct ScaledTensor {
    /// The values in F16 or E4M3, times the scale.
    pub values: Tensor,
    /// The inverse scale, F32 `[1]`. It is NaN if a value was not finite.
    pub scale_inv: Tensor,
}

impl ScaledTensor {
    /// Returns zeros of `shape`.
    pub fn zeros(device: &Device, shape: &[usize], dtype: DType, home: MemoryKind) -> Result<ScaledTensor> {
        Ok(ScaledTensor {
            values: Tensor::zeros_in(device, shape, dtype, home)?,
            scale_inv: Tensor::from_slice(device, &[1], &[1f32])?,
        })
    }
}

/// A matrix in four bits, in blocks of 64 neighbours: `value = code · amax of the block`. NF4 of QLoRA (Dettmers et al. 2023, arXiv:2305.14314), with the
/// amaxes of blocks quantized too.
#[derive(Clone, Debug)]
pub struct Nf4Tensor {
    /// The numbers of rows and columns.
    pub shape: [usize; 2],
    /// The codes, U8 `[⌈elements / 2⌉]`. The first element of a pair has the high bits.
    pub codes: Tensor,
    /// The codes of the amaxes of blocks, U8 `[⌈elements / 64⌉]`.
    pub scales: Tensor,
    /// The amax of each group of 256 scales, F32.
    pub groups: Tensor,
    /// The values of the 16 codes and of the 256 scales, F32 `[272]`.
    pub levels: Tensor,
    /// The mean of the amaxes, which is subtracted before they are quantized.
    pub mean: f32,
}

impl Nf4Tensor {
    /// The number of elements that share an amax.
    pub const BLOCK: usize = 64;
    /// The number of amaxes that share an amax.
    pub const GROUP: usize = 256;
}

/// Values in eight bits, where each group of 128 neighbours of a row has its own range. It follows COAT's dynamic range expansion (Xi et al.
/// 2024, arXiv:2410.19313).
///
/// Code 0 is zero. Codes 1 to 127 divide the range from the smallest nonzero magnitude of the group to the largest into equal parts, on the
/// scale of F32 bit patterns. (This scale is a logarithm that is linear between powers of two.) The bits of `|value|` are
/// `smallest + (code − 1) · step` with `step = ⌈(largest − smallest) / 126⌉`, at least 1. Magnitudes below 2^-120 become zero or the smallest
/// magnitude. COAT raises values to a power and rounds to E4M3, whose codes are spaced in the same way. Its power needs a logarithm and an
/// exponential per value, and leaves most of the eight smallest codes unused.
#[derive(Clone, Debug)]
pub struct ExpandedTensor {
    /// The codes, U8 `[rows, columns]`. The highest bit is the sign.
    pub codes: Tensor,
    /// The bits of the smallest magnitude, and the step: I32 `[rows, ⌈columns / 128⌉, 2]`. If a value was not finite, the smallest magnitude is NaN
    /// and the step is 0, so all values are NaN.
    pub groups: Tensor,
}

impl ExpandedTensor {
    /// The number of values per group.
    pub const GROUP: usize = 128;

    /// Returns zeros of `shape`, which must be the shape of a matrix.
    pub fn zeros(device: &Device, shape: &[usize], home: MemoryKind) -> Result<ExpandedTensor> {
        let codes = Tensor::zeros_in(device, shape, DType::U8, home)?;
        let [rows, columns] = codes.dims("expanded values")?;
        // Code 0 decodes to 0 with any group.
        let groups = Tensor::zeros_in(device, &ExpandedTensor::groups_shape(rows, columns), DType::I32, home)?;
        Ok(ExpandedTensor { codes, groups })
    }

    /// Returns the shape of `groups` for a matrix.
    pub const fn groups_shape(rows: usize, columns: usize) -> [usize; 3] {
        [rows, columns.div_ceil(ExpandedTensor::GROUP), 2]
    }
}
