//! The gated activation `silu(gate) · up`. Shazeer 2020, arXiv:2002.05202.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::compress::{self, CompressedTensor, SavedActivation, compress};
use super::destination::{Fp8Output, Output, Produced};
use super::{expect_compute, quantize};
use crate::{Device, Error, QuantizedTensor, Result, Tensor};

pub(crate) use cuda::{FP8_SOURCE, SOURCE};

/// `y = gate / (1 + e^-gate) · up` for `x` `[T, 2F]`, whose rows hold `F` gates, then `F` ups. Returns `[T, F]`.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    Ok(swiglu_to(x, Output::Plain)?.plain().expect("a plain output gives a plain value"))
}

/// [`swiglu`] written to `output`.
pub fn swiglu_to(x: &Tensor, output: Output) -> Result<Produced> {
    expect_compute("swiglu: x", x)?;
    let shape = halves(x.dims("swiglu: x")?)?;
    match (x.device(), output) {
        (Device::Cpu | Device::DryCpu(_), output) => {
            let mut y = Tensor::empty(x.device(), &shape, x.dtype())?;
            if let Device::Cpu = x.device() {
                cpu::swiglu(x, &mut y);
            }
            output.apply(y)
        }
        (Device::Cuda(gpu), Output::Fp8(mut to)) => {
            let mut quantized = quantize::prepare(&to, x.device(), shape[0], shape[1])?;
            cuda::swiglu_codes(gpu, x, None, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::swiglu_amax(gpu, x, amax)?;
            Ok(Produced::Measured)
        }
        (Device::Cuda(gpu), output) => {
            let mut y = Tensor::empty(x.device(), &shape, x.dtype())?;
            cuda::swiglu(gpu, x, &mut y)?;
            output.apply(y)
        }
    }
}

/// [`swiglu_to`] and [`compress()`] of its input, in one pass if possible.
pub fn swiglu_compressing(x: &Tensor, output: Output) -> Result<(Produced, CompressedTensor)> {
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if x.shape().len() == 2 && cuda::fuses_compression(x) => {
            let ([rows, columns], mut compressed) = (halves(x.dims("swiglu: x")?)?, compress::prepare(x)?);
            let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
            cuda::swiglu_codes(gpu, x, Some(&mut compressed), &mut quantized, &mut to)?;
            Ok((Produced::Fp8(quantized), compressed))
        }
        (_, output) => Ok((swiglu_to(x, output)?, compress(x)?)),
    }
}

/// Gradient of [`swiglu`] by its input, `[T, 2F]`, from `dy` `[T, F]`. A compressed input is decompressed
/// while reading.
pub fn swiglu_backward(dy: &Tensor, x: impl Into<SavedActivation>) -> Result<Tensor> {
    Ok(swiglu_backward_to(dy, x, Output::Plain, None)?.0.plain().expect("a plain output gives a plain value"))
}

/// [`swiglu_backward`] written to `output`. With `activated` it also recomputes [`swiglu_to`], in one pass if possible: wgrad of the next
/// linear reads the activation, which forward then need not keep.
///
/// Errors if `activated` is given with [`Output::Amax`], since the op runs again after that.
pub fn swiglu_backward_to(
    dy: &Tensor,
    x: impl Into<SavedActivation>,
    output: Output,
    activated: Option<Fp8Output>,
) -> Result<(Produced, Option<QuantizedTensor>)> {
    let x = &x.into();
    if activated.is_some() && matches!(output, Output::Amax { .. }) {
        return Err(Error::Value(
            "swiglu_backward: an amax alone is measured, and codes of the activation are wanted too".into(),
        ));
    }
    let [tokens, hidden] = halves(x.dims("swiglu: x")?)?;
    dy.expect("swiglu_backward: dy", &[tokens, hidden])?;
    expect_compute("swiglu_backward: dy", dy)?;
    dy.expect_dtype("swiglu_backward: dy", &[x.dtype()])?;
    dy.expect_device("swiglu_backward: dy", x.device())?;
    let empty = || Tensor::empty(x.device(), &[tokens, 2 * hidden], x.dtype());
    let produced = match (x.device(), output) {
        (Device::Cpu | Device::DryCpu(_), output) => {
            let (value, mut dx) = (x.value()?, empty()?);
            if let Device::Cpu = x.device() {
                cpu::swiglu_backward(dy, &value, &mut dx);
            }
            drop(value);
            output.apply(dx)?
        }
        (Device::Cuda(gpu), Output::Fp8(mut to)) if cuda::fuses_backward(dy, x, &to, activated.as_ref()) => {
            let mut dx = quantize::prepare(&to, x.device(), tokens, 2 * hidden)?;
            let mut activated = match activated {
                Some(to) => Some((quantize::prepare(&to, x.device(), tokens, hidden)?, to)),
                None => None,
            };
            cuda::swiglu_backward_codes(gpu, dy, x, (&mut dx, &mut to), activated.as_mut())?;
            return Ok((Produced::Fp8(dx), activated.map(|(codes, _)| codes)));
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::swiglu_backward_amax(gpu, dy, x, amax)?;
            Produced::Measured
        }
        (Device::Cuda(gpu), output) => {
            let mut dx = empty()?;
            cuda::swiglu_backward(gpu, dy, x, &mut dx)?;
            output.apply(dx)?
        }
    };
    let activated = match activated {
        Some(to) => swiglu_to(&x.value()?, Output::Fp8(to))?.fp8(),
        None => None,
    };
    Ok((produced, activated))
}

/// Shape of the activation.
fn halves([tokens, width]: [usize; 2]) -> Result<[usize; 2]> {
    if width % 2 != 0 {
        return Err(Error::Shape {
            what: "swiglu: x".into(),
            expected: "an even width".into(),
            got: vec![tokens, width],
        });
    }
    Ok([tokens, width / 2])
}
