//! Sublayers: the functions that a residual branch computes of its operand.

use super::cast::{OperandCast, SavedOperand};
use super::{Adaptable, Norm, NormSaved};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::SavedActivation;
use std::any::Any;

/// Attention, an MLP or another function of the operand of a [`Branch`](super::Branch). The first linear reads the operand, and the last linear adds
/// the residual connection. One `forward` serves training, recomputation and inference. The [`Context`] selects one of them.
pub trait Sublayer {
    /// Returns the cast of the operand.
    fn input(&self) -> OperandCast;

    /// Returns the cast that reads the gradient by the output first, or [`OperandCast::NONE`] if several casts read it.
    fn gradient(&self) -> OperandCast;

    /// Returns the function of the operand `x`, plus `residual` `[T, C]` if given, and the values for backward.
    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)>;

    /// Returns the values that [`Sublayer::forward`] saves, without computing its output. Recomputed blocks use it.
    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved>;

    /// Returns the gradient by the operand, plus `other` if given. Adds to the gradients of the parameters.
    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param));

    /// Calls `visit` for each parameter mutably, in the order of [`Sublayer::parameters`].
    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));

    /// Calls `visit` for each linear that can have an adapter, always in the same order.
    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable));
}

/// The values that a [`Sublayer`] saves for its backward. The branch saves the operand.
pub struct SublayerSaved(Box<dyn Any>);

impl SublayerSaved {
    /// Wraps the values that a sublayer saved.
    pub fn new<T: 'static>(saved: T) -> SublayerSaved {
        SublayerSaved(Box::new(saved))
    }

    /// Returns the values that the sublayer saved. Panics if `T` is another type.
    pub fn into<T: 'static>(self) -> T {
        *self.0.downcast().expect("a sublayer receives what it saved")
    }
}

/// The operand of a branch in backward. Forward has saved the operand, or it is recomputed from the values that the branch saved.
#[derive(Clone)]
pub struct BranchOperand<'a> {
    source: Source<'a>,
    cast: OperandCast,
    saved: SavedOperand,
}

/// The source for recomputing an operand.
#[derive(Clone)]
enum Source<'a> {
    Norm(&'a Norm, &'a NormSaved),
    /// The input of the branch. `None` if the operand is saved.
    Input(Option<SavedActivation>),
}

impl<'a> BranchOperand<'a> {
    /// Creates the operand that forward `saved` through `cast`. It can be recomputed from what `norm` saved or, without a norm, from the `input` of
    /// the branch.
    pub(super) fn new(
        norm: Option<(&'a Norm, &'a NormSaved)>,
        input: Option<SavedActivation>,
        cast: OperandCast,
        saved: SavedOperand,
    ) -> BranchOperand<'a> {
        let source = norm.map_or(Source::Input(input), |(norm, saved)| Source::Norm(norm, saved));
        BranchOperand { source, cast, saved }
    }

    /// Returns the view that wgrad reads.
    pub fn columns(self, context: &mut Context) -> Result<View> {
        match self.source {
            Source::Norm(norm, saved) => norm.operand_columns(saved, self.saved, &self.cast, context),
            Source::Input(x) => {
                self.saved.into_columns().or_else(|frozen| self.cast.recast_columns(value(x)?, &frozen, context))
            }
        }
    }

    /// Recomputes the operand, and returns the views that fprop and wgrad read.
    pub fn views(self, context: &mut Context) -> Result<Views> {
        match self.source {
            Source::Norm(norm, saved) => norm.operand_views(saved, self.saved, &self.cast, context),
            Source::Input(x) => self.cast.recast_both(value(x)?, &self.saved.into_frozen(), context),
        }
    }
}

fn value(input: Option<SavedActivation>) -> Result<Tensor> {
    Ok(input.expect("a branch saves its input if its operand is recomputed").value()?)
}
