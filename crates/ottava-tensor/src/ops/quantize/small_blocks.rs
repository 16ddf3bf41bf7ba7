//! Casts to the formats with small blocks, by the ops of `ops/microscaling/`.

use super::amax;
use crate::granularity::{Levels, Microscaling};
use crate::ops::destination::{CastStatistics, Fp8Output};
use crate::ops::microscaling::{Hadamard, cast, hadamard};
use crate::ops::transpose;
use crate::quantized::QuantizedTensor;
use crate::{Result, Tensor};

/// Casts `x` into the existing copies of `out`.
pub(super) fn cast_into(x: &Tensor, how: Microscaling, out: &mut QuantizedTensor, to: &mut Fp8Output) -> Result<()> {
    if x.is_empty() {
        return Ok(());
    }
    let QuantizedTensor { codes, transposed, scale_inv, transposed_scale_inv, .. } = out;
    let mut statistics = Some((&mut *to.statistics, to.slot));
    if let Some(codes) = codes {
        cast_rows(x, how, codes, scale_inv, statistics.take())?;
    }
    if let Some(codes) = transposed {
        let scale_inv = transposed_scale_inv.as_deref_mut().unwrap_or(scale_inv);
        let mut turned = transpose(x)?;
        if how.rotates_columns {
            turned = hadamard(&turned, Hadamard::Forward)?;
        }
        cast_rows(&turned, how, codes, scale_inv, statistics)?;
    }
    Ok(())
}

/// Casts the rows of `x` in blocks along the columns.
fn cast_rows(
    x: &Tensor,
    how: Microscaling,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
    statistics: Option<(&mut CastStatistics, usize)>,
) -> Result<()> {
    let largest = match how.levels {
        Levels::One => None,
        Levels::Two => Some(amax(x)?),
    };
    cast(x, how, largest.as_ref(), codes, scale_inv, statistics)
}
