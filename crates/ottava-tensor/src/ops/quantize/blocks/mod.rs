//! FP8 quantization with a scale per row or per block, each from its own values.

pub(in crate::ops) mod cpu;
#[cfg(test)]
mod tests;

use super::{CastStatistics, Copies, CurrentScaling};
use crate::granularity::Granularity;
use crate::ops::destination::{CastScale, Fp8Output};
use crate::quantized::QuantizedTensor;
use crate::{DType, Result, Tensor};

/// Casts `x` `[R, C]` (F32, F16 or BF16) to FP8 by scales that its rows or blocks give themselves: `scale = largest finite of format
/// / amax`, `code = satcast(float(x) · scale)`, `scale_inv = 1 / scale`.
///
/// A row or block with an amax of 0 or infinity has scale 1; a quotient beyond binary32 becomes the largest finite value of the type
/// of `x`. With blocks of 1x128, and with rows, the transposed copy is a cast of its own, whose blocks run along the rows of `x`; with
/// blocks of 128x128 it is made of the codes. Scales of MX are always rounded down to powers of two, so that their inverses are E8M0.
/// Measures into entry `slot` of `statistics` what the copy of the rows lost, or the other where that is the only one.
///
/// Errors with [`Error::Value`](crate::Error::Value) for [`Granularity::PerTensor`], which [`quantize`](crate::ops::quantize()) casts by a given scale. Source:
/// Transformer Engine, `common/recipe/recipe_common.cuh` and `common/transpose/quantize_transpose_*_blockwise.cu`.
pub fn quantize_blocks(
    x: &Tensor,
    format: DType,
    granularity: Granularity,
    how: CurrentScaling,
    copies: Copies,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<QuantizedTensor> {
    Fp8Output { format, scale: CastScale::Own(granularity, how), copies, statistics, slot }.cast(x)
}

/// What a quotient beyond binary32 becomes: the largest finite value of the type that is cast.
pub(in crate::ops) fn bound(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::MAX.to_f32(),
        other => other.max_finite().unwrap_or(f32::MAX),
    }
}
