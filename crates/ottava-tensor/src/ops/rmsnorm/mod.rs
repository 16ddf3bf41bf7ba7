//! Normalisation of rows: RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016, arXiv:1607.06450).

pub(super) mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::destination::{Output, Produced};
use super::{SavedActivation, expect_compute, expect_gradient, quantize, real_type};
use crate::cuda::CudaDevice;
use crate::element::Real;
use crate::{Device, Error, Granularity, Result, Tensor};

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm. Its statistics are `rstd` `[T]`.
    Rms,
    /// RMSNorm with the factor `1 + weight`, for weights that are initially 0, as in Gemma: Gemma Team 2024, arXiv:2403.08295.
    RmsPlusOne,
    /// LayerNorm. Its statistics are `[2, T]`: `rstd`, then the means.
    Layer,
}

impl NormKind {
    /// Returns the shape of the statistics of `tokens` rows.
    fn statistics(self, tokens: usize) -> Vec<usize> {
        match self {
            NormKind::Rms | NormKind::RmsPlusOne => vec![tokens],
            NormKind::Layer => vec![2, tokens],
        }
    }

    /// Returns the factor of normalised values.
    pub(super) fn gain<R: Real>(self, weight: R) -> R {
        match self {
            NormKind::Rms | NormKind::Layer => weight,
            NormKind::RmsPlusOne => R::of(1.0) + weight,
        }
    }
}

/// A norm with its parameters.
#[derive(Clone, Copy, Debug)]
pub struct NormWeights<'a> {
    /// The kind of the norm.
    pub kind: NormKind,
    /// The weight, `[C]`.
    pub weight: &'a Tensor,
    /// The bias, `[C]`, if the norm is a LayerNorm with a bias.
    pub bias: Option<&'a Tensor>,
}

impl<'a> NormWeights<'a> {
    /// Returns an RMSNorm with this weight.
    pub fn rms(weight: &'a Tensor) -> NormWeights<'a> {
        NormWeights { kind: NormKind::Rms, weight, bias: None }
    }
}

/// Normalises each row: `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`.
///
/// `x` `[T, C]` and `weight` `[C]` have the same type. Returns `y` with the shape and type of `x`, and `rstd` `[T]` in F32 (F64 for F64), which
/// backward needs.
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (y, rstd) = rmsnorm_to(x, weight, eps, Output::Plain)?;
    Ok((y.plain().expect("a plain output gives a plain value"), rstd))
}

/// Computes [`rmsnorm`] and writes its `y` to `output`.
pub fn rmsnorm_to(x: &Tensor, weight: &Tensor, eps: f64, output: Output) -> Result<(Produced, Tensor)> {
    norm_to(x, NormWeights::rms(weight), eps, output)
}

/// Computes [`rmsnorm_to`], or LayerNorm over each row: `y = (x - mean) · rstd · weight + bias`, `rstd = 1 / sqrt(variance + eps)`. With
/// [`NormKind::RmsPlusOne`], `1 + weight` replaces the weight; the sum is F32.
///
/// The bias has the shape and type of the weight. Returns `y` and the statistics of [`NormKind`]. Errors if an RMSNorm has a bias.
pub fn norm_to(x: &Tensor, weights: NormWeights, eps: f64, output: Output) -> Result<(Produced, Tensor)> {
    let mut statistics = prepare(x, weights)?;
    let y = match x.device() {
        Device::Cuda(gpu) => on_gpu(gpu, x, weights, eps, &mut statistics, output)?,
        cpu => {
            let mut y = x.empty_like()?;
            cpu.on_cpu(|| cpu::norm(x, weights, eps, &mut y, &mut statistics));
            output.apply(y)?
        }
    };
    Ok((y, statistics))
}

/// Checks the arguments, and allocates the statistics.
fn prepare(x: &Tensor, weights: NormWeights) -> Result<Tensor> {
    let NormWeights { kind, weight, bias } = weights;
    let [tokens, channels] = x.dims("norm: x")?;
    expect_compute("norm: x", x)?;
    for (what, parameter) in [("norm: weight", Some(weight)), ("norm: bias", bias)] {
        let Some(parameter) = parameter else { continue };
        parameter.expect(what, &[channels])?;
        parameter.expect_dtype(what, &[x.dtype()])?;
        parameter.expect_device(what, x.device())?;
    }
    if kind != NormKind::Layer && bias.is_some() {
        return Err(Error::Value("norm: an RMSNorm has no bias".into()));
    }
    Tensor::empty(x.device(), &kind.statistics(tokens), real_type(x.dtype()))
}

fn on_gpu(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    rstd: &mut Tensor,
    output: Output,
) -> Result<Produced> {
    let mut to = match output {
        Output::Plain => {
            let mut y = x.empty_like()?;
            cuda::rmsnorm(gpu, x, weights, eps, Some(&mut y), rstd, None)?;
            return Ok(Produced::Plain(y));
        }
        Output::Amax { amax } => {
            quantize::expect_amax(amax, x.device())?;
            if cuda::fits_registers(x, weights) {
                cuda::rmsnorm_amax(gpu, x, weights, eps, rstd, amax)?;
            } else {
                cuda::rmsnorm(gpu, x, weights, eps, None, rstd, Some(amax))?;
            }
            return Ok(Produced::Measured);
        }
        Output::Fp8(to) => to,
    };
    let [rows, columns] = x.dims("norm: x")?;
    let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
    if to.granularity() == Granularity::PerTensor && cuda::fits_strips(gpu, x, weights) {
        cuda::rmsnorm_strips(gpu, x, weights, eps, rstd, &mut quantized, &mut to)?;
        return Ok(Produced::Fp8(quantized));
    }
    // A transpose needs tiles of many rows, and statistics need whole rows. So statistics are computed first.
    cuda::rmsnorm_codes(gpu, x, weights, eps, rstd, &mut quantized, &mut to)?;
    Ok(Produced::Fp8(quantized))
}

/// Operations that are fused with [`norm_backward`].
#[derive(Debug, Default)]
pub struct NormBackward<'a> {
    /// The gradient of the bias, `[C]`, to which the op adds.
    pub dbias: Option<&'a mut Tensor>,
    /// The gradient of the residual connection, which is added to `dx` as by [`add`](super::add()).
    pub dresidual: Option<&'a Tensor>,
    /// An amax, F32 `[1]`, which is raised to the amax of the result, for the cast of the result.
    pub amax: Option<&'a mut Tensor>,
}

/// Computes the gradient of [`norm_to`] with the same `weights`, from its statistics: with `g = dy · weight` and `n = x · rstd`,
/// `dx = rstd · (g - n · mean(g · n))` and `dweight += Σ_t dy · n`. For a LayerNorm, `n = (x - mean) · rstd`,
/// `dx = rstd · (g - n · mean(g · n) - mean(g))`, and `dbias += Σ_t dy`.
///
/// `dweight` `[C]` is F32 (F64 for F64), and the op adds to it. Returns `dx`, or `dresidual + dx`, with the shape and type of `x`. A compressed `x`
/// is decompressed while reading.
pub fn norm_backward(
    dy: &Tensor,
    x: impl Into<SavedActivation>,
    weights: NormWeights,
    statistics: &Tensor,
    dweight: &mut Tensor,
    options: NormBackward,
) -> Result<Tensor> {
    let x = &x.into();
    let [tokens, channels] = x.dims("norm_backward: x")?;
    let NormWeights { kind, weight, .. } = weights;
    dy.expect("norm_backward: dy", &[tokens, channels])?;
    expect_compute("norm_backward: dy", dy)?;
    dy.expect_dtype("norm_backward: dy", &[x.dtype()])?;
    weight.expect("norm_backward: weight", &[channels])?;
    weight.expect_dtype("norm_backward: weight", &[x.dtype()])?;
    statistics.expect("norm_backward: statistics", &kind.statistics(tokens))?;
    statistics.expect_dtype("norm_backward: statistics", &[real_type(x.dtype())])?;
    let NormBackward { dbias, dresidual, amax } = options;
    for (what, gradient) in [("norm_backward: dweight", Some(&*dweight)), ("norm_backward: dbias", dbias.as_deref())] {
        let Some(gradient) = gradient else { continue };
        gradient.expect(what, &[channels])?;
        expect_gradient(what, gradient, dy)?;
    }
    if kind != NormKind::Layer && dbias.is_some() {
        return Err(Error::Value("norm_backward: an RMSNorm has no bias".into()));
    }
    if let Some(dresidual) = dresidual {
        dresidual.expect("norm_backward: dresidual", dy.shape())?;
        dresidual.expect_dtype("norm_backward: dresidual", &[x.dtype()])?;
        dresidual.expect_device("norm_backward: dresidual", x.device())?;
    }
    if let Some(amax) = &amax {
        quantize::expect_amax(amax, x.device())?;
    }
    let mut dx = dy.empty_like()?;
    match x.device() {
        Device::Cuda(gpu) => {
            let from = cuda::Backward { dy, x, weights, statistics, residual: dresidual };
            cuda::norm_backward(gpu, from, &mut dx, dweight, dbias, amax)?;
        }
        cpu => {
            let value = x.value()?;
            cpu.on_cpu(|| cpu::norm_backward(dy, &value, weights, statistics, &mut dx, dweight, dbias));
            drop(value);
            if let Some(dresidual) = dresidual {
                dx = super::add(dresidual, &dx)?;
            }
            if let Some(amax) = amax {
                quantize::raise_amax(&dx, amax)?;
            }
        }
    }
    Ok(dx)
}
