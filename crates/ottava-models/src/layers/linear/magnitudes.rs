//! Magnitudes of a linear with DoRA: factors of its outputs, computed from the weight that products read.

use super::Linear;
use super::core::WeightProduct;
use ottava_common::error::Result;
use ottava_recipe::ProductPrecision;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{CodeCopies, Operand, dequantize};

impl Linear {
    /// Returns whether the outputs have magnitudes.
    pub(super) fn has_magnitudes(&self) -> bool {
        self.adapter.as_ref().is_some_and(super::Adapter::has_magnitudes)
    }

    /// Returns the factors of the outputs, `[N]`, or `None` without magnitudes. If products read codes, the norms are taken of the dequantized
    /// weight. If ranks divide the inputs, the norms include the columns of all ranks.
    pub(super) fn factors(&self, context: &mut Context) -> Result<Option<Tensor>> {
        let Some(adapter) = self.adapter.as_ref().filter(|adapter| adapter.has_magnitudes()) else { return Ok(None) };
        let (ranks, sums) = (context.ranks, self.sums(WeightProduct::Fprop));
        let Context { casts, loan, .. } = context;
        let weight = match self.core.products(casts).fprop {
            ProductPrecision::Fp8(_) => {
                let mode = casts.mode.recomputation();
                let codes = self.core.weight.codes_for_forward(loan, &mut casts.in_mode(mode))?;
                dequantize(Operand::Rows(&codes), 1, self.core.weight.weights.dtype())?
            }
            _ => self.core.weight.read(loan)?,
        };
        let sum = |squares: Tensor| match sums {
            true => ranks.sum(Axis::Tensor, self.core.weight.identity.name(), &squares, None),
            false => Ok(squares),
        };
        adapter.factors(&weight, loan, sum).map(Some)
    }

    /// Recomputes the outputs before the factors for the input `x`, bit-identical to forward. If ranks divide the inputs, the outputs are this rank's
    /// partial sums.
    pub(super) fn recompute_unscaled(&self, x: &Tensor, context: &mut Context) -> Result<Tensor> {
        let casts = &mut context.casts;
        let mode = casts.mode;
        casts.mode = mode.recomputation();
        let view = match (self.core.input.slot(), self.core.products(casts).fprop) {
            (Some(slot), ProductPrecision::Fp8(_)) => {
                let frozen = casts.freeze(slot, x)?;
                View::CodesAndValue(casts.requantize(slot, &frozen, x, CodeCopies::Rows)?, x.clone())
            }
            _ => View::Value(x.clone()),
        };
        let y = self.core.weight_for(WeightProduct::Fprop, context).and_then(|weight| {
            let adapter = self.adapter.as_ref().expect("it has magnitudes");
            self.adapted(WeightProduct::Fprop, adapter, &view, &weight, None, context)
        });
        context.casts.mode = mode;
        y
    }
}
