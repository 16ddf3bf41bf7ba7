//! Compares the FP8 products of a linear with those of the values of the same codes in the compute type, in a pass that compares.

use super::{Linear, Reads};
use crate::context::Context;
use crate::error::Result;
use crate::operand::View;
use crate::param::Grad;
use crate::scaling::{Casts, Quantity};
use ottava_tensor::ops::{Accumulation, Operand, add, cast, dequantize, gemm_nt};
use ottava_tensor::{DType, QuantizedTensor, Tensor};

impl Linear {
    /// Its name, that of its casts without their suffixes.
    fn name<'a>(&self, casts: &'a Casts) -> &'a str {
        let slot = self.gradient.slot().expect("a linear with FP8 products has casts");
        casts.scales.name(slot).trim_end_matches(".grad_output")
    }

    /// [`Linear::fprop`] that compares the product, and the cast of the weight.
    pub(super) fn compare_fprop(&self, x: &View, residual: Option<&Tensor>, context: &mut Context) -> Result<Tensor> {
        let Context { casts, loan, .. } = &mut *context;
        let (codes, weight) = (self.weight.codes_for_forward(loan, casts)?.only_rows(), self.weight.read(loan)?);
        let name = format!("{}.weight", self.name(casts));
        casts.probe().compare_cast(&name, &codes, &weight)?;
        let y = self.summed_fprop(x, None, Reads::Codes, context)?;
        let reference = self.summed_fprop(x, None, Reads::Values, context)?;
        self.compare(Quantity::Fprop, &y, &reference, &mut context.casts)?;
        residual.map_or(Ok(y.clone()), |residual| Ok(add(&y, residual)?))
    }

    /// [`Linear::dgrad`] that compares the product.
    pub(super) fn compare_dgrad(&self, dy: &View, other: Option<&Tensor>, context: &mut Context) -> Result<Tensor> {
        let Context { casts, loan, .. } = &mut *context;
        let (codes, weight) = (self.weight.codes_for_backward(loan, casts)?.only_transposed(), self.weight.read(loan)?);
        let name = format!("{}.weight", self.name(casts));
        casts.probe().compare_cast(&name, &codes, &weight)?;
        let dx = self.summed_dgrad(dy, None, Reads::Codes, context)?;
        let reference = self.summed_dgrad(dy, None, Reads::Values, context)?;
        self.compare(Quantity::Dgrad, &dx, &reference, &mut context.casts)?;
        other.map_or(Ok(dx.clone()), |other| Ok(add(&dx, other)?))
    }

    /// Compares the gradient of the weight, which has only the product of `dy` and `x`.
    pub(super) fn compare_wgrad(&self, dy: &View, x: &View, casts: &mut Casts) -> Result<()> {
        let gradient = self.weight.gradient.get().map(Grad::values).transpose()?.expect("wgrad has run");
        let [dy, x] = [dy.dequantized(self.weight.dtype())?, x.dequantized(self.weight.dtype())?];
        let (dy, x) = (Operand::plain_transposed(&dy), Operand::plain_transposed(&x));
        let reference = gemm_nt(dy, x, DType::F32, Accumulation::Exact)?;
        self.compare(Quantity::Wgrad, &cast(&gradient, DType::F32)?, &reference, casts)
    }

    /// Compares `x`, a product of this linear, with its `reference`.
    pub(super) fn compare(&self, product: Quantity, x: &Tensor, reference: &Tensor, casts: &mut Casts) -> Result<()> {
        let name = self.name(casts).to_string();
        casts.probe().compare(&name, product, x, reference)
    }

    /// `a · bᵀ` of the values of a view and of codes.
    pub(super) fn product_of_values(&self, a: &View, b: &QuantizedTensor) -> Result<Tensor> {
        let (a, b) = (a.dequantized(self.weight.dtype())?, dequantize(b, self.weight.dtype())?);
        Ok(gemm_nt(Operand::plain(&a), Operand::plain(&b), self.weight.dtype(), Accumulation::Exact)?)
    }
}
