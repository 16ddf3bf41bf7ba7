//! In a comparison pass, compares the FP8 products of experts with products of the dequantized operands in the compute type.

use super::linear::GroupedLinear;
use ottava_common::error::Result;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Grad, Loan};
use ottava_recipe::scaling::{Casts, Quantity, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Accumulation, Groups, Operand, clear_unused_rows, dequantize, grouped_gemm_nt, grouped_wgrad_into, transpose,
};

impl GroupedLinear {
    fn slot(&self) -> Slot {
        self.gradient().slot().expect("a linear with FP8 products has casts")
    }

    /// In a comparison pass, compares the codes of the weight with the weight.
    pub(super) fn compare_weight(&self, codes: Operand, loan: &Loan, casts: &mut Casts) -> Result<()> {
        casts.compare_weight(self.slot(), codes, || self.weight().read(loan))
    }

    /// In a comparison pass, compares `product`, the grouped product of the codes `a` and `b`, with the product of the dequantized operands.
    pub(super) fn compare_product(
        &self,
        which: Quantity,
        product: &Tensor,
        [a, b]: [Operand; 2],
        groups: &Groups,
        casts: &mut Casts,
    ) -> Result<()> {
        if !casts.compares() {
            return Ok(());
        }
        let compute = self.weight().weights.dtype();
        let (a, values) = (dequantize(a, 1, compute)?, dequantize(b, 1, compute)?);
        let transposed;
        let b = match b {
            // Codes that are stacked along the contracted dimension are transposed.
            Operand::Columns(_) => {
                transposed = transpose(&values)?;
                Operand::plain_transposed(&transposed)
            }
            _ => Operand::plain(&values),
        };
        let mut reference = grouped_gemm_nt(Operand::plain(&a), b, groups, product.dtype(), Accumulation::Exact)?;
        let mut product = product.duplicate()?;
        for values in [&mut reference, &mut product] {
            clear_unused_rows(values, groups)?;
        }
        let name = casts.linear_name(self.slot());
        casts.probe().compare(&name, which, &product, &reference)
    }

    /// In a comparison pass, compares the weight gradient with the product of the dequantized `dy` and `x`. The gradient must hold only this product.
    pub(super) fn compare_wgrad(&self, dy: &View, x: &View, groups: &Groups, casts: &mut Casts) -> Result<()> {
        if !casts.compares() {
            return Ok(());
        }
        let gradient = self.weight().gradient.get().map(Grad::values).transpose()?.expect("wgrad has run");
        let values =
            |codes| -> Result<Tensor> { Ok(transpose(&dequantize(codes, 1, self.weight().weights.dtype())?)?) };
        let (dy, x, mut reference) = (values(dy.columns()?)?, values(x.columns()?)?, gradient.empty_like()?);
        let [a, b] = [Operand::plain_transposed(&dy), Operand::plain_transposed(&x)];
        grouped_wgrad_into(a, b, groups, &mut reference, Accumulation::Exact)?;
        let name = casts.linear_name(self.slot());
        casts.probe().compare(&name, Quantity::Wgrad, &gradient, &reference)
    }
}
