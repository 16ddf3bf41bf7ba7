//! A residual branch: one norm, and what reads it.

use super::cast::{OperandCast, SavedOperand};
use super::{Norm, NormSaved};
use crate::context::Context;
use crate::error::Result;
use crate::operand::{ResidualGradient, View, Views};
use crate::param::Param;
use ottava_tensor::Tensor;

/// What stands in a residual branch behind the norm, from its first linear, which reads the norm's operand, to its last, which adds
/// the residual connection. Two in a pair stand beside each other: they read one operand, and both add to the stream.
pub trait Sublayer {
    /// Exactly what backward needs, beside the operand, which is the branch's.
    type Saved;

    /// How the products that read the operand do so.
    fn input(&self) -> OperandCast;

    /// The first cast of the gradient by its output, if one cast alone reads that.
    fn gradient(&self) -> OperandCast;

    /// `residual` plus the function of the operand `x`, `[T, C]`, and what backward needs to know.
    fn forward(&self, x: View, residual: &Tensor, context: &mut Context) -> Result<(Tensor, Self::Saved)>;

    /// What [`Sublayer::forward`] saves, without its output: for a block that is recomputed, whose output nobody reads.
    fn save(&self, x: View, context: &mut Context) -> Result<Self::Saved>;

    /// The gradient by the operand, plus `other` where there is one; adds to the gradients of the parameters.
    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: Self::Saved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param));

    /// [`Sublayer::parameters`], to change them.
    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));
}

/// The operand of a branch in backward: kept by forward, or recomputed from what the norm saved.
#[derive(Clone)]
pub struct BranchOperand<'a> {
    norm: &'a Norm,
    norm_saved: &'a NormSaved,
    cast: OperandCast,
    saved: SavedOperand,
}

impl BranchOperand<'_> {
    /// As wgrad reads it.
    pub fn columns(self, context: &mut Context) -> Result<View> {
        self.norm.operand_columns(self.norm_saved, self.saved, &self.cast, context)
    }

    /// As fprop and wgrad read it, recomputed.
    pub fn views(self, context: &mut Context) -> Result<Views> {
        self.norm.operand_views(self.norm_saved, self.saved, &self.cast, context)
    }
}

/// `y = x + sublayer(norm(x))`.
pub struct Branch<S> {
    /// Normalises what the sublayer reads.
    pub norm: Norm,
    /// What reads it.
    pub sublayer: S,
}

/// Saved by [`Branch`].
pub struct BranchSaved<S: Sublayer> {
    norm: NormSaved,
    operand: SavedOperand,
    sublayer: S::Saved,
}

impl<S: Sublayer> Branch<S> {
    /// `y` `[T, C]`, and what backward needs to know.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, BranchSaved<S>)> {
        let (operand, norm) = self.norm.forward_for(x, &self.sublayer.input(), context)?;
        let (y, sublayer) = self.sublayer.forward(operand.rows, x, context)?;
        Ok((y, BranchSaved { norm, operand: operand.saved, sublayer }))
    }

    /// What [`Branch::forward`] saves, without its output.
    pub fn save(&self, x: &Tensor, context: &mut Context) -> Result<BranchSaved<S>> {
        let (operand, norm) = self.norm.forward_for(x, &self.sublayer.input(), context)?;
        let sublayer = self.sublayer.save(operand.rows, context)?;
        Ok(BranchSaved { norm, operand: operand.saved, sublayer })
    }

    /// The gradient by `x` from the gradient by `y`, with its amax where the cast `next`, which reads it next, needs that.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: BranchSaved<S>,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let BranchSaved { norm, operand, sublayer } = saved;
        let cast = self.sublayer.input();
        let x = BranchOperand { norm: &self.norm, norm_saved: &norm, cast, saved: operand };
        let dresidual = dy.value.clone();
        let dnormed = self.sublayer.backward(dy, sublayer, x, None, context)?;
        self.norm.backward_for(&dnormed, norm, &dresidual, next, context)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        visit(&self.norm.weight);
        self.sublayer.parameters(visit);
    }

    /// [`Branch::parameters`], to change them.
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.norm.weight);
        self.sublayer.parameters_mut(visit);
    }
}

impl<A: Sublayer, B: Sublayer> Sublayer for (A, B) {
    type Saved = (A::Saved, B::Saved);

    fn input(&self) -> OperandCast {
        self.0.input()
    }

    fn gradient(&self) -> OperandCast {
        // Two casts read it, each by a scale of its own.
        OperandCast::NONE
    }

    fn forward(&self, x: View, residual: &Tensor, context: &mut Context) -> Result<(Tensor, Self::Saved)> {
        let (h, first) = self.0.forward(x.clone(), residual, context)?;
        let (y, second) = self.1.forward(x, &h, context)?;
        Ok((y, (first, second)))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<Self::Saved> {
        Ok((self.0.save(x.clone(), context)?, self.1.save(x, context)?))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: Self::Saved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let dx = self.1.backward(dy.value.clone().into(), saved.1, x.clone(), other, context)?;
        self.0.backward(dy, saved.0, x, Some(dx), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.0.parameters(visit);
        self.1.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.0.parameters_mut(visit);
        self.1.parameters_mut(visit);
    }
}
