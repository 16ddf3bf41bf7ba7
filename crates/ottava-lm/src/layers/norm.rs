//! RMSNorm, whose output is written in the form that the next linears read.

use super::cast::{CastInput, OperandCast, SavedOperand};
use crate::context::Context;
use crate::error::Result;
use crate::operand::{ResidualGradient, View, Views};
use crate::param::{Builder, Init, Param, Part};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Output, Produced, RmsnormBackward, SavedActivation, rmsnorm, rmsnorm_backward, rmsnorm_to};

/// `y = x / sqrt(mean(x²) + eps) · weight`.
pub struct Norm {
    /// `[C]`.
    pub weight: Param,
    eps: f64,
}

/// Saved by [`Norm`].
pub struct NormSaved {
    x: SavedActivation, /* [T, C] */
    rstd: Tensor,       /* [T] */
}

impl Norm {
    /// A norm over `channels` whose weight is called `name` + `.weight`.
    pub fn new(build: &mut Builder, name: &str, channels: usize, eps: f64) -> Result<Norm> {
        let part = Part { name: format!("{name}.weight"), shape: vec![channels] };
        Ok(Norm { weight: Param::new(build, vec![part], Init::Ones)?, eps })
    }

    /// Normalises `x`.
    pub fn forward(&self, x: &Tensor, context: &Context) -> Result<(Tensor, NormSaved)> {
        let (y, rstd) = rmsnorm(x, &self.weight.value()?, self.eps)?;
        Ok((y, NormSaved { x: context.save(x.clone())?, rstd }))
    }

    /// Normalises `x` for linears that read it through the cast `reader`.
    pub fn forward_for(
        &self,
        x: &Tensor,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<(CastInput, NormSaved)> {
        let (weight, copies) = (self.weight.value()?, context.operand_copies());
        let op = |output: Output| rmsnorm_to(x, &weight, self.eps, output);
        let (y, rstd) = reader.produce_input(copies, &mut context.casts, op)?;
        Ok((y, NormSaved { x: context.save(x.clone())?, rstd }))
    }

    /// The view that wgrad reads of the operand of [`Norm::forward_for`], saved or recomputed.
    pub fn operand_columns(
        &self,
        saved: &NormSaved,
        operand: SavedOperand,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<View> {
        operand.into_columns().or_else(|frozen| {
            reader.reproduce_columns(&frozen, &mut context.casts, |output| self.recompute(saved, output))
        })
    }

    /// The recomputed views that fprop and wgrad read of the operand of [`Norm::forward_for`].
    pub fn operand_views(
        &self,
        saved: &NormSaved,
        operand: SavedOperand,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<Views> {
        let frozen = operand.into_frozen();
        reader.reproduce_both(&frozen, &mut context.casts, |output| self.recompute(saved, output))
    }

    fn recompute(&self, saved: &NormSaved, output: Output) -> Result<Produced> {
        let (x, weight) = (saved.x.value()?, self.weight.value()?);
        Ok(rmsnorm_to(&x, &weight, self.eps, output)?.0)
    }

    /// The gradient by `x`.
    pub fn backward(&mut self, dy: &Tensor, saved: NormSaved) -> Result<Tensor> {
        self.backward_plus(dy, saved, RmsnormBackward { dresidual: None, amax: None })
    }

    /// The gradient by `x`, plus `dresidual`, the gradient of the residual connection; with its amax if `reader`, the cast that reads it,
    /// needs that.
    pub fn backward_for(
        &mut self,
        dy: &Tensor,
        saved: NormSaved,
        dresidual: &Tensor,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let mut amax = reader.amax_for(&mut context.casts)?;
        let plus = RmsnormBackward { dresidual: Some(dresidual), amax: amax.as_mut() };
        let value = self.backward_plus(dy, saved, plus)?;
        Ok(ResidualGradient { value, amax })
    }

    fn backward_plus(&mut self, dy: &Tensor, saved: NormSaved, plus: RmsnormBackward) -> Result<Tensor> {
        let weight = self.weight.value()?;
        let (weight, grad, NormSaved { x, rstd }) = (&weight, self.weight.grad_mut()?, &saved);
        Ok(rmsnorm_backward(dy, x, weight, rstd, grad, plus)?)
    }
}
