//! The gated feed-forward layer.

use super::{Linear, LinearSaved};
use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Param};
use crate::scaling::Slot;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Copies, swiglu_backward_to, swiglu_to};

/// `y = down(silu(gate(x)) · up(x))`, with gate and up in one product.
pub struct Mlp {
    gate_up: Linear, /* [2F, C] */
    down: Linear,    /* [C, F] */
}

/// Saved by [`Mlp`].
pub struct MlpSaved {
    gate_up: LinearSaved,
    hidden: Tensor, /* [T, 2F] */
    down: LinearSaved,
}

impl Mlp {
    /// An MLP from `channels` over `hidden` and back, with tensors called `name.gate_proj` and so on.
    pub fn new(build: &mut Builder, name: &str, channels: usize, hidden: usize, bias: bool, std: f32) -> Result<Mlp> {
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let gate_up = [part("gate_proj", hidden), part("up_proj", hidden)];
        Ok(Mlp {
            gate_up: Linear::new(build, &format!("{name}.gate_up_proj"), &gate_up, channels, bias, std)?,
            down: Linear::new(build, &format!("{name}.down_proj"), &[part("down_proj", channels)], hidden, bias, std)?,
        })
    }

    /// The linears, for [`Linear::quantize_weight`].
    pub fn linears(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate_up, &mut self.down]
    }
}

impl Mlp {
    /// The slot that a producer of its input should write to.
    pub fn input_slot(&self) -> Option<Slot> {
        self.gate_up.input_slot()
    }
}

impl Layer for Mlp {
    type Input = GemmInput;
    type Saved = MlpSaved;

    fn forward(&self, x: GemmInput, context: &mut Context) -> Result<(Tensor, MlpSaved)> {
        let (hidden, gate_up) = self.gate_up.forward(x, context)?;
        let (slot, copies) = (self.down.input_slot(), context.input_copies());
        let (activated, ()) = context.scaling.produce(slot, copies, |output| Ok((swiglu_to(&hidden, output)?, ())))?;
        let (y, down) = self.down.forward(activated, context)?;
        Ok((y, MlpSaved { gate_up, hidden, down }))
    }

    fn backward(&mut self, dy: GemmInput, saved: MlpSaved, context: &mut Context) -> Result<Tensor> {
        let dactivated = self.down.backward(dy, saved.down, context)?;
        let (dhidden, ()) = context.scaling.produce(self.gate_up.gradient_slot(), Copies::Both, |output| {
            Ok((swiglu_backward_to(&dactivated, &saved.hidden, output, None)?.0, ()))
        })?;
        drop((saved.hidden, dactivated));
        self.gate_up.backward(dhidden, saved.gate_up, context)
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.gate_up.parameters(visit);
        self.down.parameters(visit);
    }
}
