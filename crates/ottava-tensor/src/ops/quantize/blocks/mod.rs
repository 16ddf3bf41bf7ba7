//! FP8 quantization with current scaling per row or per block.

pub(in crate::ops) mod cpu;
#[cfg(test)]
mod tests;

use super::{CastStatistics, CodeCopies, CurrentScaling};
use crate::granularity::Granularity;
use crate::ops::destination::{CastScale, Fp8Output};
use crate::quantized::QuantizedTensor;
use crate::{DType, Result, Tensor};

/// Casts `x` `[R, C]` (F32, F16 or BF16) to FP8 with a scale per row or block: `scale = largest finite of format / amax`,
/// `code = satcast(float(x) · scale)`, `scale_inv = 1 / scale`.
///
/// A row or block with an amax of 0 or infinity has scale 1. A quotient that overflows F32 becomes the largest finite value of the type
/// of `x`. With per-row scales and 1x128 blocks, the transposed copy is a separate cast with blocks along the rows of `x`. With 128x128
/// blocks, it has the same codes. Scales of [`Microscaling`](crate::Microscaling) formats are computed as `ops/microscaling/` says. Updates entry
/// `slot` of `statistics` with the losses of `codes`. If `transposed` is the only copy, its losses are counted.
///
/// Errors with [`Error::Value`](crate::Error::Value) for [`Granularity::PerTensor`], which needs a given scale
/// ([`quantize`](crate::ops::quantize())).
/// Source: Transformer Engine, `common/recipe/recipe_common.cuh` and `common/transpose/quantize_transpose_*_blockwise.cu`.
pub fn quantize_blocks(
    x: &Tensor,
    format: DType,
    granularity: Granularity,
    how: CurrentScaling,
    copies: CodeCopies,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<QuantizedTensor> {
    Fp8Output { format, scale: CastScale::Own(granularity, how), copies, statistics, slot }.cast(x)
}

/// Returns the value of a scale that overflows F32: the largest finite value of the type that is cast.
pub(in crate::ops) fn bound(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::MAX.to_f32(),
        other => other.max_finite().unwrap_or(f32::MAX),
    }
}
