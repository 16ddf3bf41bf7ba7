//! A residual branch: sublayers with the norms before and after them, and the residual connection.

use super::cast::{CastInput, OperandCast, SavedOperand};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Factor, Norm, NormSaved};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{SavedActivation, add};

/// `y = last(residual + factor · after(Σ sublayer(before(x))))`. A missing norm is the identity. Usually, the residual is `x`.
pub struct Branch {
    /// The norm of the operand. All sublayers read its output.
    before: Option<Norm>,
    sublayers: Vec<Box<dyn Sublayer>>,
    /// The norm of the sum of the sublayers' outputs.
    after: Option<Norm>,
    /// The norm after the residual connection.
    last: Option<Norm>,
    factor: Factor,
}

/// The values that forward of [`Branch`] saves.
pub struct BranchSaved {
    before: Option<NormSaved>,
    /// The input `[T, C]`, if the branch has no norm before and the operand is recomputed.
    input: Option<SavedActivation>,
    operand: SavedOperand,
    /// The values that each sublayer saved.
    sublayers: Vec<SublayerSaved>,
    after: Option<NormSaved>,
    last: Option<NormSaved>,
}

impl Branch {
    /// Creates the branch `y = x + Σ sublayer(before(x))`. All sublayers read the operand through the cast of the first sublayer. Panics if
    /// `sublayers` is empty.
    pub fn new(before: impl Into<Option<Norm>>, sublayers: Vec<Box<dyn Sublayer>>) -> Branch {
        assert!(!sublayers.is_empty(), "a branch has a sublayer");
        Branch { before: before.into(), sublayers, after: None, last: None, factor: Factor::default() }
    }

    /// Adds a norm of the output, before the residual connection.
    pub fn normalised(self, after: impl Into<Option<Norm>>) -> Branch {
        Branch { after: after.into(), ..self }
    }

    /// Adds a norm after the residual connection. The residual is then the input of the branch.
    pub fn normalised_last(self, last: impl Into<Option<Norm>>) -> Branch {
        Branch { last: last.into(), ..self }
    }

    /// Adds a factor of the output, before the residual connection.
    pub fn multiplied(self, factor: Factor) -> Branch {
        Branch { factor, ..self }
    }

    /// Returns whether the last sublayer adds the residual connection in its product.
    fn adds_in_product(&self) -> bool {
        self.after.is_none() && self.factor.is_one()
    }

    /// Returns the cast of the operand.
    fn input(&self) -> OperandCast {
        self.sublayers[0].input()
    }

    /// Returns the cast that reads the gradient by the output first. Returns [`OperandCast::NONE`] if a norm or a factor reads the gradient, or if
    /// several sublayers read it, each with its own scale.
    pub fn gradient(&self) -> OperandCast {
        match (self.sublayers.as_slice(), self.adds_in_product()) {
            ([one], true) if self.last.is_none() => one.gradient(),
            _ => OperandCast::NONE,
        }
    }

    /// Returns the operand of the sublayers, and a [`BranchSaved`] without the values that sublayers and the norm after them save.
    fn operand(&self, x: &Tensor, context: &mut Context) -> Result<(View, BranchSaved)> {
        let (mut before, mut input) = (None, None);
        let CastInput { rows, saved: operand } = match &self.before {
            Some(norm) => {
                let (operand, saved) = norm.forward_for(x, &self.input(), context)?;
                before = Some(saved);
                operand
            }
            None => {
                input = context.recompute.operands().then(|| context.save(x.clone())).transpose()?;
                self.input().cast_input(x.clone(), context.operand_copies(), context)?
            }
        };
        Ok((rows, BranchSaved { before, input, operand, sublayers: Vec::new(), after: None, last: None }))
    }

    /// Returns `y` `[T, C]` and the values for backward. `residual` is what the branch adds to.
    pub fn forward(&self, x: &Tensor, residual: &Tensor, context: &mut Context) -> Result<(Tensor, BranchSaved)> {
        let (operand, mut saved) = self.operand(x, context)?;
        // The last linear of a sublayer adds the sum of the preceding sublayers. The sum starts with the residual stream unless a norm or a factor
        // follows.
        let mut sum = self.adds_in_product().then(|| residual.clone());
        for (sublayer, operand) in self.sublayers.iter().zip(copies(operand, self.sublayers.len())) {
            let (y, of_sublayer) = sublayer.forward(operand, sum.as_ref(), context)?;
            sum = Some(y);
            saved.sublayers.push(of_sublayer);
        }
        let mut y = sum.expect("a branch has a sublayer");
        if let Some(norm) = &self.after {
            let (normed, of_norm) = norm.forward(&y, context)?;
            (y, saved.after) = (normed, Some(of_norm));
        }
        if !self.adds_in_product() {
            y = add(residual, &self.factor.apply(y)?)?;
        }
        if let Some(norm) = &self.last {
            let (normed, of_norm) = norm.forward(&y, context)?;
            (y, saved.last) = (normed, Some(of_norm));
        }
        Ok((y, saved))
    }

    /// Returns the values that [`Branch::forward`] saves, for recomputation. The output is computed only if a norm reads it.
    pub fn save(&self, x: &Tensor, context: &mut Context) -> Result<BranchSaved> {
        if self.after.is_some() || self.last.is_some() {
            return Ok(self.forward(x, x, context)?.1);
        }
        let (operand, mut saved) = self.operand(x, context)?;
        for (sublayer, operand) in self.sublayers.iter().zip(copies(operand, self.sublayers.len())) {
            saved.sublayers.push(sublayer.save(operand, context)?);
        }
        Ok(saved)
    }

    /// Returns the gradient by `x` from the gradient by `y`, plus `dresidual`, the gradient by `x` of all else that reads it. If the cast `next`, which
    /// reads the result, needs an amax, the amax is computed too.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        dresidual: &Tensor,
        saved: BranchSaved,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let cast = self.input();
        let BranchSaved { before, input, operand, sublayers, after, last } = saved;
        let (dy, dresidual) = match (&mut self.last, last) {
            (Some(norm), Some(saved)) => {
                let dsum = norm.backward(&dy.value, saved)?;
                (dsum.clone().into(), dsum)
            }
            _ => (dy, dresidual.clone()),
        };
        let dy = match self.factor.is_one() {
            true => dy,
            false => self.factor.apply(dy.value)?.into(),
        };
        let dsum = match (&mut self.after, after) {
            (Some(norm), Some(saved)) => norm.backward(&dy.value, saved)?.into(),
            _ => dy,
        };
        let operand = BranchOperand::new(self.before.as_ref().zip(before.as_ref()), input, cast, operand);
        let mut doperand = None;
        let count = self.sublayers.len();
        let reads = copies(dsum, count).zip(copies(operand, count));
        for ((sublayer, saved), (dy, x)) in self.sublayers.iter_mut().zip(sublayers).rev().zip(reads) {
            doperand = Some(sublayer.backward(dy, saved, x, doperand, context)?);
        }
        let doperand = doperand.expect("a branch has a sublayer");
        match (&mut self.before, before) {
            (Some(norm), Some(saved)) => norm.backward_for(&doperand, saved, &dresidual, next, context),
            _ => Ok(add(&dresidual, &doperand)?.into()),
        }
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.before.iter().for_each(|norm| norm.parameters(visit));
        self.sublayers.iter().for_each(|sublayer| sublayer.parameters(visit));
        self.after.iter().chain(&self.last).for_each(|norm| norm.parameters(visit));
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Branch::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.before.iter_mut().for_each(|norm| norm.parameters_mut(visit));
        self.sublayers.iter_mut().for_each(|sublayer| sublayer.parameters_mut(visit));
        self.after.iter_mut().chain(&mut self.last).for_each(|norm| norm.parameters_mut(visit));
    }

    /// Calls `visit` for each linear that can have an adapter, always in the same order.
    pub fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.sublayers.iter_mut().for_each(|sublayer| sublayer.linears_mut(visit));
    }
}

/// Returns `count` copies of `value`. The last copy is `value` itself, so its memory is freed when the last copy is dropped.
fn copies<T: Clone>(value: T, count: usize) -> impl Iterator<Item = T> {
    let mut value = Some(value);
    (0..count).map(move |i| if i + 1 == count { value.take() } else { value.clone() }.expect("taken last"))
}
