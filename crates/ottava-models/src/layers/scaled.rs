//! A constant factor of one sublayer of a branch.

use super::cast::OperandCast;
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Factor};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::add;

/// `y = factor · sublayer(x)`.
pub struct ScaledSublayer {
    sublayer: Box<dyn Sublayer>,
    factor: Factor,
}

impl ScaledSublayer {
    /// Multiplies the output of `sublayer` by `factor`.
    pub fn new(sublayer: Box<dyn Sublayer>, factor: Factor) -> ScaledSublayer {
        ScaledSublayer { sublayer, factor }
    }
}

impl Sublayer for ScaledSublayer {
    fn input(&self) -> OperandCast {
        self.sublayer.input()
    }

    /// Returns no cast: the factor reads the gradient first.
    fn gradient(&self) -> OperandCast {
        OperandCast::NONE
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (y, saved) = self.sublayer.forward(x, None, context)?;
        let y = self.factor.apply(y)?;
        Ok((residual.map_or(Ok(y.clone()), |residual| add(residual, &y))?, saved))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        self.sublayer.save(x, context)
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let dy = self.factor.apply(dy.value)?;
        self.sublayer.backward(dy.into(), saved, x, other, context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.sublayer.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.sublayer.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.sublayer.linears_mut(visit);
    }
}
