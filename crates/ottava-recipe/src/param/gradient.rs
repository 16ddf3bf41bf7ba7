//! The gradient of a parameter, and its format between micro-batches.

use super::scopes::GRADIENTS;
use crate::storage::Gradients;
use ottava_common::error::Result;
use ottava_tensor::ops::{
    self, Accumulation, Groups, Operand, gemm_nt_add, gemm_nt_into, grouped_wgrad_add, grouped_wgrad_into, real_type,
    scaled, unscaled,
};
use ottava_tensor::{DType, Device, ScaledTensor, Tensor};

/// A product `a · bᵀ` that is a gradient, or that is added to a gradient.
#[derive(Clone, Copy, Debug)]
pub struct WgradProduct<'a> {
    /// The gradient by the output, contracted over its rows.
    pub a: Operand<'a>,
    /// The input, contracted over its rows.
    pub b: Operand<'a>,
    /// The accumulation of the product.
    pub accumulation: Accumulation,
    /// The rows of each matrix, if the parameter stacks several matrices. `None` for one matrix.
    pub groups: Option<&'a Groups>,
}

impl<'a> WgradProduct<'a> {
    /// Creates the product of one matrix, with exact accumulation.
    pub fn exact(a: Operand<'a>, b: Operand<'a>) -> WgradProduct<'a> {
        WgradProduct { a, b, accumulation: Accumulation::Exact, groups: None }
    }

    /// Writes the product to `into`.
    fn write(self, into: &mut Tensor) -> Result<()> {
        let WgradProduct { a, b, accumulation, groups } = self;
        match groups {
            None => gemm_nt_into(a, b, into, accumulation)?,
            Some(groups) => grouped_wgrad_into(a, b, groups, into, accumulation)?,
        }
        Ok(())
    }

    /// Adds the product to `into`.
    fn add(self, into: &mut Tensor) -> Result<()> {
        let WgradProduct { a, b, accumulation, groups } = self;
        match groups {
            None => gemm_nt_add(a, b, into, accumulation)?,
            Some(groups) => grouped_wgrad_add(a, b, groups, into, accumulation)?,
        }
        Ok(())
    }
}

/// The gradient of a parameter, to which backward adds. It takes no memory between the update and the first backward of a step.
pub struct Gradient {
    device: Device,
    /// The shape of the whole parameter. After a reduction, `sum` may be the gradient of a slice.
    shape: Vec<usize>,
    format: GradFormat,
    sum: Option<Grad>,
    /// The memory for the next sum: its part of the buffer that ranks reduce.
    place: Option<Tensor>,
}

impl Gradient {
    /// Creates an empty gradient of a parameter of this shape, to be stored in `format`.
    pub fn new(device: &Device, shape: &[usize], format: GradFormat) -> Gradient {
        Gradient { device: device.clone(), shape: shape.to_vec(), format, sum: None, place: None }
    }

    /// Returns the sum of the gradients that this step has added, or `None` before the first backward of a step.
    pub fn get(&self) -> Option<&Grad> {
        self.sum.as_ref()
    }

    /// Returns the sum in the form that an optimizer reads.
    ///
    /// Panics before backward has run.
    pub fn read(&self) -> ops::Gradient<'_> {
        self.sum.as_ref().expect("backward has run").read()
    }

    /// Takes the sum out.
    pub fn take(&mut self) -> Option<Grad> {
        self.sum.take()
    }

    /// Drops the sum, before the first backward of a step.
    pub fn clear(&mut self) {
        self.sum = None;
    }

    /// Replaces the sum, for example by the sum over ranks.
    pub fn set(&mut self, sum: Grad) {
        self.sum = Some(sum);
    }

    /// Returns the type of the gradient if it has no scale.
    pub fn dtype(&self) -> Option<DType> {
        match self.format {
            GradFormat::Plain(dtype) => Some(dtype),
            GradFormat::Scaled(_) => None,
        }
    }

    /// Stores the gradient in the type in which products add to it. Ranks add their gradients in this type, before a cast.
    pub fn keep_sums(&mut self) {
        self.format = GradFormat::Plain(self.format.sums());
    }

    /// Sets the memory for the next gradient, which must have the gradient's shape and type.
    pub fn place(&mut self, memory: Tensor) {
        self.place = Some(memory);
    }

    /// Returns whether the parameter has a gradient, or memory for a gradient.
    pub fn has_memory(&self) -> bool {
        self.sum.is_some() || self.place.is_some()
    }

    /// Returns zeros for a new sum.
    pub(super) fn zeros(&mut self) -> Result<Tensor> {
        let _scope = self.device.scope(GRADIENTS);
        match self.place.take() {
            Some(mut place) => {
                place.fill_zero()?;
                Ok(place)
            }
            None => Ok(Tensor::zeros(&self.device, &self.shape, self.format.sums())?),
        }
    }

    /// Returns the sum for a layer's backward to add to. If the step has no sum yet, returns zeros.
    ///
    /// Panics if the gradient is stored with a scale.
    pub fn sum_mut(&mut self) -> Result<&mut Tensor> {
        if self.sum.is_none() {
            self.sum = Some(Grad::Plain(self.zeros()?));
        }
        match &mut self.sum {
            Some(Grad::Plain(grad)) => Ok(grad),
            _ => unreachable!("only gradients that are products have scales"),
        }
    }

    /// Adds a product to the gradient of a matrix. The first product of a step overwrites the memory.
    pub fn add_product(&mut self, product: WgradProduct) -> Result<()> {
        let _scope = self.device.scope(GRADIENTS);
        let (sum, place, format) = (self.sum.take(), self.place.take(), self.format);
        self.sum = Some(Grad::plus(sum, format, |sum| {
            if let Some(mut sum) = sum {
                product.add(&mut sum)?;
                return Ok(sum);
            }
            let mut sum = place.map_or_else(|| Tensor::empty(&self.device, &self.shape, format.sums()), Ok)?;
            product.write(&mut sum)?;
            Ok(sum)
        })?);
        Ok(())
    }

    /// Runs `add` on the unscaled sum of a matrix, or on zeros if there is no sum.
    pub fn add(&mut self, add: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let device = self.device.clone();
        let _scope = device.scope(GRADIENTS);
        let (sum, format) = (self.sum.take(), self.format);
        self.sum = Some(Grad::plus(sum, format, |sum| {
            let mut sum = match sum {
                Some(sum) => sum,
                None => self.zeros()?,
            };
            add(&mut sum)?;
            Ok(sum)
        })?);
        Ok(())
    }
}

/// The gradient of a parameter.
#[derive(Clone, Debug)]
pub enum Grad {
    /// A tensor in F64, F32 or BF16.
    Plain(Tensor),
    /// E4M3 codes with a scale.
    Scaled(ScaledTensor),
}

/// The storage format of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradFormat {
    /// A tensor in this type.
    Plain(DType),
    /// E4M3 with a scale. Products accumulate in this type before the cast.
    Scaled(DType),
}

impl GradFormat {
    /// Returns the format for a matrix in a model that computes in `compute`. BF16 gradients are only for models that compute in BF16.
    pub fn for_matrix(gradients: Gradients, compute: DType) -> GradFormat {
        match (gradients, compute) {
            (Gradients::Bfloat16, DType::BF16) => GradFormat::Plain(DType::BF16),
            (Gradients::Float8, DType::BF16) => GradFormat::Scaled(DType::BF16),
            (Gradients::Float8, DType::F32 | DType::F16) => GradFormat::Scaled(DType::F32),
            _ => GradFormat::Plain(real_type(compute)),
        }
    }

    /// Returns the storage type.
    pub fn dtype(self) -> DType {
        match self {
            GradFormat::Plain(dtype) => dtype,
            GradFormat::Scaled(_) => DType::E4M3,
        }
    }

    /// Returns the type in which products accumulate.
    pub fn sums(self) -> DType {
        match self {
            GradFormat::Plain(dtype) | GradFormat::Scaled(dtype) => dtype,
        }
    }
}

impl Grad {
    /// Returns the gradient in the form that an optimizer reads.
    pub fn read(&self) -> ops::Gradient<'_> {
        match self {
            Grad::Plain(grad) => ops::Gradient::Plain(grad),
            Grad::Scaled(grad) => ops::Gradient::Scaled(grad),
        }
    }

    /// Returns the values in the storage type, or in F32 if the gradient has a scale.
    pub fn values(&self) -> Result<Tensor> {
        Ok(match self {
            Grad::Plain(grad) => grad.clone(),
            Grad::Scaled(grad) => unscaled(grad, DType::F32)?,
        })
    }

    /// Returns the result of `add` on the gradient so far, in the type of [`GradFormat::sums`].
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
