//! The shape of a layer: forward, what it saves, backward.

use crate::error::Result;
use crate::param::Param;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::{Frozen, ScalingState};
use ottava_tensor::ops::{Copies, Saved, compress};
use ottava_tensor::{QuantizedTensor, Tensor};

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
    /// What backward makes again instead.
    pub recompute: Recompute,
    /// How the rest is kept.
    pub saved_activations: SavedActivations,
}

impl Context<'_> {
    /// The copies of an FP8 operand that forward makes: backward contracts it over tokens, if it does not make it again.
    pub fn operand_copies(&self) -> Copies {
        if self.training && !self.recompute.operands() { Copies::Both } else { Copies::Rows }
    }

    /// Whether backward will have activations compressed.
    pub fn compresses(&self) -> bool {
        self.training && self.saved_activations == SavedActivations::Float8
    }

    /// What backward will have of an activation that it reads.
    pub fn save(&self, x: Tensor) -> Result<Saved> {
        Ok(if self.compresses() { Saved::Compressed(compress(&x)?) } else { Saved::Exact(x) })
    }
}

/// An operand of a linear layer's products: what a producer wrote, in the form that the linear's cast asks for.
pub enum GemmInput {
    /// The value; a linear that computes in FP8 casts it itself.
    Plain(Tensor),
    /// The value and its amax, F32 `[1]`, for a linear that casts it by a scale of its own.
    Measured(Tensor, Tensor),
    /// Its FP8 codes, written by the op that produced the value.
    Quantized(QuantizedTensor, Frozen),
    /// The value and its FP8 codes, for a linear with products of either kind.
    Both(Tensor, Box<QuantizedTensor>, Frozen),
}

impl GemmInput {
    /// The value, where there is one.
    pub fn value(&self) -> &Tensor {
        match self {
            GemmInput::Plain(x) | GemmInput::Measured(x, _) | GemmInput::Both(x, ..) => x,
            GemmInput::Quantized(..) => unreachable!("codes have no value beside them"),
        }
    }

    /// [`GemmInput::value`], by value.
    pub fn into_value(self) -> Tensor {
        match self {
            GemmInput::Plain(x) | GemmInput::Measured(x, _) | GemmInput::Both(x, ..) => x,
            GemmInput::Quantized(..) => unreachable!("codes have no value beside them"),
        }
    }

    /// The codes of an operand that has been cast.
    pub fn codes(&self) -> &QuantizedTensor {
        match self {
            GemmInput::Quantized(codes, _) => codes,
            GemmInput::Both(_, codes, _) => codes,
            GemmInput::Plain(_) | GemmInput::Measured(..) => {
                unreachable!("an operand is cast where its product reads codes")
            }
        }
    }

    /// The scale of its codes, if it has codes.
    pub fn into_frozen(self) -> Frozen {
        match self {
            GemmInput::Quantized(_, frozen) | GemmInput::Both(.., frozen) => frozen,
            GemmInput::Plain(_) | GemmInput::Measured(..) => Frozen::default(),
        }
    }

    /// What wgrad reads of it, once no other product needs it.
    pub fn for_wgrad(self) -> GemmInput {
        match self {
            GemmInput::Both(_, codes, frozen) if codes.transposed.is_some() => {
                GemmInput::Quantized(codes.only_transposed(), frozen)
            }
            GemmInput::Both(x, ..) => GemmInput::Plain(x),
            GemmInput::Quantized(codes, frozen) => GemmInput::Quantized(codes.only_transposed(), frozen),
            plain => plain,
        }
    }
}

impl From<Tensor> for GemmInput {
    fn from(x: Tensor) -> GemmInput {
        GemmInput::Plain(x)
    }
}

/// A differentiable function with parameters.
pub trait Layer {
    /// What it reads: a tensor, or an operand that may have been cast already.
    type Input: From<Tensor>;
    /// Exactly what backward needs.
    type Saved;

    /// The output for `x`, and what backward needs to know.
    fn forward(&self, x: Self::Input, context: &mut Context) -> Result<(Tensor, Self::Saved)>;

    /// The gradient by `x` from the gradient `dy` by the output; adds to the gradients of the parameters.
    fn backward(&mut self, dy: Self::Input, saved: Self::Saved, context: &mut Context) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));
}
