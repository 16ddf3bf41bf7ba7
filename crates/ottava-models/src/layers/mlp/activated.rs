//! The linear after an activation, fused with the activation. The activation writes the linear's operand. Its backward writes the gradient that
//! the preceding linear reads.

use super::super::cast::{CastInput, OperandCast, SavedOperand, copies_without_transpose};
use super::super::{ColumnScales, Linear, LinearConfig, ReadWeight, SmoothCasts};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, Param};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Activation, Output, SavedActivation, activation, activation_backward_to, activation_compressing, activation_to,
    product_activation_to,
};

/// `y = activation(hidden) · Wᵀ + b`. Smooth-SwiGLU may scale the input `activation(hidden)` by column.
pub struct ActivatedLinear {
    activation: Activation,
    linear: Linear, /* [C, F] */
    smooth: Option<SmoothCasts>,
}

/// The values that forward of [`ActivatedLinear`] saves.
pub struct ActivatedSaved {
    hidden: SavedActivation, /* [T, 2F], or [T, F] without a gate */
    operand: ActivatedOperand,
}

/// The form in which forward saves the activation's output.
enum ActivatedOperand {
    Plain(SavedOperand),
    Smooth(SmoothCasts, ColumnScales),
}

impl ActivatedLinear {
    /// Creates the linear of `config` after `activation`.
    pub fn new(build: &mut Builder, config: LinearConfig, activation: Activation) -> Result<ActivatedLinear> {
        let (linear, smooth) = Linear::after_activation(build, config)?;
        Ok(ActivatedLinear { activation, linear, smooth })
    }

    /// Returns the cast of the gradient by the output.
    pub fn gradient(&self) -> OperandCast {
        self.linear.gradient()
    }

    /// Returns `y`, plus `residual` `[T, C]` if given, and the values for backward.
    pub fn forward(
        &self,
        hidden: Tensor,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, ActivatedSaved)> {
        if let Some(casts) = self.smooth_in(context) {
            let (activated, hidden) = (activation(self.activation, &hidden)?, context.save(hidden)?);
            let (y, scales) = casts.forward(&self.linear, &activated, residual, context)?;
            return Ok((y, ActivatedSaved { hidden, operand: ActivatedOperand::Smooth(casts, scales) }));
        }
        let (activated, hidden) = self.activate(hidden, context)?;
        let y = self.linear.fprop(&activated.rows, residual, context)?;
        Ok((y, ActivatedSaved { hidden, operand: ActivatedOperand::Plain(activated.saved) }))
    }

    /// Runs forward on the output of the linear `before` for `x`, without writing this output. Returns `None` unless this is inference and the
    /// activation can read the product of `before` directly.
    pub fn forward_product(
        &self,
        x: &View,
        before: &Linear,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Option<Tensor>> {
        let input = self.linear.input();
        // With row scales, `produce_input` runs the op once.
        if self.smooth.is_some() || !input.writes_rows(&context.casts) {
            return Ok(None);
        }
        let Some(ReadWeight { view, how }) = before.sole_weight(x, context)? else { return Ok(None) };
        let (operands, dtype) = ([x.rows()?, view.rows()?], before.dtype());
        let copies = copies_without_transpose(context, &input);
        let (activated, ()) = input.produce_input(copies, context, |output| {
            Ok((product_activation_to(self.activation, operands, dtype, how, output)?, ()))
        })?;
        self.linear.fprop(&activated.rows, residual, context).map(Some)
    }

    /// Returns the values that [`ActivatedLinear::forward`] saves, without computing its output.
    pub fn save(&self, hidden: Tensor, context: &mut Context) -> Result<ActivatedSaved> {
        if self.smooth_in(context).is_some() {
            return Ok(self.forward(hidden, None, context)?.1);
        }
        let (activated, hidden) = self.activate(hidden, context)?;
        Ok(ActivatedSaved { hidden, operand: ActivatedOperand::Plain(activated.saved) })
    }

    /// Returns the casts of a smoothed input, if the products of this pass read a smoothed input.
    fn smooth_in(&self, context: &Context) -> Option<SmoothCasts> {
        self.smooth.filter(|_| self.linear.gradient().is_cast(&context.casts))
    }

    /// Returns the operand, and the part of `hidden` that backward needs.
    fn activate(&self, hidden: Tensor, context: &mut Context) -> Result<(CastInput, SavedActivation)> {
        let input = self.linear.input();
        // The backward kernel of the activation writes the transposed codes, so forward does not.
        let (copies, compresses) = (copies_without_transpose(context, &input), context.compresses());
        let (activated, compressed) = input.produce_input(copies, context, |output| {
            if compresses && !matches!(output, Output::Amax { .. }) {
                let (activated, hidden) = activation_compressing(self.activation, &hidden, output)?;
                return Ok((activated, Some(hidden)));
            }
            Ok((activation_to(self.activation, &hidden, output)?, None))
        })?;
        if let Some(casts) = self.smooth {
            casts.measure(&self.linear, &activated.rows, context)?;
        }
        Ok((activated, compressed.map_or_else(|| SavedActivation::Exact(hidden), SavedActivation::Compressed)))
    }

    /// Returns the gradient by `hidden`, in the views that `before` (the linear that computed `hidden`) reads. Adds to the gradients of this
    /// linear.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: ActivatedSaved,
        before: &mut Linear,
        context: &mut Context,
    ) -> Result<Views> {
        let dy = self.linear.cast_gradient(dy, context)?;
        let ActivatedSaved { hidden, operand } = saved;
        match operand {
            ActivatedOperand::Plain(operand) => self.backward_plain(dy, hidden, operand, before, context),
            ActivatedOperand::Smooth(casts, scales) => {
                let Views { rows, columns: dy } = dy;
                let dactivated = casts.dgrad(&self.linear, &rows, &scales, context)?;
                drop(rows);
                let dhidden = self.produce_dhidden(&dactivated, &hidden, before, context)?;
                drop(dactivated);
                let activated = activation(self.activation, &hidden.value()?)?;
                drop(hidden);
                casts.wgrad(&mut self.linear, &dy, &activated, &scales, context)?;
                Ok(dhidden)
            }
        }
    }

    fn backward_plain(
        &mut self,
        dy: Views,
        hidden: SavedActivation,
        operand: SavedOperand,
        before: &mut Linear,
        context: &mut Context,
    ) -> Result<Views> {
        let (Views { rows, columns: dy }, input) = (dy, self.linear.input());
        let dactivated = self.linear.dgrad(&rows, None, context)?;
        drop(rows);
        let (dhidden, activated) = match (operand.into_columns(), input.fused(&context.casts)) {
            // The backward kernel of the activation reads `hidden`, so it can also write the transposed codes. This path always measures.
            (Err(frozen), Some(slot)) if context.mode().measures() => {
                before.produce_gradient_and_recast(slot, &frozen, context, |output, activated| {
                    Ok(activation_backward_to(self.activation, &dactivated, &hidden, output, activated)?)
                })?
            }
            (activated, _) => {
                let activated = activated.or_else(|frozen| {
                    let value = activation(self.activation, &hidden.value()?)?;
                    input.recast_columns(value, &frozen, context)
                })?;
                (self.produce_dhidden(&dactivated, &hidden, before, context)?, activated)
            }
        };
        drop((hidden, dactivated));
        self.linear.wgrad(&dy, &activated, context)?;
        Ok(dhidden)
    }

    fn produce_dhidden(
        &self,
        dactivated: &Tensor,
        hidden: &SavedActivation,
        before: &mut Linear,
        context: &mut Context,
    ) -> Result<Views> {
        before.produce_gradient(context, |output| {
            Ok(activation_backward_to(self.activation, dactivated, hidden, output, None)?.0)
        })
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.linear.parameters(visit);
    }

    /// Calls `visit` for each parameter mutably, in the order of [`ActivatedLinear::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.linear.parameters_mut(visit);
    }

    /// Returns the linear after the activation.
    pub fn linear_mut(&mut self) -> &mut Linear {
        &mut self.linear
    }
}
