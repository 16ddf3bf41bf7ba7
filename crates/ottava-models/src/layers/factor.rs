//! Constant factors of activations.

use ottava_common::error::Result;
use ottava_tensor::ops::scale_columns;
use ottava_tensor::{DType, Device, Tensor};

/// A constant factor of all elements of a matrix `[T, C]`. A factor of 1 computes nothing.
#[derive(Clone, Default)]
pub struct Factor {
    /// The factor, repeated: F32 `[C]`. `None` for a factor of 1.
    factors: Option<Tensor>,
}

impl Factor {
    /// Creates a factor for matrices of `channels` columns.
    pub fn new(device: &Device, channels: usize, factor: f32) -> Result<Factor> {
        let factors = (factor != 1.0).then(|| Tensor::from_slice(device, &[channels], &vec![factor; channels]));
        Ok(Factor { factors: factors.transpose()? })
    }

    /// Creates a factor that is rounded to the compute type `dtype`, as in Gemma.
    pub fn rounded(device: &Device, channels: usize, factor: f32, dtype: DType) -> Result<Factor> {
        let factor = match dtype {
            DType::BF16 => half::bf16::from_f32(factor).to_f32(),
            DType::F16 => half::f16::from_f32(factor).to_f32(),
            _ => factor,
        };
        Factor::new(device, channels, factor)
    }

    /// Returns whether the factor is 1.
    pub fn is_one(&self) -> bool {
        self.factors.is_none()
    }

    /// Returns `x` times the factor, rounded once. Backward is the same function of the gradient.
    pub fn apply(&self, x: Tensor) -> Result<Tensor> {
        match &self.factors {
            Some(factors) => Ok(scale_columns(&x, factors)?),
            None => Ok(x),
        }
    }
}
