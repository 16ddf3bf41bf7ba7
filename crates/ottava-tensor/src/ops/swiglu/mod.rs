//! Activations of MLPs: SwiGLU `silu(gate) · up`, GeGLU `gelu(gate) · up` (Shazeer 2020, arXiv:2002.05202), GELU without a gate (Hendrycks
//! and Gimpel 2016, arXiv:1606.08415), and the clamped SwiGLU of gpt-oss (OpenAI 2025, arXiv:2508.10925).

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::compress::{self, CompressedTensor, SavedActivation, compress};
use super::destination::{Fp8Output, Output, Produced};
use super::gemm::{self, Accumulation, Operand, gemm_nt};
use super::{expect_compute, quantize, real_type};
use crate::{DType, Device, Error, QuantizedTensor, Result, Tensor};

/// What an MLP computes between its linears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) · up`, `silu(g) = g / (1 + e^-g)`.
    SwiGlu,
    /// `(u + 1) · g · sigmoid(1.702 · g)` with `g = min(gate, 7)` and `u = max(min(up, 7), -7)`. The gradient passes a bound that is reached.
    ClampedSwiGlu,
    /// `gelu(gate) · up`.
    GeGlu(Gelu),
    /// `gelu(x)`.
    Gelu(Gelu),
}

/// `gelu(x) = x · Φ(x)` with the normal distribution `Φ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `Φ(x) = (1 + erf(x / √2)) / 2`.
    Exact,
    /// `Φ(x) ≈ (1 + tanh(u)) / 2 = sigmoid(2u)`, `u = √(2/π) · (x + 0.044715 · x³)`.
    Tanh,
}

impl Activation {
    /// The factor in the sigmoid of [`Activation::ClampedSwiGlu`].
    pub const CLAMPED_FACTOR: f64 = 1.702;
    /// The bound of gates and ups in [`Activation::ClampedSwiGlu`].
    pub const CLAMPED_LIMIT: f64 = 7.0;

    /// Input elements per output element: gate and up, or one.
    pub const fn inputs(self) -> usize {
        match self {
            Activation::SwiGlu | Activation::ClampedSwiGlu | Activation::GeGlu(_) => 2,
            Activation::Gelu(_) => 1,
        }
    }

    /// The shape `[T, F]` of the output for the shape of the input.
    fn shape(self, [tokens, width]: [usize; 2]) -> Result<[usize; 2]> {
        match width.is_multiple_of(self.inputs()) {
            true => Ok([tokens, width / self.inputs()]),
            false => Err(Error::Shape {
                what: "activation: x".into(),
                expected: "an even width".into(),
                got: vec![tokens, width],
            }),
        }
    }
}

/// The activation `[T, F]` of `x` `[T, 2F]`, whose rows hold `F` gates, then `F` ups; or of `x` `[T, F]` without a gate.
pub fn activation(how: Activation, x: &Tensor) -> Result<Tensor> {
    Ok(activation_to(how, x, Output::Plain)?.plain().expect("a plain output gives a plain value"))
}

/// [`activation`] written to `output`.
pub fn activation_to(how: Activation, x: &Tensor, output: Output) -> Result<Produced> {
    expect_compute("activation: x", x)?;
    let shape = how.shape(x.dims("activation: x")?)?;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) => {
            let mut quantized = quantize::prepare(&to, x.device(), shape[0], shape[1])?;
            cuda::activation_codes(gpu, how, x, None, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::activation_amax(gpu, how, x, amax)?;
            Ok(Produced::Measured)
        }
        (Device::Cuda(gpu), output) => {
            let mut y = Tensor::empty(x.device(), &shape, x.dtype())?;
            cuda::activation(gpu, how, x, &mut y)?;
            output.apply(y)
        }
        (cpu, output) => {
            let mut y = Tensor::empty(cpu, &shape, x.dtype())?;
            cpu.on_cpu(|| cpu::activation(how, x, &mut y));
            output.apply(y)
        }
    }
}

/// [`activation_to`] of the product `a · bᵀ`, as of [`gemm_nt`] in type `x`. On a GPU in inference, if the output is FP8 with per-row scales and
/// cuBLASLt computes the product faster without scales, the kernel of the activation applies them.
pub fn product_activation_to(
    how: Activation,
    [a, b]: [Operand; 2],
    x: DType,
    accumulation: Accumulation,
    output: Output,
) -> Result<Produced> {
    let scaled = || gemm_nt(a, b, x, accumulation);
    let device = a.matrix("product_activation: a")?.0.device().clone();
    let (gpu, mut to) = match (&device, output) {
        (Device::Cuda(gpu), Output::Fp8(to)) => (gpu, to),
        (_, output) => return activation_to(how, &scaled()?, output),
    };
    let [rows, columns] = how.shape([a.rows("product_activation: a")?, b.rows("product_activation: b")?])?;
    let mut quantized = quantize::prepare(&to, &device, rows, columns)?;
    let product = match b.scale_inv() {
        Some((scales, _)) if cuda::fits_product(gpu, &quantized, scales)? => {
            gemm::unscaled(gpu, a, b, x, accumulation)?
        }
        _ => None,
    };
    match product {
        Some(product) => cuda::product_codes(gpu, how, &product, &mut quantized, &mut to)?,
        None => cuda::activation_codes(gpu, how, &scaled()?, None, &mut quantized, &mut to)?,
    }
    Ok(Produced::Fp8(quantized))
}

/// [`activation_to`] and [`compress()`] of its input, in one pass if possible.
pub fn activation_compressing(how: Activation, x: &Tensor, output: Output) -> Result<(Produced, CompressedTensor)> {
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if x.shape().len() == 2 && cuda::fuses_compression(how, x) => {
            let ([rows, columns], mut compressed) = (how.shape(x.dims("activation: x")?)?, compress::prepare(x)?);
            let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
            cuda::activation_codes(gpu, how, x, Some(&mut compressed), &mut quantized, &mut to)?;
            Ok((Produced::Fp8(quantized), compressed))
        }
        (_, output) => Ok((activation_to(how, x, output)?, compress(x)?)),
    }
}

/// Gradient of [`activation`] by its input, like it, from `dy` `[T, F]`. A compressed input is decompressed
/// while reading.
pub fn activation_backward(how: Activation, dy: &Tensor, x: impl Into<SavedActivation>) -> Result<Tensor> {
    Ok(activation_backward_to(how, dy, x, Output::Plain, None)?.0.plain().expect("a plain output gives a plain value"))
}

/// [`activation_backward`] written to `output`. With `activated` it also recomputes [`activation_to`], in one pass if possible: wgrad of the next
/// linear reads the activation, which forward then need not keep.
///
/// Errors if `activated` is given with [`Output::Amax`], since the op runs again after that.
pub fn activation_backward_to(
    how: Activation,
    dy: &Tensor,
    x: impl Into<SavedActivation>,
    output: Output,
    activated: Option<Fp8Output>,
) -> Result<(Produced, Option<QuantizedTensor>)> {
    let x = &x.into();
    if activated.is_some() && matches!(output, Output::Amax { .. }) {
        return Err(Error::Value(
            "activation_backward: an amax alone is measured, and codes of the activation are wanted too".into(),
        ));
    }
    let [tokens, hidden] = how.shape(x.dims("activation: x")?)?;
    let width = how.inputs() * hidden;
    dy.expect("activation_backward: dy", &[tokens, hidden])?;
    expect_compute("activation_backward: dy", dy)?;
    dy.expect_dtype("activation_backward: dy", &[x.dtype()])?;
    dy.expect_device("activation_backward: dy", x.device())?;
    let empty = || Tensor::empty(x.device(), &[tokens, width], x.dtype());
    let produced = match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if cuda::fuses_backward(dy, x, &to, activated.as_ref()) => {
            let mut dx = quantize::prepare(&to, x.device(), tokens, width)?;
            let mut activated = match activated {
                Some(to) => Some((quantize::prepare(&to, x.device(), tokens, hidden)?, to)),
                None => None,
            };
            cuda::activation_backward_codes(gpu, how, dy, x, (&mut dx, &mut to), activated.as_mut())?;
            return Ok((Produced::Fp8(dx), activated.map(|(codes, _)| codes)));
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::activation_backward_amax(gpu, how, dy, x, amax)?;
            Produced::Measured
        }
        (Device::Cuda(gpu), output) => {
            let mut dx = empty()?;
            cuda::activation_backward(gpu, how, dy, x, &mut dx)?;
            output.apply(dx)?
        }
        (cpu, output) => {
            let (value, mut dx) = (x.value()?, empty()?);
            cpu.on_cpu(|| cpu::activation_backward(how, dy, &value, &mut dx));
            drop(value);
            output.apply(dx)?
        }
    };
    let activated = match activated {
        Some(to) => activation_to(how, &x.value()?, Output::Fp8(to))?.fp8(),
        None => None,
    };
    Ok((produced, activated))
}

/// `dots[t] = Σ_f dy[t, f] · activation(x)[t, f]`, `[T]` in F32 (F64 for F64), for `x` as in [`activation`] and `dy` `[T, F]`: the gradient by a
/// factor of the activations of a row.
pub fn activation_dots(how: Activation, dy: &Tensor, x: impl Into<SavedActivation>) -> Result<Tensor> {
    let x = &x.into();
    let [tokens, hidden] = how.shape(x.dims("activation_dots: x")?)?;
    dy.expect("activation_dots: dy", &[tokens, hidden])?;
    expect_compute("activation_dots: dy", dy)?;
    dy.expect_dtype("activation_dots: dy", &[x.dtype()])?;
    dy.expect_device("activation_dots: dy", x.device())?;
    let mut dots = Tensor::empty(x.device(), &[tokens], real_type(x.dtype()))?;
    if let Device::Cuda(gpu) = x.device() {
        cuda::activation_dots(gpu, how, dy, x, &mut dots)?;
    } else {
        let value = x.value()?;
        x.device().on_cpu(|| cpu::activation_dots(how, dy, &value, &mut dots));
    }
    Ok(dots)
}
