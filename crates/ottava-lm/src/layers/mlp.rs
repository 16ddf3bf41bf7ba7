//! The gated feed-forward layer.

use super::{Linear, LinearSaved, Smooth};
use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Param};
use crate::scaling::{Frozen, ScalingState, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Copies, Output, Saved, swiglu, swiglu_backward_to, swiglu_compressing, swiglu_to};

/// `y = down(silu(gate(x)) · up(x))`, with gate and up in one product.
pub struct Mlp {
    gate_up: Linear, /* [2F, C] */
    down: Linear,    /* [C, F] */
}

/// Saved by [`Mlp`].
pub struct MlpSaved {
    /// Its own input, which the norm before it may make again.
    pub input: LinearSaved,
    hidden: Saved, /* [T, 2F] */
    activated: Activated,
}

/// What backward has of the activation.
enum Activated {
    Linear(LinearSaved),
    Smooth(Smooth),
}

impl Mlp {
    /// An MLP from `channels` over `hidden` and back, with tensors called `name.gate_proj` and so on.
    pub fn new(build: &mut Builder, name: &str, channels: usize, hidden: usize, bias: bool, std: f32) -> Result<Mlp> {
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let gate_up = [part("gate_proj", hidden), part("up_proj", hidden)];
        Ok(Mlp {
            gate_up: Linear::new(build, &format!("{name}.gate_up_proj"), &gate_up, channels, bias, std)?,
            down: Linear::after_swiglu(
                build,
                &format!("{name}.down_proj"),
                &[part("down_proj", channels)],
                hidden,
                bias,
                std,
            )?,
        })
    }

    /// The slot that a producer of its input should write to.
    pub fn input_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        self.gate_up.input_slot(scaling)
    }

    /// Its input, as [`Linear::cast_input`] has it, once more.
    pub fn cast_input_again(&self, x: GemmInput, frozen: Frozen, scaling: &mut ScalingState) -> Result<GemmInput> {
        self.gate_up.cast_input(x, Copies::Columns, Some(frozen), scaling)
    }

    /// The slot that a producer of its output's gradient should measure for.
    pub fn gradient_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        self.down.gradient_slot(scaling)
    }

    /// [`Layer::forward`], plus `residual` `[T, C]` where there is one.
    pub fn forward_plus(
        &self,
        x: GemmInput,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, MlpSaved)> {
        let (hidden, input) = self.gate_up.forward(x, context)?;
        if self.down.is_smooth(context.scaling) {
            let (activated, hidden) = (swiglu(&hidden)?, context.save(hidden)?);
            let (y, smooth) = self.down.forward_smooth(activated, residual, context.scaling)?;
            return Ok((y, MlpSaved { input, hidden, activated: Activated::Smooth(smooth) }));
        }
        let (activated, hidden) = self.activate(hidden, context)?;
        let (y, activated) = self.down.forward_plus(activated, residual, context)?;
        Ok((y, MlpSaved { input, hidden, activated: Activated::Linear(activated) }))
    }

    /// What [`Mlp::forward_plus`] saves, without its output and, mostly, without the product that makes it.
    pub fn save(&self, x: GemmInput, context: &mut Context) -> Result<MlpSaved> {
        if self.down.is_smooth(context.scaling) {
            return Ok(self.forward_plus(x, None, context)?.1);
        }
        let (hidden, input) = self.gate_up.forward(x, context)?;
        let (activated, hidden) = self.activate(hidden, context)?;
        Ok(MlpSaved { input, hidden, activated: Activated::Linear(self.down.save(activated, context)?) })
    }

    /// SwiGLU of `hidden` as `down` reads it, and what backward has of `hidden`.
    fn activate(&self, hidden: Tensor, context: &mut Context) -> Result<(GemmInput, Saved)> {
        // SwiGLU's backward makes the transposed codes by the way, so forward never does.
        let (slot, copies) = (self.down.input_slot(context.scaling), Copies::Rows);
        let compresses = context.compresses();
        let (activated, compressed) = context.scaling.produce(slot, copies, |output| {
            if compresses && !matches!(output, Output::Amax { .. }) {
                let (activated, hidden) = swiglu_compressing(&hidden, output)?;
                return Ok((activated, Some(hidden)));
            }
            Ok((swiglu_to(&hidden, output)?, None))
        })?;
        Ok((activated, compressed.map_or_else(|| Saved::Exact(hidden), Saved::Compressed)))
    }

    /// The gradient by `hidden`, of a gradient `dy` that `down` has cast.
    fn backward_activated(
        &mut self,
        dy: GemmInput,
        hidden: Saved,
        activated: LinearSaved,
        context: &mut Context,
    ) -> Result<GemmInput> {
        let slot = self.down.input_slot(context.scaling);
        let dactivated = self.down.dgrad(&dy, context.scaling)?;
        let dy = dy.for_wgrad();
        let gradient = self.gate_up.gradient_slot(context.scaling);
        let (dhidden, activated) = match (activated, slot) {
            // The pass that makes the gradient has all that the activation is made of in its hands.
            (LinearSaved::Dropped(frozen), Some(slot)) => {
                context.scaling.produce_beside(gradient, slot, &frozen, |output, activated| {
                    Ok(swiglu_backward_to(&dactivated, &hidden, output, activated)?)
                })?
            }
            (activated, _) => {
                let activated = activated.operand(|frozen| {
                    let activated = swiglu(&hidden.value()?)?.into();
                    self.down.cast_input(activated, Copies::Columns, Some(frozen), context.scaling)
                })?;
                let (dhidden, ()) = context.scaling.produce(gradient, Copies::Both, |output| {
                    Ok((swiglu_backward_to(&dactivated, &hidden, output, None)?.0, ()))
                })?;
                (dhidden, activated)
            }
        };
        drop((hidden, dactivated));
        self.down.wgrad(&dy, &activated, context.scaling)?;
        Ok(dhidden)
    }

    /// The same, where `down` scaled the columns of its input.
    fn backward_smooth(
        &mut self,
        dy: GemmInput,
        hidden: Saved,
        smooth: Smooth,
        context: &mut Context,
    ) -> Result<GemmInput> {
        let dactivated = self.down.dgrad_smooth(&dy, &smooth, context.scaling)?;
        let dy = dy.for_wgrad();
        let gradient = self.gate_up.gradient_slot(context.scaling);
        let (dhidden, ()) = context.scaling.produce(gradient, Copies::Both, |output| {
            Ok((swiglu_backward_to(&dactivated, &hidden, output, None)?.0, ()))
        })?;
        drop(dactivated);
        let activated = swiglu(&hidden.value()?)?;
        drop(hidden);
        self.down.wgrad_smooth(&dy, &activated, &smooth, context.scaling)?;
        Ok(dhidden)
    }
}

impl Layer for Mlp {
    type Input = GemmInput;
    type Saved = MlpSaved;

    fn forward(&self, x: GemmInput, context: &mut Context) -> Result<(Tensor, MlpSaved)> {
        self.forward_plus(x, None, context)
    }

    fn backward(&mut self, dy: GemmInput, saved: MlpSaved, context: &mut Context) -> Result<Tensor> {
        let dy = self.down.cast_gradient(dy, context.scaling)?;
        let dhidden = match saved.activated {
            Activated::Linear(activated) => self.backward_activated(dy, saved.hidden, activated, context)?,
            Activated::Smooth(smooth) => self.backward_smooth(dy, saved.hidden, smooth, context)?,
        };
        self.gate_up.backward(dhidden, saved.input, context)
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.gate_up.parameters(visit);
        self.down.parameters(visit);
    }
}
