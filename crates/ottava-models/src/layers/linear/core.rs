//! The weight of a linear, and its three products.

use crate::layers::cast::OperandCast;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{Gathering, View};
use ottava_recipe::param::Param;
use ottava_recipe::scaling::{Casts, Quantity};
use ottava_recipe::{ProductPrecision, Products};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Accumulation, Operand, gemm_nt, gemm_nt_into, gemm_nt_plus};

/// The weight, the precisions of its products, and the casts of their other operands. Biases, adapters and ranks are handled elsewhere.
pub(super) struct Core {
    pub weight: Param, /* [N, K] */
    pub products: Products,
    pub input: OperandCast,
    pub gradient: OperandCast,
}

/// A product with the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightProduct {
    /// `x · Wᵀ`.
    Fprop,
    /// `dy · W`.
    Dgrad,
}

impl WeightProduct {
    /// Returns the name of the product in comparisons.
    pub fn quantity(self) -> Quantity {
        match self {
            WeightProduct::Fprop => Quantity::Fprop,
            WeightProduct::Dgrad => Quantity::Dgrad,
        }
    }
}

/// The weight in the form that a product reads.
pub struct ReadWeight {
    /// The weight.
    pub view: View,
    /// The accumulation of the product.
    pub how: Accumulation,
}

impl ReadWeight {
    /// Returns the weight as an operand of `product`.
    pub(super) fn operand(&self, product: WeightProduct) -> Result<Operand<'_>> {
        match product {
            WeightProduct::Fprop => self.view.rows(),
            WeightProduct::Dgrad => self.view.columns(),
        }
    }
}

impl Core {
    /// Returns the precisions of the products in this pass.
    pub fn products(&self, casts: &Casts) -> Products {
        if self.gradient.is_cast(casts) { self.products } else { Products::HIGH }
    }

    /// Returns the weight in the form that `product` reads. In a comparison, FP8 codes are compared with the weight. Fprop in high precision measures
    /// it.
    pub fn weight_for(&self, product: WeightProduct, context: &mut Context) -> Result<ReadWeight> {
        let Context { casts, loan, .. } = context;
        let Products { fprop, dgrad, .. } = self.products(casts);
        let precision = match product {
            WeightProduct::Fprop => fprop,
            WeightProduct::Dgrad => dgrad,
        };
        let codes = match (precision, product) {
            (ProductPrecision::Fp8(_), WeightProduct::Fprop) => Some(self.weight.codes_for_forward(loan, casts)?),
            (ProductPrecision::Fp8(_), WeightProduct::Dgrad) => Some(self.weight.codes_for_backward(loan, casts)?),
            (ProductPrecision::High, WeightProduct::Fprop) => {
                self.weight.measure_for_forward(loan, casts)?;
                None
            }
            (ProductPrecision::High, WeightProduct::Dgrad) => None,
        };
        let view = match codes {
            Some(codes) => View::Codes(codes),
            None => View::Value(self.weight.read(loan)?),
        };
        let read = ReadWeight { view, how: precision.accumulation() };
        if precision != ProductPrecision::High {
            self.compare_weight(read.operand(product)?, loan, casts)?;
        }
        Ok(read)
    }

    /// Returns the product of `x` and the weight, plus `addend` if given.
    pub fn multiply(
        &self,
        product: WeightProduct,
        x: &View,
        weight: &ReadWeight,
        addend: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        self.product(product, [x.rows()?, weight.operand(product)?], addend, weight.how, context)
    }

    /// Returns `a · bᵀ` for the operands of `product`, plus `addend` if given, which is added before rounding. In a comparison, the product without
    /// `addend` is compared.
    pub fn product(
        &self,
        product: WeightProduct,
        [a, b]: [Operand; 2],
        addend: Option<&Tensor>,
        how: Accumulation,
        context: &mut Context,
    ) -> Result<Tensor> {
        let alone = || Ok(gemm_nt(a, b, self.weight.weights.dtype(), how)?);
        let result = match addend {
            Some(addend) => gemm_nt_plus(a, b, addend, how)?,
            None => alone()?,
        };
        self.compare_product(product, [a, b], || if addend.is_some() { alone() } else { Ok(result.clone()) }, context)?;
        Ok(result)
    }

    /// Computes [`Core::multiply`] on rows that are still being gathered. This rank's rows are multiplied while the rows of other ranks arrive.
    /// Panics if all rows have arrived.
    pub fn multiply_arriving(&self, product: WeightProduct, x: &Gathering, weight: &ReadWeight) -> Result<Tensor> {
        let (own, range) = x.own().expect("rows of other ranks are on their way");
        let (b, how) = (weight.operand(product)?, weight.how);
        let (rows, outputs, device) = (x.row_count(), b.rows("weight")?, own.tensor().device());
        let first = usize::from(range.start > 0);
        let ranges = [0..range.start, range.clone(), range.end..rows];
        let ranges: Vec<_> = ranges.into_iter().filter(|rows| !rows.is_empty()).collect();
        let elements: Vec<_> = ranges.iter().map(|rows| rows.start * outputs..rows.end * outputs).collect();
        let y = Tensor::empty(device, &[rows * outputs], self.weight.weights.dtype())?;
        let parts = y.split(&elements)?.into_iter().zip(&ranges);
        let mut parts: Vec<_> =
            parts.map(|(part, rows)| part.reshape(&[rows.len(), outputs])).collect::<ottava_tensor::Result<_>>()?;
        x.beside(|| gemm_nt_into(own.rows(), b, &mut parts[first], how))?;
        drop(own);
        let all = x.all()?;
        for (i, rows) in ranges.iter().enumerate().filter(|(i, _)| *i != first) {
            let part = all.row_range(rows.clone())?.expect("each rank has whole groups of rows");
            gemm_nt_into(part.rows(), b, &mut parts[i], how)?;
        }
        Ok(Tensor::join(parts)?.reshape(&[rows, outputs])?)
    }

    /// Adds `dyᵀ · x` to the gradient of the weight if the weight is trained, or defers the product.
    pub fn wgrad(&mut self, dy: &View, x: &View, context: &mut Context) -> Result<()> {
        if !self.weight.is_trained() {
            return Ok(());
        }
        let precision = self.products(&context.casts).wgrad;
        let computed = context.add_wgrad(&mut self.weight, dy, x, None, precision.accumulation())?;
        match computed && precision != ProductPrecision::High {
            true => self.compare_wgrad(dy, x, &mut context.casts),
            false => Ok(()),
        }
    }
}
