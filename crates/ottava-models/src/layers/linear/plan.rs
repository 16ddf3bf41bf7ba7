//! The plan of a linear's product: the work that overlaps with the product, and the work that follows it.

use super::core::{ReadWeight, WeightProduct};
use super::exchange::Exchange;
use super::{Adapter, Linear};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{Gathering, View};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{add, add_bias, scale_columns};

/// The overlap of a product with the exchange among ranks.
enum Overlap<'a> {
    /// All rows have arrived, and ranks add nothing.
    Nothing,
    /// This rank's rows are multiplied while the rows of other ranks arrive.
    Arriving(&'a Gathering),
    /// The rows of other ranks are computed first. They are sent while this rank's rows are computed.
    Leaving,
    /// All rows are computed before the exchange, because block scales cannot be divided by rows, and comparisons sample whole products.
    Afterwards,
}

/// The operation that follows a product with the weight, before the bias.
enum Epilogue<'a> {
    /// Nothing.
    Nothing,
    /// The product of an adapter is added.
    Adapter(&'a Adapter),
    /// The product of an adapter is added, and factors `[N]` multiply the outputs.
    Magnitudes(&'a Adapter, Tensor),
}

impl Linear {
    /// Returns whether each rank has a partial sum of this product.
    pub(super) fn sums(&self, product: WeightProduct) -> bool {
        self.exchange == Exchange::SumsOf(product)
    }

    /// Returns the product of `x` and the weight, with adapter and bias, plus `addend` `[T, N]` or `[T, K]` if given. If ranks add partial sums and
    /// divide tokens, the result has this rank's rows. Otherwise it has all rows.
    pub(super) fn multiply(
        &self,
        product: WeightProduct,
        x: &View,
        addend: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let weight = &self.core.weight_for(product, context)?;
        let (overlap, epilogue) = (self.overlap(product, x, addend, context)?, &self.epilogue(product, context)?);
        let name = self.core.weight.identity.name();
        match overlap {
            Overlap::Nothing => self.part(product, x, weight, epilogue, addend, context),
            Overlap::Arriving(rows) => {
                let y = self.core.multiply_arriving(product, rows, weight)?;
                self.with_bias(product, y, context)
            }
            Overlap::Leaving => {
                let (ranks, rows) = (context.ranks, x.row_count());
                let mut partial = |range| {
                    let x = x.row_range(range)?.expect("all ranks have equal rows");
                    self.part(product, &x, weight, epilogue, None, context)
                };
                ranks.sum_computed_rows(Axis::Tensor, name, rows, &mut partial, addend)
            }
            Overlap::Afterwards => {
                let partial = self.part(product, x, weight, epilogue, None, context)?;
                context.sum(name, partial, addend)
            }
        }
    }

    fn overlap<'a>(
        &self,
        product: WeightProduct,
        x: &'a View,
        addend: Option<&Tensor>,
        context: &Context,
    ) -> Result<Overlap<'a>> {
        // Arriving rows are written to parts of one matrix. This excludes an addend and an adapter.
        match (x, addend, &self.adapter) {
            (View::Gathering(rows), None, None) if rows.own().is_some() => return Ok(Overlap::Arriving(rows)),
            _ if !self.sums(product) => return Ok(Overlap::Nothing),
            _ => {}
        }
        let needs_all_rows = self.adapter.as_ref().is_some_and(Adapter::has_dropout);
        let divides = context.divides_tokens() && !context.casts.compares() && !needs_all_rows;
        let own = context.place().range(x.row_count());
        Ok(if divides && x.row_range(own)?.is_some() { Overlap::Leaving } else { Overlap::Afterwards })
    }

    fn epilogue(&self, product: WeightProduct, context: &mut Context) -> Result<Epilogue<'_>> {
        // Backward multiplies the gradient by the factors before the gradient is cast.
        let factors = match product {
            WeightProduct::Fprop if context.casts.mode.adapts() => self.factors(context)?,
            WeightProduct::Fprop => return Ok(Epilogue::Nothing),
            WeightProduct::Dgrad => None,
        };
        Ok(match (&self.adapter, factors) {
            (None, _) => Epilogue::Nothing,
            (Some(adapter), None) => Epilogue::Adapter(adapter),
            (Some(adapter), Some(factors)) => Epilogue::Magnitudes(adapter, factors),
        })
    }

    /// Returns the product of the rows `x` with the weight, then the epilogue, the addend and the bias.
    fn part(
        &self,
        product: WeightProduct,
        x: &View,
        weight: &ReadWeight,
        epilogue: &Epilogue,
        addend: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let y = match epilogue {
            Epilogue::Nothing => self.core.multiply(product, x, weight, addend, context)?,
            Epilogue::Adapter(adapter) => self.adapted(product, adapter, x, weight, addend, context)?,
            Epilogue::Magnitudes(adapter, factors) => {
                let y = scale_columns(&self.adapted(product, adapter, x, weight, None, context)?, factors)?;
                match addend {
                    Some(addend) => add(&y, addend)?,
                    None => y,
                }
            }
        };
        self.with_bias(product, y, context)
    }

    /// Returns the product of `x` and the weight, plus the product of the adapter, plus `addend` if given.
    pub(super) fn adapted(
        &self,
        product: WeightProduct,
        adapter: &Adapter,
        x: &View,
        weight: &ReadWeight,
        addend: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let adapted = match product {
            WeightProduct::Fprop => adapter.forward(x.value()?, addend, context)?,
            WeightProduct::Dgrad => adapter.dgrad(x.value()?, addend, context)?,
        };
        self.core.multiply(product, x, weight, Some(&adapted), context)
    }

    /// Returns `y` plus the bias if `product` is fprop. If ranks add partial sums, only the first rank adds the bias.
    pub(super) fn with_bias(&self, product: WeightProduct, mut y: Tensor, context: &Context) -> Result<Tensor> {
        let adds_bias = product == WeightProduct::Fprop && !(self.sums(product) && context.place().rank > 0);
        if let Some(bias) = self.bias.as_ref().filter(|_| adds_bias) {
            add_bias(&mut y, &bias.weights.value()?)?;
        }
        Ok(y)
    }
}
