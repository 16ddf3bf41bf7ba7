//! Compares the FP8 products of a linear with the products of the values of the same codes in the compute type, in a pass that compares.

use super::core::{Core, WeightProduct};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Grad, Loan};
use ottava_recipe::scaling::{Casts, Quantity, sampling_step};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Accumulation, Operand, dequantize, gemm_nt};

impl Core {
    /// Its name, the name of its casts without their suffixes.
    fn name(&self, casts: &Casts) -> String {
        casts.linear_name(self.gradient.slot().expect("a linear with FP8 products has casts"))
    }

    /// Compares the codes of the weight that a product reads with the weight, in a pass that compares.
    pub(super) fn compare_weight(&self, codes: Operand, loan: &Loan, casts: &mut Casts) -> Result<()> {
        let slot = self.gradient.slot().expect("a linear with FP8 products has casts");
        casts.compare_weight(slot, codes, || self.weight.read(loan))
    }

    /// Compares the product `alone` of the codes `a` and `b` with the product of their values, in a pass that compares. Keeps the outputs of
    /// forward.
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

    /// Compares the gradient of the weight, which has only the product of `dy` and `x`, in a pass that compares.
    pub(super) fn compare_wgrad(&self, dy: &View, x: &View, casts: &mut Casts) -> Result<()> {
        if !casts.compares() {
            return Ok(());
        }
        let gradient = self.weight.gradient.get().map(Grad::values).transpose()?.expect("wgrad has run");
        self.compare_rows(Quantity::Wgrad, &gradient, [dy.columns()?, x.columns()?], casts).map(drop)
    }

    /// Compares sampled rows of `product`, the product of the codes `a` and `b`, with the product of their values, which it returns.
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

    /// Keeps the outputs of sampled tokens until backward: `by_codes`, and the outputs of the values that were cast.
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

    /// Compares what both outputs that were kept cost in the loss, in a pass that compares.
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
