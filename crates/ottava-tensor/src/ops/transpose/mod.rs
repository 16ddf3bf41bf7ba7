//! Transposes matrices of any element type, and FP8 codes.

pub(super) mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::granularity::Granularity;
use crate::ops::dispatch::dispatch;
use crate::quantized::QuantizedTensor;
use crate::{Error, Result, Tensor};

/// Returns `y[c, r] = x[r, c]` for `x` `[R, C]`. Bytes are moved, so the result is exact for every type.
pub fn transpose(x: &Tensor) -> Result<Tensor> {
    let [rows, columns] = x.dims("transpose: x")?;
    let mut y = Tensor::empty(x.device(), &[columns, rows], x.dtype())?;
    dispatch! { x.device(),
        cpu => cpu::transpose(x, &mut y),
        gpu => cuda::transpose(gpu, x, &mut y)?,
    }
    Ok(y)
}

/// Returns only the transposed copy, computed from the codes and all scales of `quantized`. It equals the transposed copy that a cast of the values
/// writes.
///
/// Errors with [`Error::Value`] if the transposed copy has other codes ([`Granularity::shares_codes`]), if there are no codes, or if the scales of
/// the transposed copy are missing.
pub fn transpose_codes(quantized: &QuantizedTensor) -> Result<QuantizedTensor> {
    let QuantizedTensor { granularity, rows, columns, .. } = *quantized;
    let has_scales = granularity == Granularity::PerTensor || quantized.transposed_scale_inv.is_some();
    let own = quantized.codes.as_ref().filter(|_| has_scales && granularity.shares_codes(rows, columns));
    let own = own.ok_or_else(|| {
        Error::Value(format!(
            "transpose_codes: the transposed copy of a [{rows}, {columns}] matrix with {granularity} scales has other codes, or no scales"
        ))
    })?;
    let transposed = Some(transpose(own)?);
    Ok(QuantizedTensor { codes: None, transposed, ..quantized.clone() }.only_transposed())
}
