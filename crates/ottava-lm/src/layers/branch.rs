//! A residual branch: a norm, and the sublayer that reads it.

use super::cast::{OperandCast, SavedOperand};
use super::{Norm, NormSaved};
use crate::context::Context;
use crate::error::Result;
use crate::operand::{ResidualGradient, View, Views};
use crate::param::Param;
use ottava_tensor::Tensor;

/// The part of a residual branch after the norm, from its first linear, which reads the norm's output, to its last, which adds the
/// residual
/// connection. A pair of sublayers is one too: both read one operand and add to the residual stream.
pub trait Sublayer {
    /// What backward needs, except the operand, which the branch saves.
    type Saved;

    /// The cast of the operand.
    fn input(&self) -> OperandCast;

    /// The cast that reads the gradient by its output first; [`OperandCast::NONE`] if several do.
    fn gradient(&self) -> OperandCast;

    /// `residual` plus the function of the operand `x`, `[T, C]`, and what backward needs.
    fn forward(&self, x: View, residual: &Tensor, context: &mut Context) -> Result<(Tensor, Self::Saved)>;

    /// What [`Sublayer::forward`] saves, without computing its output: for recomputed blocks.
    fn save(&self, x: View, context: &mut Context) -> Result<Self::Saved>;

    /// The gradient by the operand, plus `other` if given; adds to the gradients of the parameters.
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

    /// [`Sublayer::parameters`], mutably.
    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));
}

/// The operand of a branch in backward: saved by forward, or recomputed from what the norm saved.
#[derive(Clone)]
pub struct BranchOperand<'a> {
    norm: &'a Norm,
    norm_saved: &'a NormSaved,
    cast: OperandCast,
    saved: SavedOperand,
}

impl BranchOperand<'_> {
    /// The view that wgrad reads.
    pub fn columns(self, context: &mut Context) -> Result<View> {
        self.norm.operand_columns(self.norm_saved, self.saved, &self.cast, context)
    }

    /// The views that fprop and wgrad read, recomputed.
    pub fn views(self, context: &mut Context) -> Result<Views> {
        self.norm.operand_views(self.norm_saved, self.saved, &self.cast, context)
    }
}

/// `y = x + sublayer(norm(x))`.
pub struct Branch<S> {
    /// The norm of the sublayer's input.
    pub norm: Norm,
    /// Attention, MLP, or a pair.
    pub sublayer: S,
}

/// Saved by [`Branch`].
pub struct BranchSaved<S: Sublayer> {
    norm: NormSaved,
    operand: SavedOperand,
    sublayer: S::Saved,
}

impl<S: Sublayer> Branch<S> {
    /// `y` `[T, C]`, and what backward needs.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, BranchSaved<S>)> {
        let (operand, norm) = self.norm.forward_for(x, &self.sublayer.input(), context)?;
        let (y, sublayer) = self.sublayer.forward(operand.rows, x, context)?;
        Ok((y, BranchSaved { norm, operand: operand.saved, sublayer }))
    }

    /// What [`Branch::forward`] saves, without computing its output.
    pub fn save(&self, x: &Tensor, context: &mut Context) -> Result<BranchSaved<S>> {
        let (operand, norm) = self.norm.forward_for(x, &self.sublayer.input(), context)?;
        let sublayer = self.sublayer.save(operand.rows, context)?;
        Ok(BranchSaved { norm, operand: operand.saved, sublayer })
    }

    /// The gradient by `x` from the gradient by `y`, with its amax if `next`, the cast that reads it, needs that.
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
        self.norm.parameters(visit);
        self.sublayer.parameters(visit);
    }

    /// [`Branch::parameters`], mutably.
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.norm.parameters_mut(visit);
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
