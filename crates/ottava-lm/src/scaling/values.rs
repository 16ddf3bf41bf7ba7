//! What a cast reads.

use crate::error::Result;
use ottava_tensor::ops::Fp8Output;
use ottava_tensor::{DType, QuantizedTensor, Scaled, Tensor};

/// A matrix to be cast.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// As it is.
    Plain(&'a Tensor),
    /// In F16 with a scale, rounded to this type first.
    Scaled(&'a Scaled, DType),
}

impl<'a> From<&'a Tensor> for Values<'a> {
    fn from(x: &'a Tensor) -> Values<'a> {
        Values::Plain(x)
    }
}

impl Values<'_> {
    pub(super) fn cast(self, to: Fp8Output) -> Result<QuantizedTensor> {
        Ok(match self {
            Values::Plain(x) => to.cast(x)?,
            Values::Scaled(x, dtype) => to.cast_scaled(x, dtype)?,
        })
    }
}
