//! Activations of MLPs: SwiGLU `silu(gate) · up`, GeGLU `gelu(gate) · up` (Shazeer 2020, arXiv:2002.05202), GELU without a gate (Hendrycks
//! and Gimpel 2016, arXiv:1606.08415), and the clamped SwiGLU of gpt-oss (OpenAI 2025, arXiv:2508.10925).

pub(super) mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::compress::{self, CompressedTensor, SavedActivation, compress};
use super::destination::{Fp8Output, Output, Produced};
use super::gemm::{self, gemm_nt};
use super::groups::GroupedRows;
use super::operand::{Accumulation, Operand};
use super::permute::clear_unused_rows;
use super::{expect_compute, quantize, real_type};
use crate::{DType, Device, Error, QuantizedTensor, Result, Tensor};

/// The function that an MLP computes between its linears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SwiGLU: `silu(gate) · up`, `silu(g) = g / (1 + e^-g)`.
    SwiGlu,
    /// Clamped SwiGLU: `(u + 1) · g · sigmoid(1.702 · g)` with `g = min(gate, 7)` and `u = max(min(up, 7), -7)`. A value that equals its bound has a
    /// gradient; a value beyond its bound has none.
    ClampedSwiGlu,
    /// GeGLU: `gelu(gate) · up`.
    GeGlu(Gelu),
    /// GELU without a gate: `gelu(x)`.
    Gelu(Gelu),
    /// The squared ReLU without a gate: `max(x, 0)²`. So et al. 2021, arXiv:2109.08668.
    Relu2,
    /// The hyperbolic tangent without a gate: `tanh(x)`.
    Tanh,
}

/// The form of `gelu(x) = x · Φ(x)`, with the normal distribution `Φ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// The exact form: `Φ(x) = (1 + erf(x / √2)) / 2`.
    Exact,
    /// The approximation `Φ(x) ≈ (1 + tanh(u)) / 2 = sigmoid(2u)`, `u = √(2/π) · (x + 0.044715 · x³)`.
    Tanh,
}

impl Activation {
    /// The factor in the sigmoid of [`Activation::ClampedSwiGlu`].
    pub const CLAMPED_FACTOR: f64 = 1.702;
    /// The bound of `gate` and `up` in [`Activation::ClampedSwiGlu`].
    pub const CLAMPED_LIMIT: f64 = 7.0;

    /// Returns the number of input elements per output element: 2 with a gate, 1 without.
    pub const fn inputs(self) -> usize {
        match self {
            Activation::SwiGlu | Activation::ClampedSwiGlu | Activation::GeGlu(_) => 2,
            Activation::Gelu(_) | Activation::Relu2 | Activation::Tanh => 1,
        }
    }

    /// Returns the shape `[T, F]` of the output for an input of this shape.
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

/// Returns the activation `[T, F]` of `x` `[T, 2F]`, or of `x` `[T, F]` without a gate. Each row of `x` has `F` elements of `gate`, then `F` of `up`.
pub fn activation(how: Activation, x: &Tensor) -> Result<Tensor> {
    Ok(activation_to(how, x, Output::Plain)?.plain().expect("a plain output gives a plain value"))
}

/// Computes [`activation`] and writes it to `output`. `x` may be a tensor or [`GroupedRows`].
pub fn activation_to<'a>(how: Activation, x: impl Into<GroupedRows<'a>>, output: Output) -> Result<Produced> {
    let rows: GroupedRows = x.into();
    let x = rows.matrix;
    expect_compute("activation: x", x)?;
    let shape = how.shape(x.dims("activation: x")?)?;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) => {
            let mut quantized = quantize::prepare(&to, x.device(), shape[0], shape[1])?;
            cuda::activation_codes(gpu, how, rows, None, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::activation_amax(gpu, how, rows, amax)?;
            Ok(Produced::Measured)
        }
        (Device::Cuda(gpu), output) => {
            let mut y = Tensor::empty(x.device(), &shape, x.dtype())?;
            cuda::activation(gpu, how, rows, &mut y)?;
            output.apply(y)
        }
        (cpu, output) => {
            let mut y = Tensor::empty(cpu, &shape, x.dtype())?;
            cpu.on_cpu(|| cpu::activation(how, x, &mut y));
            output.apply(y)
        }
    }
}

/// Computes [`activation_to`] of the product `a · bᵀ`, which is computed as by [`gemm_nt`] in type `x`. On a GPU in inference, if the output is FP8
/// with per-row scales and cuBLASLt computes the product faster without scales, the kernel of the activation applies the scales.
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
        None => cuda::activation_codes(gpu, how, (&scaled()?).into(), None, &mut quantized, &mut to)?,
    }
    Ok(Produced::Fp8(quantized))
}

/// Computes [`activation_to`], and compresses its input as [`compress()`], in one pass if possible.
pub fn activation_compressing<'a>(
    how: Activation,
    x: impl Into<GroupedRows<'a>>,
    output: Output,
) -> Result<(Produced, CompressedTensor)> {
    let grouped: GroupedRows = x.into();
    let x = grouped.matrix;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if x.shape().len() == 2 && cuda::fuses_compression(how, x) => {
            let ([rows, columns], mut compressed) = (how.shape(x.dims("activation: x")?)?, compress::prepare(x)?);
            let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
            cuda::activation_codes(gpu, how, grouped, Some(&mut compressed), &mut quantized, &mut to)?;
            Ok((Produced::Fp8(quantized), compressed))
        }
        (_, output) => Ok((activation_to(how, grouped, output)?, compress(x)?)),
    }
}

/// Returns the gradient of [`activation`] by its input, with the shape and type of the input, from `dy` `[T, F]`. A compressed input is decompressed
/// while reading.
pub fn activation_backward(how: Activation, dy: &Tensor, x: impl Into<SavedActivation>) -> Result<Tensor> {
    Ok(activation_backward_to(how, dy, x, Output::Plain, None)?.0.plain().expect("a plain output gives a plain value"))
}

/// Computes [`activation_backward`] and writes it to `output`. With `activated`, also recomputes [`activation_to`], in one pass if possible. Wgrad of
/// the next linear reads the recomputed activation, so forward need not keep it.
///
/// `dy` may be a tensor or [`GroupedRows`].
///
/// Errors if `activated` is given with [`Output::Amax`], because the op runs again after that.
pub fn activation_backward_to<'a>(
    how: Activation,
    dy: impl Into<GroupedRows<'a>>,
    x: impl Into<SavedActivation>,
    output: Output,
    activated: Option<Fp8Output>,
) -> Result<(Produced, Option<QuantizedTensor>)> {
    let (x, rows): (_, GroupedRows) = (&x.into(), dy.into());
    let (dy, groups) = (rows.matrix, rows.groups);
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
            cuda::activation_backward_codes(gpu, how, rows, x, (&mut dx, &mut to), activated.as_mut())?;
            return Ok((Produced::Fp8(dx), activated.map(|(codes, _)| codes)));
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::activation_backward_amax(gpu, how, rows, x, amax)?;
            Produced::Measured
        }
        (Device::Cuda(gpu), output) => {
            let mut dx = empty()?;
            cuda::activation_backward(gpu, how, rows, x, &mut dx)?;
            if let (Output::Fp8(_), Some(groups)) = (&output, groups) {
                clear_unused_rows(&mut dx, groups)?;
            }
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
        Some(to) => activation_to(how, GroupedRows { matrix: &x.value()?, groups }, Output::Fp8(to))?.fp8(),
        None => None,
    };
    Ok((produced, activated))
}

/// Returns `dots[t] = Σ_f dy[t, f] · activation(x)[t, f]`, `[T]` in F32 (F64 for F64), for `x` as in [`activation`] and `dy` `[T, F]`. If the
/// activations of a row are multiplied by a factor, this is the gradient by the factor. `dy` may be a tensor or [`GroupedRows`].
pub fn activation_dots<'a>(
    how: Activation,
    dy: impl Into<GroupedRows<'a>>,
    x: impl Into<SavedActivation>,
) -> Result<Tensor> {
    let (x, rows): (_, GroupedRows) = (&x.into(), dy.into());
    let dy = rows.matrix;
    let [tokens, hidden] = how.shape(x.dims("activation_dots: x")?)?;
    dy.expect("activation_dots: dy", &[tokens, hidden])?;
    expect_compute("activation_dots: dy", dy)?;
    dy.expect_dtype("activation_dots: dy", &[x.dtype()])?;
    dy.expect_device("activation_dots: dy", x.device())?;
    let mut dots = Tensor::empty(x.device(), &[tokens], real_type(x.dtype()))?;
    if let Device::Cuda(gpu) = x.device() {
        cuda::activation_dots(gpu, how, rows, x, &mut dots)?;
    } else {
        let value = x.value()?;
        x.device().on_cpu(|| cpu::activation_dots(how, dy, &value, &mut dots));
    }
    Ok(dots)
}
