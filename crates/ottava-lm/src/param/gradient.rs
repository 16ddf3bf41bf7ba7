//! The gradient of a parameter, and its format between micro-batches.

use crate::error::Result;
use crate::level::Gradients;
use ottava_tensor::ops::{
    Accumulation, Gradient, Operand, gemm_nt, gemm_nt_add, gemm_nt_into, real_type, scaled, unscaled,
};
use ottava_tensor::{DType, ScaledTensor, Tensor};

/// The gradient of a parameter.
#[derive(Clone, Debug)]
pub enum Grad {
    /// F64, F32 or BF16.
    Plain(Tensor),
    /// E4M3.
    Scaled(ScaledTensor),
}

/// Storage format of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradFormat {
    /// In this type.
    Plain(DType),
    /// E4M3; products accumulate in this type before the cast.
    Scaled(DType),
}

impl GradFormat {
    /// The format for a matrix in a model that computes in `compute`. BF16 is for models that compute in BF16.
    pub fn of(gradients: Gradients, compute: DType) -> GradFormat {
        match (gradients, compute) {
            (Gradients::Bfloat16, DType::BF16) => GradFormat::Plain(DType::BF16),
            (Gradients::Float8, DType::BF16) => GradFormat::Scaled(DType::BF16),
            (Gradients::Float8, DType::F32 | DType::F16) => GradFormat::Scaled(DType::F32),
            _ => GradFormat::Plain(real_type(compute)),
        }
    }

    /// The storage type.
    pub fn dtype(self) -> DType {
        match self {
            GradFormat::Plain(dtype) => dtype,
            GradFormat::Scaled(_) => DType::E4M3,
        }
    }

    /// The type in which products accumulate.
    pub fn sums(self) -> DType {
        match self {
            GradFormat::Plain(dtype) | GradFormat::Scaled(dtype) => dtype,
        }
    }
}

impl Grad {
    /// The gradient as an optimizer reads it.
    pub fn read(&self) -> Gradient<'_> {
        match self {
            Grad::Plain(grad) => Gradient::Plain(grad),
            Grad::Scaled(grad) => Gradient::Scaled(grad),
        }
    }

    /// The values, in the storage type, or in F32 if they have a scale.
    pub fn values(&self) -> Result<Tensor> {
        Ok(match self {
            Grad::Plain(grad) => grad.clone(),
            Grad::Scaled(grad) => unscaled(grad, DType::F32)?,
        })
    }

    /// `a · bᵀ`, plus the gradient so far, which is `None` for the first product of a step; that one is written to `place`, if there is one.
    pub fn plus_product(
        grad: Option<Grad>,
        place: Option<Tensor>,
        format: GradFormat,
        a: Operand,
        b: Operand,
        accumulation: Accumulation,
    ) -> Result<Grad> {
        Grad::plus(grad, format, |sum| {
            Ok(match sum {
                Some(mut sum) => {
                    gemm_nt_add(a, b, &mut sum, accumulation)?;
                    sum
                }
                None => match place {
                    Some(mut place) => {
                        gemm_nt_into(a, b, &mut place, accumulation)?;
                        place
                    }
                    None => gemm_nt(a, b, format.sums(), accumulation)?,
                },
            })
        })
    }

    /// The result of `add` on the gradient so far, in the type of [`GradFormat::sums`].
    pub fn plus(
        grad: Option<Grad>,
        format: GradFormat,
        add: impl FnOnce(Option<Tensor>) -> Result<Tensor>,
    ) -> Result<Grad> {
        let sum = match grad {
            None => None,
            Some(Grad::Plain(sum)) => Some(sum),
            Some(Grad::Scaled(grad)) => Some(unscaled(&grad, format.sums())?),
        };
        let sum = add(sum)?;
        Ok(match format {
            GradFormat::Plain(_) => Grad::Plain(sum),
            GradFormat::Scaled(_) => Grad::Scaled(scaled(&sum, DType::E4M3)?),
        })
    }
}
