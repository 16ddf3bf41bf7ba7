//! The gradient of a parameter, and the format in which it is kept between micro-batches.

use crate::error::Result;
use crate::level::Gradients;
use ottava_tensor::ops::{Accumulation, Gradient, Operand, gemm_nt, gemm_nt_add, real_type, scaled, unscaled};
use ottava_tensor::{DType, ScaledTensor, Tensor};

/// The gradient of a parameter.
#[derive(Clone, Debug)]
pub enum Grad {
    /// F64, F32 or BF16.
    Plain(Tensor),
    /// E4M3.
    Scaled(ScaledTensor),
}

/// How a parameter keeps its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradFormat {
    /// In this type.
    Plain(DType),
    /// In E4M3; products add up in this type, before they are cast.
    Scaled(DType),
}

impl GradFormat {
    /// Of a matrix, in a model that computes in `compute`. Only what 16 bits are enough for is kept in less than F32.
    pub fn of(gradients: Gradients, compute: DType) -> GradFormat {
        match (gradients, compute) {
            (Gradients::Bfloat16, DType::BF16) => GradFormat::Plain(DType::BF16),
            (Gradients::Float8, DType::BF16) => GradFormat::Scaled(DType::BF16),
            (Gradients::Float8, DType::F32 | DType::F16) => GradFormat::Scaled(DType::F32),
            _ => GradFormat::Plain(real_type(compute)),
        }
    }

    /// The type of what is kept.
    pub fn dtype(self) -> DType {
        match self {
            GradFormat::Plain(dtype) => dtype,
            GradFormat::Scaled(_) => DType::E4M3,
        }
    }

    /// The type in which contributions add up.
    pub fn sums(self) -> DType {
        match self {
            GradFormat::Plain(dtype) | GradFormat::Scaled(dtype) => dtype,
        }
    }
}

impl Grad {
    /// As an optimizer reads it.
    pub fn read(&self) -> Gradient<'_> {
        match self {
            Grad::Plain(grad) => Gradient::Plain(grad),
            Grad::Scaled(grad) => Gradient::Scaled(grad),
        }
    }

    /// Its values, in a type that they are kept in or, where they have a scale, in F32.
    pub fn values(&self) -> Result<Tensor> {
        Ok(match self {
            Grad::Plain(grad) => grad.clone(),
            Grad::Scaled(grad) => unscaled(grad, DType::F32)?,
        })
    }

    /// `a · bᵀ`, plus the gradient so far; the first contribution of a step is the gradient.
    pub fn plus_product(
        grad: Option<Grad>,
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
                None => gemm_nt(a, b, format.sums(), accumulation)?,
            })
        })
    }

    /// What `add` makes of the gradient that there is, in the type of sums.
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
