//! The form in which ranks send gradients to each other: E4M3 codes with a power-of-two scale (E8M0) for each [`GROUP`] neighbours.
//!
//! No library adds the codes of several ranks. So each rank sends every other rank its slice, and adds the slices that it receives in F32, in the
//! order of the ranks. A sum is rounded once. In a ring of FP8 values, sums would be cast again at each rank and could overflow, which is why FP8-LM
//! (Peng et al. 2023, arXiv:2310.18313, section 2.1) scales gradients down before the sum.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};

/// The number of neighbours that share a scale.
const GROUP: usize = 128;

/// The alignment of slices in bytes.
const ALIGNMENT: usize = 16;

/// The maximum number of slices. Each slice has at least one block of threads.
const MAX_SLICES: usize = 4096;

/// The number of sums of squares in [`CodingError`]: two for each block of threads.
const SUMS: usize = 2 * MAX_SLICES;

/// The types of gradients.
const TYPES: &[DType] = &[DType::F32, DType::BF16];

/// Returns the number of bytes of an encoded slice of `elements` elements, a multiple of 256. The codes come first, then the scales.
pub fn gradient_code_bytes(elements: usize) -> usize {
    elements + (elements / GROUP).next_multiple_of(ALIGNMENT)
}

/// The difference between gradients and their codes, summed over all calls of [`encode_gradients`] with this value.
#[derive(Clone, Debug)]
pub struct CodingError {
    /// Partial sums of squared errors and of squared values, F64 `[4096, 2]`.
    sums: Tensor,
}

impl CodingError {
    /// Returns the error before any gradient is encoded.
    pub fn new(device: &Device) -> Result<CodingError> {
        Ok(CodingError { sums: Tensor::zeros(device, &[SUMS], DType::F64)? })
    }

    /// Returns `‖code - x‖ / ‖x‖` over all gradients `x`, F32 `[1]`. NaN if they are all zero.
    pub fn relative(&self) -> Result<Tensor> {
        let mut error = Tensor::empty(self.sums.device(), &[1], DType::F32)?;
        dispatch! { self.sums.device(),
            cpu => cpu::relative(&self.sums, &mut error),
            gpu => cuda::relative(gpu, &self.sums, &mut error)?,
        }
        Ok(error)
    }
}

/// Encodes `x` (F32 or BF16) in at most 4096 equal `slices` of a multiple of 256 elements. Returns E4M3
/// `[slices, `[`gradient_code_bytes`]`]`; the scales in it are not E4M3 but E8M0.
///
/// A scale is the smallest power of two for which no code of the group exceeds 448. A group with an infinity or a NaN decodes to NaN. The values of
/// `feedback` (BF16, of the size of `x`) are added to `x` before the cast. Then `feedback` is replaced by the error of the cast, or by zero if the
/// error is not finite (Seide et al. 2014, "1-bit stochastic gradient descent"). The error of the codes is added to `error`, if given.
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

/// Returns the sum of the slices of all ranks `[ranks, `[`gradient_code_bytes`]`(elements)]`, `[elements]` in `dtype`. The slices are added in order,
/// in F32.
pub fn sum_gradient_codes(codes: &Tensor, elements: usize, dtype: DType) -> Result<Tensor> {
    decode(codes, 1, codes.shape()[0], elements, dtype)
}

/// Decodes all slices of `elements` elements each. Returns `[slices · elements]` in `dtype`.
pub fn decode_gradients(codes: &Tensor, elements: usize, dtype: DType) -> Result<Tensor> {
    decode(codes, codes.shape()[0], 1, elements, dtype)
}

/// Returns `slices` sums of `parts` slices each.
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
