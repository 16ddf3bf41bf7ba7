//! The values that a cast reads.

use ottava_common::error::Result;
use ottava_tensor::ops::{Fp8Output, unscaled};
use ottava_tensor::{DType, QuantizedTensor, ScaledTensor, Tensor};

/// A matrix to be cast.
#[derive(Clone)]
pub enum Values {
    /// F32, F16 or BF16.
    Plain(Tensor),
    /// F16 with a scale. The values are rounded to this type before the cast.
    Scaled(ScaledTensor, DType),
}

impl From<&Tensor> for Values {
    fn from(x: &Tensor) -> Values {
        Values::Plain(x.clone())
    }
}

impl Values {
    /// Returns the matrix without a scale.
    pub fn plain(self) -> Result<Tensor> {
        match self {
            Values::Plain(x) => Ok(x),
            Values::Scaled(x, dtype) => Ok(unscaled(&x, dtype)?),
        }
    }

    pub(super) fn cast(&self, to: Fp8Output) -> Result<QuantizedTensor> {
        Ok(match self {
            Values::Plain(x) => to.cast(x)?,
            Values::Scaled(x, dtype) => to.cast_scaled(x, *dtype)?,
        })
    }
}
