//! The shape of a layer: forward, what it saves, backward.

use crate::error::Result;
use crate::param::Param;
use crate::scaling::ScalingState;
use ottava_tensor::Tensor;

/// What layers need to know about the step beside their input.
pub struct Context<'a> {
    /// Scales and measurements of the FP8 casts.
    pub scaling: &'a mut ScalingState,
    /// Sequences in the micro-batch.
    pub batch: usize,
    /// Tokens per sequence; activations are `[batch · seq_len, …]`.
    pub seq_len: usize,
    /// Whether backward will follow, so that what it needs is made and kept.
    pub training: bool,
}

/// A differentiable function with parameters.
pub trait Layer {
    /// Exactly what backward needs.
    type Saved;

    /// The output for `x`, and what backward needs to know.
    fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, Self::Saved)>;

    /// The gradient by `x` from the gradient `dy` by the output; adds to the gradients of the parameters.
    fn backward(&mut self, dy: &Tensor, saved: Self::Saved, context: &mut Context) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));
}
