//! Root-mean-square normalisation. Zhang and Sennrich 2019, arXiv:1910.07467.

pub(super) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::destination::{Output, Produced};
use super::{SavedActivation, expect_compute, expect_gradient, quantize, real_type};
use crate::cuda::CudaDevice;
use crate::{Device, Granularity, Result, Tensor};

pub(crate) use cuda::{FP8_SOURCE, SOURCE};

/// Normalises each row: `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`.
///
/// `x` `[T, C]`, `weight` `[C]`, both of one type; returns `y` like `x` and `rstd` `[T]` in F32 (F64 for F64), which backward needs.
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (y, rstd) = rmsnorm_to(x, weight, eps, Output::Plain)?;
    Ok((y.plain().expect("a plain output gives a plain value"), rstd))
}

/// [`rmsnorm`] with its `y` written to `output`.
pub fn rmsnorm_to(x: &Tensor, weight: &Tensor, eps: f64, output: Output) -> Result<(Produced, Tensor)> {
    let mut rstd = prepare(x, weight)?;
    let y = match x.device() {
        Device::Cpu | Device::DryCpu(_) => {
            let mut y = x.empty_like()?;
            if let Device::Cpu = x.device() {
                cpu::rmsnorm(x, weight, eps, &mut y, &mut rstd);
            }
            output.apply(y)?
        }
        Device::Cuda(gpu) => on_gpu(gpu, x, weight, eps, &mut rstd, output)?,
    };
    Ok((y, rstd))
}

/// Checks the arguments, and allocates `rstd`.
fn prepare(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [tokens, channels] = x.dims("rmsnorm: x")?;
    expect_compute("rmsnorm: x", x)?;
    weight.expect("rmsnorm: weight", &[channels])?;
    weight.expect_dtype("rmsnorm: weight", &[x.dtype()])?;
    weight.expect_device("rmsnorm: weight", x.device())?;
    Tensor::empty(x.device(), &[tokens], real_type(x.dtype()))
}

fn on_gpu(
    gpu: &CudaDevice,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    rstd: &mut Tensor,
    output: Output,
) -> Result<Produced> {
    let mut to = match output {
        Output::Plain => {
            let mut y = x.empty_like()?;
            cuda::rmsnorm(gpu, x, weight, eps, Some(&mut y), rstd, None)?;
            return Ok(Produced::Plain(y));
        }
        Output::Amax { amax } => {
            quantize::expect_amax(amax, x.device())?;
            if cuda::fits_registers(x, weight) {
                cuda::rmsnorm_amax(gpu, x, weight, eps, rstd, amax)?;
            } else {
                cuda::rmsnorm(gpu, x, weight, eps, None, rstd, Some(amax))?;
            }
            return Ok(Produced::Measured);
        }
        Output::Fp8(to) => to,
    };
    let [rows, columns] = x.dims("rmsnorm: x")?;
    let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
    if to.granularity() == Granularity::PerTensor && cuda::fits_strips(gpu, x, weight) {
        cuda::rmsnorm_strips(gpu, x, weight, eps, rstd, &mut quantized, &mut to)?;
        return Ok(Produced::Fp8(quantized));
    }
    // A transpose needs tiles of many rows, and rstd needs whole rows, so rstd is computed first.
    cuda::rmsnorm_codes(gpu, x, weight, eps, rstd, &mut quantized, &mut to)?;
    Ok(Produced::Fp8(quantized))
}

/// Operations fused with [`rmsnorm_backward`].
#[derive(Debug, Default)]
pub struct RmsnormBackward<'a> {
    /// The gradient of the residual connection, added to `dx` as by [`add`](super::add()).
    pub dresidual: Option<&'a Tensor>,
    /// F32 `[1]`, raised to the amax of the result, for its cast.
    pub amax: Option<&'a mut Tensor>,
}

/// Gradient of [`rmsnorm`]: with `g = dy · weight` and `n = x · rstd`, `dx = rstd · (g - n · mean(g · n))`; `dweight += Σ_t dy · n`.
///
/// `dweight` `[C]` is F32 (F64 for F64) and is added to. Returns `dx` like `x`, or `dresidual + dx`. A compressed `x` is
/// decompressed while reading.
pub fn rmsnorm_backward(
    dy: &Tensor,
    x: impl Into<SavedActivation>,
    weight: &Tensor,
    rstd: &Tensor,
    dweight: &mut Tensor,
    options: RmsnormBackward,
) -> Result<Tensor> {
    let x = &x.into();
    let [tokens, channels] = x.dims("rmsnorm_backward: x")?;
    dy.expect("rmsnorm_backward: dy", &[tokens, channels])?;
    expect_compute("rmsnorm_backward: dy", dy)?;
    dy.expect_dtype("rmsnorm_backward: dy", &[x.dtype()])?;
    weight.expect("rmsnorm_backward: weight", &[channels])?;
    weight.expect_dtype("rmsnorm_backward: weight", &[x.dtype()])?;
    rstd.expect("rmsnorm_backward: rstd", &[tokens])?;
    rstd.expect_dtype("rmsnorm_backward: rstd", &[real_type(x.dtype())])?;
    dweight.expect("rmsnorm_backward: dweight", &[channels])?;
    expect_gradient("rmsnorm_backward: dweight", dweight, dy)?;
    let RmsnormBackward { dresidual, amax } = options;
    if let Some(dresidual) = dresidual {
        dresidual.expect("rmsnorm_backward: dresidual", dy.shape())?;
        dresidual.expect_dtype("rmsnorm_backward: dresidual", &[x.dtype()])?;
        dresidual.expect_device("rmsnorm_backward: dresidual", x.device())?;
    }
    if let Some(amax) = &amax {
        quantize::expect_amax(amax, x.device())?;
    }
    let mut dx = dy.empty_like()?;
    match x.device() {
        Device::Cpu | Device::DryCpu(_) => {
            let value = x.value()?;
            if let Device::Cpu = x.device() {
                cpu::rmsnorm_backward(dy, &value, weight, rstd, &mut dx, dweight);
            }
            drop(value);
            if let Some(dresidual) = dresidual {
                dx = super::add(dresidual, &dx)?;
            }
            if let Some(amax) = amax {
                quantize::raise_amax(&dx, amax)?;
            }
        }
        Device::Cuda(gpu) => {
            let from = cuda::Backward { dy, x, weight, rstd, residual: dresidual };
            cuda::rmsnorm_backward(gpu, from, &mut dx, dweight, amax)?;
        }
    }
    Ok(dx)
}
