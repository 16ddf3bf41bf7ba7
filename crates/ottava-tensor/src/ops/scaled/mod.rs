//! Storage formats of weights and gradients: F16 or E4M3 with a power-of-two scale ([`ScaledTensor`]), or split into two halves.

pub(super) mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::destination::Fp8Output;
use super::quantize::{self, amax};
use super::real_type;
use crate::ops::dispatch::dispatch;
use crate::stored::ScaledTensor;
use crate::{DType, Device, QuantizedTensor, Result, Tensor};

/// The types of stored values.
pub(super) const STORED: &[DType] = &[DType::F16, DType::E4M3];

/// Rounds `x` (F32 or BF16) to `dtype` (F16 or E4M3) with a power-of-two scale from its amax. If an element is not finite, this element or the whole
/// tensor becomes NaN.
pub fn scaled(x: &Tensor, dtype: DType) -> Result<ScaledTensor> {
    scaled_by(x, &amax(x)?, dtype)
}

/// Rounds `x` as [`scaled`], with the scale of the given `amax`, F32 `[1]`: the amax of a whole tensor. `x` is a part of the tensor, and may be
/// empty.
pub fn scaled_by(x: &Tensor, amax: &Tensor, dtype: DType) -> Result<ScaledTensor> {
    x.expect_dtype("scaled: x", &[DType::F32, DType::BF16])?;
    let mut out = ScaledTensor {
        values: Tensor::empty(x.device(), x.shape(), dtype)?,
        scale_inv: Tensor::empty(x.device(), &[1], DType::F32)?,
    };
    out.values.expect_dtype("scaled: type", STORED)?;
    dispatch! { x.device(),
        cpu => cpu::scaled(x, amax, &mut out),
        gpu => cuda::scaled(gpu, x, amax, &mut out)?,
    }
    Ok(out)
}

/// Returns the values in `dtype` (F32, BF16 or F16), each rounded once.
pub fn unscaled(x: &ScaledTensor, dtype: DType) -> Result<Tensor> {
    let mut y = Tensor::empty(x.values.device(), x.values.shape(), dtype)?;
    y.expect_dtype("unscaled: type", &[real_type(dtype), DType::BF16, DType::F16])?;
    dispatch! { y.device().clone(),
        cpu => cpu::unscaled(x, &mut y),
        gpu => cuda::unscaled(&gpu, x, &mut y)?,
    }
    Ok(y)
}

impl Fp8Output<'_> {
    /// Rounds the values of a scaled F16 matrix to `dtype` as [`unscaled`] does, and casts them.
    pub fn cast_scaled(mut self, x: &ScaledTensor, dtype: DType) -> Result<QuantizedTensor> {
        x.values.expect_dtype("quantize: x", &[DType::F16])?;
        let Device::Cuda(gpu) = x.values.device() else { return self.cast(&unscaled(x, dtype)?) };
        let [rows, columns] = x.values.dims("quantize: x")?;
        if quantize::expect_output(&self, x.values.device())?.microscaling().is_some() {
            // Casts to small blocks read plain values.
            return self.cast(&unscaled(x, dtype)?);
        }
        let mut quantized = quantize::prepare(&self, x.values.device(), rows, columns)?;
        quantize::quantize_scaled(gpu, x, dtype, &mut quantized, &mut self)?;
        Ok(quantized)
    }
}

/// Splits F32 values into the nearest BF16 (ties away from zero) and an I16 remainder. The remainder is added to the bits of the BF16 value as an
/// F32.
pub fn split(x: &Tensor) -> Result<(Tensor, Tensor)> {
    x.expect_dtype("split: x", &[DType::F32])?;
    let mut upper = Tensor::empty(x.device(), x.shape(), DType::BF16)?;
    let mut rest = Tensor::empty(x.device(), x.shape(), DType::I16)?;
    dispatch! { x.device(),
        cpu => cpu::split(x, &mut upper, &mut rest),
        gpu => cuda::split(gpu, x, &mut upper, &mut rest)?,
    }
    Ok((upper, rest))
}
