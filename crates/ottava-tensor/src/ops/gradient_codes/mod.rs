//! Gradients as ranks send them to each other: E4M3 codes with a power-of-two scale (E8M0) for each [`GROUP`] neighbours.
//!
//! Codes of several ranks cannot be added by a library, so each rank sends every other one its slice, and adds what it receives in F32, in
//! the order of the ranks. A sum is rounded once, and neither overflows nor is cast again on its way, as in a ring of FP8 values
//! (Peng et al. 2023, FP8-LM, arXiv:2310.18313, section 2.1, scales gradients down before the sum against that).

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// Neighbours that share a scale.
const GROUP: usize = 128;

/// Slices lie at multiples of so many bytes.
const ALIGNMENT: usize = 16;

/// The most slices; each slice takes a block of threads at least.
const MAX_SLICES: usize = 4096;

/// Sums of squares of [`CodingError`]: two for each block of threads.
const SUMS: usize = 2 * MAX_SLICES;

/// Types of gradients.
const TYPES: &[DType] = &[DType::F32, DType::BF16];

/// Bytes of the codes of a slice of `elements`, a multiple of 256: codes, then scales.
pub fn gradient_code_bytes(elements: usize) -> usize {
    elements + (elements / GROUP).next_multiple_of(ALIGNMENT)
}

/// How far codes were from what they encode, over all calls of [`encode_gradients`] that got it.
#[derive(Clone, Debug)]
pub struct CodingError {
    /// F64 `[4096, 2]`, to be added: squares of errors, and of values.
    sums: Tensor,
}

impl CodingError {
    /// The error before any gradient is coded.
    pub fn new(device: &Device) -> Result<CodingError> {
        Ok(CodingError { sums: Tensor::zeros(device, &[SUMS], DType::F64)? })
    }

    /// `‖code - x‖ / ‖x‖` over all gradients `x`, F32 `[1]`; NaN if they are zero.
    pub fn relative(&self) -> Result<Tensor> {
        let mut error = Tensor::empty(self.sums.device(), &[1], DType::F32)?;
        dispatch! { self.sums.device(),
            cpu => cpu::relative(&self.sums, &mut error),
            gpu => cuda::relative(gpu, &self.sums, &mut error)?,
        }
        Ok(error)
    }
}

/// The codes of `x` (F32 or BF16), at most 4096 equal `slices` of a multiple of 256 elements, as E4M3 `[slices,
/// `[`gradient_code_bytes`]`]`, whose scales are not E4M3 but E8M0.
///
/// A scale is the smallest power of two with which no code of the group exceeds 448; a group with an infinity or a NaN decodes to NaN.
/// With `feedback` (BF16, of the size of `x`), its values are added to `x` before the cast, and it becomes what the cast has lost, or zero
/// where that is not finite (Seide et al. 2014, "1-bit stochastic gradient descent"). `error`, if given, gets what the codes have lost.
pub fn encode_gradients(
    x: &Tensor,
    slices: usize,
    feedback: Option<&mut Tensor>,
    error: Option<&mut CodingError>,
) -> Result<Tensor> {
    x.expect_dtype("encode_gradients: x", TYPES)?;
    if slices == 0 || !x.len().is_multiple_of(slices * 2 * GROUP) {
        let (elements, slice) = (x.len(), 2 * GROUP);
        return Err(Error::Value(format!("{elements} gradients are not {slices} slices of a multiple of {slice}")));
    }
    if slices > MAX_SLICES {
        return Err(Error::Value(format!("gradients of {slices} slices, and at most {MAX_SLICES} are sent")));
    }
    if let Some(feedback) = &feedback {
        feedback.expect_dtype("encode_gradients: feedback", &[DType::BF16])?;
        feedback.expect_device("encode_gradients: feedback", x.device())?;
        expect_elements("encode_gradients: feedback", feedback, x.len())?;
    }
    let mut codes = Tensor::empty(x.device(), &[slices, gradient_code_bytes(x.len() / slices)], DType::E4M3)?;
    dispatch! { x.device(),
        cpu => cpu::encode(x, feedback, &mut codes, error),
        gpu => cuda::encode(gpu, x, feedback, &mut codes, error)?,
    }
    Ok(codes)
}

/// The sum of the slices of all ranks `[ranks, `[`gradient_code_bytes`]`(elements)]`, added in order in F32, in `dtype`, `[elements]`.
pub fn sum_gradient_codes(codes: &Tensor, elements: usize, dtype: DType) -> Result<Tensor> {
    decode(codes, 1, codes.shape()[0], elements, dtype)
}

/// The values of all slices of `elements` each, in `dtype`, `[slices · elements]`.
pub fn decode_gradients(codes: &Tensor, elements: usize, dtype: DType) -> Result<Tensor> {
    decode(codes, codes.shape()[0], 1, elements, dtype)
}

/// `slices` sums of `parts` each.
fn decode(codes: &Tensor, slices: usize, parts: usize, elements: usize, dtype: DType) -> Result<Tensor> {
    codes.expect_dtype("gradient codes", &[DType::E4M3])?;
    expect_elements("gradient codes", codes, slices * parts * gradient_code_bytes(elements))?;
    let mut y = Tensor::empty(codes.device(), &[slices * elements], dtype)?;
    y.expect_dtype("gradients of codes", TYPES)?;
    dispatch! { codes.device(),
        cpu => cpu::decode(codes, parts, elements, &mut y),
        gpu => cuda::decode(gpu, codes, [slices, parts], elements, &mut y)?,
    }
    Ok(y)
}

fn expect_elements(what: &str, tensor: &Tensor, elements: usize) -> Result<()> {
    match tensor.len() == elements {
        true => Ok(()),
        false => Err(Error::Value(format!("{what}: {} elements, expected {elements}", tensor.len()))),
    }
}
