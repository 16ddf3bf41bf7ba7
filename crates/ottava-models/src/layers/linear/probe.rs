//! In a comparison pass, compares the FP8 products of a linear with products of the dequantized operands in the compute type.

use super::core::{Core, WeightProduct};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Grad, Loan};
use ottava_recipe::scaling::{Casts, Quantity, sampling_step};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Accumulation, Operand, dequantize, gemm_nt};

impl Core {
    /// Returns the name of the linear: the name of its casts without suffix.
    fn name(&self, casts: &Casts) -> String {
        casts.linear_name(self.gradient.slot().expect("a linear with FP8 products has casts"))
    }

    /// In a comparison pass, compares the codes of the weight with the weight.
    pub(super) fn compare_weight(&self, codes: Operand, loan: &Loan, casts: &mut Casts) -> Result<()> {
        let slot = self.gradient.slot().expect("a linear with FP8 products has casts");
        casts.compare_weight(slot, codes, || self.weight.read(loan))
    }

    /// In a comparison pass, compares the product of the codes `a` and `b` (without addend, from `alone`) with the product of the dequantized
    /// operands. For fprop, keeps sampled outputs for backward.
    pub(super) fn compare_product(
        &self,
        product: WeightProduct,
        [a, b]: [Operand; 2],
        alone: impl FnOnce() -> Result<Tensor>,
        context: &mut Context,
    ) -> Result<()> {
        if !context.casts.compares() || !matches!(a, Operand::Rows(_) | Operand::Columns(_)) {
            return Ok(());
        }
        let by_values = self.compare_rows(product.quantity(), &alone()?, [a, b], &mut context.casts)?;
        match product {
            WeightProduct::Fprop => self.keep_outputs(by_values, context),
            WeightProduct::Dgrad => Ok(()),
        }
    }

    /// In a comparison pass, compares the weight gradient with the product of the dequantized `dy` and `x`. The gradient must hold only this product.
    pub(super) fn compare_wgrad(&self, dy: &View, x: &View, casts: &mut Casts) -> Result<()> {
        if !casts.compares() {
            return Ok(());
        }
        let gradient = self.weight.gradient.get().map(Grad::values).transpose()?.expect("wgrad has run");
        self.compare_rows(Quantity::Wgrad, &gradient, [dy.columns()?, x.columns()?], casts).map(drop)
    }

    /// Compares sampled rows of `product`, the product of the codes `a` and `b`, with the product of the dequantized operands. Returns the product of
    /// the dequantized operands.
    pub(super) fn compare_rows(
        &self,
        which: Quantity,
        product: &Tensor,
        [a, b]: [Operand; 2],
        casts: &mut Casts,
    ) -> Result<Tensor> {
        let (step, compute) = (sampling_step(product.shape()[0]), self.weight.weights.dtype());
        let (a, b) = (dequantize(a, step, compute)?, dequantize(b, 1, compute)?);
        let reference = gemm_nt(Operand::plain(&a), Operand::plain(&b), product.dtype(), Accumulation::Exact)?;
        let name = self.name(casts);
        casts.probe().compare_rows(&name, which, product, step, &reference)?;
        Ok(reference)
    }

    /// Keeps two versions of sampled outputs until backward: `by_codes`, from dequantized operands, and the outputs from operands before the cast.
    fn keep_outputs(&self, by_codes: Tensor, context: &mut Context) -> Result<()> {
        let Context { casts, loan, .. } = context;
        let name = self.name(casts);
        let input = match self.input.slot() {
            Some(slot) => casts.scales.name(slot).to_string(),
            None => format!("{name}.input"),
        };
        let Some(x) = casts.probe().rows_of(&input) else { return Ok(()) };
        let weight = self.weight.read(loan)?;
        let by_values = gemm_nt(Operand::plain(&x), Operand::plain(&weight), by_codes.dtype(), Accumulation::Exact)?;
        casts.probe().keep_outputs(&name, [by_codes, by_values]);
        Ok(())
    }

    /// In a comparison pass, compares the effect on the loss of the two versions of outputs that forward kept.
    pub(super) fn compare_loss_cost(&self, dy: &View, casts: &mut Casts) -> Result<()> {
        if !casts.compares() || self.gradient.slot().is_none() {
            return Ok(());
        }
        let name = self.name(casts);
        let Some(outputs) = casts.probe().take_outputs(&name) else { return Ok(()) };
        let kept = casts.probe().rows_of(&format!("{name}.grad_output"));
        let dy = match (kept, dy) {
            (Some(rows), _) => rows,
            (None, View::Codes(_)) => return Ok(()),
            (None, dy) => casts.probe().sample(dy.value()?)?,
        };
        casts.probe().compare_loss_cost(&name, &outputs, &dy)
    }
}
